"""A training that is resumed with other settings warns which setting is used, or is refused."""

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

from tfopt.errors import ArtifactError, ConfigError, TfoptWarning
from tfopt.pruning import PruningConfig, PruningSchedule
from tfopt.training import TrainingConfig, compile, plan

X = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


class Stop(Exception):
    pass


def train(
    directory,
    *,
    rate=0.1,
    epochs=1,
    stop_after=None,
    callbacks=(),
    optimizer=None,
    loss="mse",
    metrics=(),
    zeros=0.0,
    initial_epoch=0,
    **settings,
):
    config = TrainingConfig(
        **{"checkpoint_dir": str(directory), "global_batch_size": 8, "steps_per_execution": 1, **settings}
    )
    decided = plan(config)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    compile(model, decided, optimizer=optimizer or keras.optimizers.SGD(rate), loss=loss, metrics=list(metrics))

    def stop(batch, logs):
        if batch + 1 == stop_after:
            raise Stop

    pruning = [PruningSchedule(model, PruningConfig(target_sparsity=zeros, frequency=1))] if zeros else []
    callbacks = [*callbacks, *pruning, keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    model.fit(decided.pipeline((X, Y)), epochs=epochs, initial_epoch=initial_epoch, verbose=0, callbacks=callbacks)
    return model


def rate_of(model):
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


@pytest.fixture(scope="module")
def trained_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained") / "run"
    train(directory)
    return directory


@pytest.fixture
def one_epoch(trained_directory, tmp_path):
    """The directory of a training of one epoch, for one test."""
    return Path(shutil.copytree(trained_directory, tmp_path / "run"))


@pytest.fixture(scope="module")
def stopped_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stop):
        train(directory, stop_after=4, checkpoint_every=2)
    return directory


@pytest.fixture
def four_steps(stopped_directory, tmp_path):
    """The directory of a training that stopped within its first epoch, for one test."""
    return Path(shutil.copytree(stopped_directory, tmp_path / "run"))


def test_another_learning_rate_is_named_and_the_checkpoints_counts(one_epoch):
    with pytest.warns(TfoptWarning, match=r"stays 0\.1, .* compiled with 0\.001\. Set model\.optimizer"):
        model = train(one_epoch, rate=0.001, epochs=2)
    assert rate_of(model) == pytest.approx(0.1)


def test_a_callback_changes_the_learning_rate_as_the_warning_says(four_steps):
    lower = keras.callbacks.LambdaCallback()
    lower.on_train_begin = lambda logs: lower.model.optimizer.learning_rate.assign(0.001)
    model = train(four_steps, rate=0.1, epochs=2, callbacks=[lower])
    assert rate_of(model) == pytest.approx(0.001)


def test_other_batches_are_refused_within_an_epoch(four_steps):
    before = sorted(path.name for path in four_steps.iterdir())
    with pytest.raises(ArtifactError, match=r"an epoch of 12 steps, .* at step 4 of 6\. Set global_batch_size"):
        train(four_steps, global_batch_size=4)
    assert sorted(path.name for path in four_steps.iterdir()) == before


def test_other_batches_are_named_between_epochs(one_epoch):
    with pytest.warns(TfoptWarning, match="an epoch has 12 steps and had 6"):
        train(one_epoch, epochs=2, global_batch_size=4)


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        # Each has variables of the same shapes as the other.
        (
            {"optimizer": keras.optimizers.Adam},
            {"optimizer": keras.optimizers.AdamW},
            "optimizer is AdamW and was Adam",
        ),
        ({"metrics": ["mae"]}, {"metrics": ["mse"]}, "the metrics are loss, m.* and were loss, m"),
        ({"loss": "mse"}, {"loss": "mae"}, "the loss is mean_absolute_error and was mean_squared_error"),
    ],
)
def test_another_optimizer_metric_or_loss_is_refused_within_an_epoch(tmp_path, before, now, words):
    with pytest.raises(Stop):
        train(tmp_path, stop_after=4, checkpoint_every=2, **_made(before))
    files = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ArtifactError, match=words):
        train(tmp_path, **_made(now))
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def _made(settings):
    return {name: value() if name == "optimizer" else value for name, value in settings.items()}


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"loss": "mae"}, "the loss is mean_absolute_error and was mean_squared_error"),
        ({"optimizer": keras.optimizers.SGD(0.1, clipnorm=1.0)}, "clipnorm is 1.0 and was None"),
    ],
)
def test_another_loss_or_setting_of_the_optimizer_is_named_between_epochs(one_epoch, now, words):
    with pytest.warns(TfoptWarning, match=words):
        train(one_epoch, epochs=2, **now)


def test_the_same_loss_and_metrics_in_other_words_are_the_same(tmp_path, recwarn):
    train(tmp_path, metrics=["mae", keras.metrics.AUC()])
    train(tmp_path, epochs=2, loss=keras.losses.MeanSquaredError(), metrics=["mae", keras.metrics.AUC()])
    assert not [each for each in recwarn if each.category is TfoptWarning]


def test_a_finished_training_is_not_said_to_have_the_zeros_of_another_target(tmp_path):
    train(tmp_path, zeros=0.5)
    refused = pytest.raises(ArtifactError, match=r"75\.0% zeros in 1 masks, .* 50\.0% in .* Raise epochs")
    with pytest.warns(TfoptWarning, match="nothing to train"), refused:
        train(tmp_path, zeros=0.75)
    with pytest.warns(TfoptWarning, match="nothing to train"):
        assert (train(tmp_path, zeros=0.5).get_weights()[0] == 0).mean() == 0.5
    assert (train(tmp_path, zeros=0.75, epochs=2).get_weights()[0] == 0).mean() == 0.75


def test_a_directory_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    steps = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    with pytest.raises(ConfigError, match="checkpoint_dir must be a directory that can be written"):
        train("/proc/checkpoints", callbacks=[count])
    assert not steps


def test_a_training_that_began_at_a_later_epoch_goes_on_in_it(tmp_path):
    begun = []
    note = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))
    settings = {"epochs": 4, "checkpoint_every": 2, "callbacks": [note]}
    with pytest.raises(Stop):
        train(tmp_path, stop_after=4, initial_epoch=3, **settings)
    model = train(tmp_path, **settings)
    assert begun == [3, 3]
    assert model.optimizer.iterations.numpy() == 6
