"""Quantization-aware training in every cell of the runtime: the same ranges, as far as it computes the same."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfopt
from tfopt.exporting import ExportConfig
from tfopt.quantization import QuantizationConfig, quantize
from tfopt.quantization.aware_training.fake_quant import FakeQuantize
from tfopt.training import TrainingConfig, plan

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 8, 8, 3)).astype("float32")
Y = (X.mean((1, 2, 3)) > 0).astype("int32")
BATCH = 16
PLAIN = {
    "strategy": "none",
    "precision": "float32",
    "jit_compile": False,
    "steps_per_execution": 1,
    "global_batch_size": BATCH,
}


class Interrupted(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() >= 5:
            raise Interrupted


def train(*, learned=False, batch_norm=False, callbacks=(), epochs=3, **settings):
    """Two convolutions and a product; without batch norm micro-batches compute what the whole batch does."""
    decided = plan(TrainingConfig(**{**PLAIN, **settings}))
    keras.utils.set_random_seed(0)
    with decided.scope():
        inputs = keras.Input((8, 8, 3), name="image")
        x = layers.Conv2D(6, 3, activation=None if batch_norm else "relu")(inputs)
        x = layers.ReLU()(layers.BatchNormalization()(x)) if batch_norm else x
        x = layers.Flatten()(layers.Conv2D(4, 3, activation="relu")(x))
        model = keras.Model(inputs, layers.Dense(2, dtype="float32")(x))
        # Calls are counted, of which micro-batches make more.
        freeze = {"freeze_ranges_after": 7, "freeze_batch_norm_after": 6} if batch_norm else {}
        config = QuantizationConfig(training=True, learned_ranges=learned, **freeze)
        model = quantize(model, config, calibration_data=X)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tfopt.compile(model, decided, optimizer=keras.optimizers.Adam(3e-3), loss=loss)
    batches = decided.pipeline((X, Y)) if "checkpoint_dir" in settings else decided.pipeline((X, Y), training=False)
    history = model.fit(batches, epochs=epochs, verbose=0, callbacks=list(callbacks)).history
    return model, history.get("loss")


def limits(model):
    return np.array([layer.limit.numpy() for layer in model.layers if isinstance(layer, FakeQuantize)])


@functools.cache
def on_one_device(learned):
    return train(learned=learned)


@functools.cache
def untrained():
    return train(epochs=0)[0]


CELLS = {
    "steps": ({"steps_per_execution": 3}, False),
    "bfloat16": ({"precision": "mixed_bfloat16"}, True),
    "micro-batches": ({"accumulate": 2}, True),
    "xla": ({"jit_compile": True}, False),
    "mirrored": ({"strategy": "mirrored"}, True),
    "mirrored, float16, micro-batches": (
        {"strategy": "mirrored", "precision": "mixed_float16", "accumulate": 2},
        False,
    ),
    "mirrored, xla, steps": ({"strategy": "mirrored", "jit_compile": True, "steps_per_execution": 3}, True),
}


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_trains_the_same_ranges_and_exports(cell, two_replicas, tmp_path):
    settings, learned = CELLS[cell]
    strategy = {"strategy": two_replicas} if "strategy" in settings else {}
    model, losses = train(learned=learned, **{**settings, **strategy})
    expected, expected_losses = on_one_device(learned)
    half = "precision" in settings
    # A moving average of the largest value sees a part's largest in place of the batch's, and so ends below it.
    averages_parts = not learned and ("accumulate" in settings or "strategy" in settings)
    np.testing.assert_allclose(limits(model), limits(expected), rtol=0.1 if half or averages_parts else 5e-3)
    np.testing.assert_allclose(losses, expected_losses, rtol=0.03 if half or averages_parts else 5e-3)
    assert losses[-1] < losses[0]
    assert not np.allclose(limits(model), limits(untrained()), rtol=1e-6)
    artifact = tfopt.export(model, tmp_path / "int8", ExportConfig(precision="int8", int8_nodes="all"))
    assert len(artifact.report.changed) == 3
    serve = tf.saved_model.load(str(tmp_path / "int8")).signatures["serving_default"]
    found = next(iter(serve(image=tf.constant(X)).values())).numpy()
    wanted = np.asarray(model(X))
    assert np.abs(found - wanted).max() < (0.05 if half else 0.02) * np.abs(wanted).max()


@pytest.mark.slow
def test_replicas_average_their_ranges_and_hold_the_same(two_replicas):
    model, _ = train(strategy=two_replicas, epochs=1)
    for layer in model.layers:
        if isinstance(layer, FakeQuantize):
            one, other = (value.numpy() for value in layer.limit.value.values)
            assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("learned", [False, True])
def test_an_interrupted_training_resumes_with_its_ranges_bit_for_bit(learned, tmp_path):
    settings = {"learned": learned, "batch_norm": True, "checkpoint_every": 2}
    undisturbed, losses = train(checkpoint_dir=str(tmp_path / "one"), **settings)
    with pytest.raises(Interrupted):
        train(checkpoint_dir=str(tmp_path / "two"), callbacks=[Interrupt()], **settings)
    resumed, resumed_losses = train(checkpoint_dir=str(tmp_path / "two"), **settings)
    for one, other in zip(resumed.variables, undisturbed.variables, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes(), one.path
    assert resumed_losses[-1] == losses[-1]
