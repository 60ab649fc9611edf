"""A training that is resumed with other settings warns which setting is used, or is refused."""

import keras
import numpy as np
import pytest

from tfopt.errors import ArtifactError, TfoptWarning
from tfopt.training import TrainingConfig, compile, plan

X = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


class Stop(Exception):
    pass


def train(directory, *, rate=0.1, epochs=1, stop_after=None, callbacks=(), **settings):
    config = TrainingConfig(
        **{"checkpoint_dir": str(directory), "global_batch_size": 8, "steps_per_execution": 1, **settings}
    )
    decided = plan(config)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    compile(model, decided, optimizer=keras.optimizers.SGD(rate), loss="mse")

    def stop(batch, logs):
        if batch + 1 == stop_after:
            raise Stop

    callbacks = [*callbacks, keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    model.fit(decided.pipeline((X, Y)), epochs=epochs, verbose=0, callbacks=callbacks)
    return model


def rate_of(model):
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def test_another_learning_rate_is_named_and_the_checkpoints_counts(tmp_path):
    train(tmp_path, rate=0.1)
    with pytest.warns(TfoptWarning, match=r"stays 0\.1, .* compiled with 0\.001\. Set model\.optimizer"):
        model = train(tmp_path, rate=0.001, epochs=2)
    assert rate_of(model) == pytest.approx(0.1)


def test_a_callback_changes_the_learning_rate_as_the_warning_says(tmp_path):
    with pytest.raises(Stop):
        train(tmp_path, rate=0.1, stop_after=4, checkpoint_every=2)
    lower = keras.callbacks.LambdaCallback()
    lower.on_train_begin = lambda logs: lower.model.optimizer.learning_rate.assign(0.001)
    model = train(tmp_path, rate=0.1, epochs=2, callbacks=[lower])
    assert rate_of(model) == pytest.approx(0.001)


def test_other_batches_are_refused_within_an_epoch(tmp_path):
    with pytest.raises(Stop):
        train(tmp_path, stop_after=4, checkpoint_every=2)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ArtifactError, match=r"an epoch of 12 steps, .* at step 4 of 6\. Set global_batch_size"):
        train(tmp_path, global_batch_size=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_other_batches_are_named_between_epochs(tmp_path):
    train(tmp_path)
    with pytest.warns(TfoptWarning, match="an epoch has 12 steps and had 6"):
        train(tmp_path, epochs=2, global_batch_size=4)


def test_a_training_that_is_done_says_so(tmp_path):
    done = train(tmp_path, epochs=2)
    with pytest.warns(TfoptWarning, match=r"nothing to train: .* reached epoch 2 of 2 before"):
        again = train(tmp_path, epochs=2)
    np.testing.assert_array_equal(again.get_weights()[0], done.get_weights()[0])
    assert again.history.history == done.history.history
