"""Losses and metrics in which examples meet are refused or named where a batch is divided."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tfopt.errors import ConfigError
from tfopt.training import TrainingConfig, compile, plan
from tfopt.training.distributed.whole_batch import adds_up

RNG = np.random.default_rng(0)


def pairs(y, y_pred):
    """Pulls examples of one class together."""
    distance = ops.mean(ops.square(y_pred[:, None] - y_pred[None]), -1)
    same = ops.equal(ops.reshape(y, (-1, 1)), ops.reshape(y, (1, -1)))
    return ops.mean(ops.where(same, distance, -distance))


def normed(y, y_pred):
    """Has a value for each example, which depends on the others."""
    return ops.mean(ops.square(y - (y_pred - ops.mean(y_pred, 0))), -1)


def over_labelled(y, y_pred):
    labelled = ops.cast(ops.not_equal(y, -1), "float32")
    return ops.sum(labelled * ops.square(y - y_pred)) / ops.maximum(ops.sum(labelled), 1.0)


def over_finite(y, y_pred):
    labelled = ops.isfinite(y)
    return ops.sum(ops.where(labelled, ops.square(y_pred), 0.0)) / ops.sum(ops.cast(labelled, "float32"))


def over_labels_but_100(y, y_pred):
    labelled = ops.cast(ops.not_equal(y, -100), "float32")
    return ops.sum(labelled * ops.square(y_pred)) / ops.maximum(ops.sum(labelled), 1.0)


def root_of_mean(y, y_pred):
    return ops.sqrt(ops.mean(ops.square(y - y_pred)))


def noisy(y, y_pred):
    warnings.warn("too noisy", stacklevel=1)
    return ops.mean(ops.square(y - y_pred + tf.random.normal(tf.shape(y_pred))), -1)


def hinge(y, y_pred):
    return keras.losses.hinge(y, y_pred)  # reads 0 and 1 unlike -1, 0 and 1


def mean(y, y_pred):
    return tf.reduce_mean(tf.square(y - y_pred))


class MeanOf(keras.losses.Loss):
    def __init__(self, function):
        super().__init__()
        self.call = function


class CountsCalls(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.calls = keras.Variable(0.0, trainable=False)

    def call(self, y, y_pred):
        self.calls.assign_add(1.0)
        return ops.mean(ops.square(y - y_pred), -1) / self.calls


class Composite(keras.losses.Loss):
    def call(self, y, y_pred):
        inner = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
        return 2 * inner(y, y_pred) + ops.mean(ops.square(y_pred))


@pytest.mark.parametrize(
    ("loss", "y", "y_pred", "expected"),
    [
        (keras.losses.Dice(), (None, 8), (None, 8), False),
        (keras.losses.Dice(axis=(1,)), (None, 8), (None, 8), True),
        (keras.losses.Circle(), (None,), (None, 8), False),
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), (None, 5), (None, 5, 9), True),
        (keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), (None, 5), (None, 5), True),
        (Composite(), (None, 5), (None, 5, 9), True),
        (keras.losses.CosineSimilarity(axis=0), (None, 8), (None, 8), False),
        (MeanOf(over_labelled), (None, 3), (None, 3), False),
        (MeanOf(over_labelled), (None, 12), (None, 12), False),
        (MeanOf(over_finite), (None, 4), (None, 4), False),
        (MeanOf(over_labels_but_100), (None, 4), (None, 4), False),
        (MeanOf(root_of_mean), (None, 4), (None, 4), False),
        (MeanOf(hinge), (None, 1), (None, 1), True),
        (MeanOf(noisy), (None, 4), (None, 4), True),  # no two results of it are alike
    ],
)
def test_parts_add_up_or_not(loss, y, y_pred, expected):
    assert adds_up(loss, y, y_pred) is expected


def test_trying_a_loss_changes_none_of_its_variables_and_warns_of_nothing(recwarn):
    counted = CountsCalls()
    assert adds_up(counted, (None, 4), (None, 4)) is None
    assert counted.calls.numpy() == 0.0
    adds_up(MeanOf(noisy), (None, 4), (None, 4))

    assert not recwarn.list


def model_and_plan(strategy="none", units=3, **settings):
    decided = plan(TrainingConfig(strategy=strategy, precision="float32", global_batch_size=8, **settings))
    with decided.scope():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)]), decided


@pytest.mark.parametrize(
    ("loss", "name"),
    [("dice", "dice"), (keras.losses.Tversky(), "tversky"), (keras.losses.Circle(), "circle"), (normed, "normed")],
)
def test_a_loss_of_the_whole_batch_is_refused_before_the_model_is_compiled(loss, name):
    model, decided = model_and_plan(accumulate=4)
    with pytest.raises(ConfigError, match=f"Received: {name} with 4 micro-batches, a function of the whole batch"):
        compile(model, decided, loss=loss)
    assert not model.compiled
    model, decided = model_and_plan()
    compile(model, decided, loss=loss)  # nothing is divided


@pytest.mark.parametrize("loss", [pairs, over_labelled])
def test_what_depends_on_the_labels_is_refused_before_the_first_step(two_replicas, loss):
    class Net(keras.Model):
        """A model that does not know its outputs when it is compiled."""

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    decided = plan(TrainingConfig(strategy=two_replicas, precision="float32", global_batch_size=8))
    with decided.scope():
        model = Net()
    compile(model, decided, loss=loss)
    data = decided.pipeline((RNG.normal(size=(16, 4)).astype("float32"), RNG.integers(0, 2, (16, 1)).astype("float32")))
    with pytest.raises(ConfigError, match=f"Received: {loss.__name__} with 2 replicas, a function of the whole"):
        model.fit(data, verbose=0)
    assert int(ops.convert_to_numpy(model.optimizer.iterations)) == 0


def test_a_number_that_sample_weights_would_multiply_is_refused():
    model, decided = model_and_plan(units=1, accumulate=2)
    compile(model, decided, loss=mean)
    x, y, weights = np.ones((8, 4), "float32"), np.ones((8, 1), "float32"), np.arange(8, dtype="float32")
    model.fit(x, y, batch_size=8, verbose=0)
    compile(model, decided, loss=mean)
    with pytest.raises(ConfigError, match="which sample_weight and class_weight can weight"):
        model.fit(x, y, sample_weight=weights, batch_size=8, verbose=0)


class Largest(keras.metrics.Metric):
    """The mean over batches of the largest error."""

    def __init__(self):
        super().__init__(name="largest")
        self.mean = keras.metrics.Mean()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.mean.update_state(ops.max(ops.abs(y_true - y_pred)))

    def result(self):
        return self.mean.result()


def test_metrics_of_the_whole_batch_are_named_in_the_report():
    model, decided = model_and_plan(accumulate=4)
    exact = ["mae", keras.metrics.MeanSquaredError(), keras.metrics.AUC(), keras.metrics.R2Score()]
    report = compile(model, decided, loss="mse", metrics=[*exact, keras.losses.dice, Largest()])
    assert [skip.name for skip in report.skipped if skip.kind == "metric"] == ["dice", "largest"]
    assert "with 4 micro-batches, the mean over the parts" in report.skipped[0].reason
    assert not compile(*model_and_plan(), loss="mse", metrics=[keras.losses.dice]).skipped


class WithOwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def test_an_own_compute_loss_is_named_in_the_report():
    decided = plan(TrainingConfig(precision="float32", accumulate=2))
    report = compile(WithOwnLoss([keras.Input((4,)), keras.layers.Dense(1)]), decided, loss="mse")
    assert "compute_loss must average over examples" in report.skipped[0].reason


class WithOwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def test_a_loss_that_is_divided_by_the_replicas_is_named_in_the_report(two_replicas):
    decided = plan(TrainingConfig(strategy=two_replicas, precision="float32"))
    with decided.scope():
        model = WithOwnStep([keras.Input((4,)), keras.layers.Dense(1)])
    assert "divides a loss by the 2 replicas" in compile(model, decided, loss="mse").skipped[0].reason
