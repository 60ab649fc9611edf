"""What a run needs at its end is tried before training: a recipe never trains to its end and fails at the export."""

import dataclasses
import io

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from rich.console import Console

from tfopt.data import arrays
from tfopt.data.config import DataConfig
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.exporting import ExportConfig
from tfopt.exporting.export import check_export
from tfopt.quantization import QuantizationConfig
from tfopt.recipe import ModelConfig, Recipe
from tfopt.runner import run
from tfopt.training import TrainingConfig

QUANTIZED = QuantizationConfig(calibration_examples=16)
AWARE = QuantizationConfig(training=True, epochs=1)


class Draws(layers.Layer):
    def build(self, shape):
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seed_generator)


class Subclassed(keras.Model):
    def __init__(self, head):
        super().__init__(name="mine")
        self.head = head

    def call(self, x):
        return self.head(x)


def random_at_inference(inputs, head):
    return keras.Model(inputs, head(Draws()(inputs)))


def python_function(inputs, head):
    own = layers.Lambda(
        lambda x: tf.ensure_shape(tf.py_function(abs, [x], tf.float32), x.shape), output_shape=inputs.shape[1:]
    )
    return keras.Model(inputs, head(own(inputs)))


def reads_a_file(inputs, head):
    own = layers.Lambda(lambda x: x + tf.cast(tf.strings.length(tf.io.read_file("/dev/null")), x.dtype))
    return keras.Model(inputs, head(own(inputs)))


def subclassed(inputs, head):
    model = Subclassed(head)
    model(np.zeros((1, *inputs.shape[1:])))
    model.inputs, model.outputs = [inputs], [head(inputs)]
    return model


def not_a_number(inputs, head):
    return keras.Model(inputs, head(keras.ops.log(inputs - 100.0)))


def recipe(build, tmp_path, quantization=None, export=True):
    trained = []

    def builder(input_shape, outputs):
        model = build(keras.Input(input_shape), layers.Dense(outputs))
        trained.append(model)
        return model

    x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int64")
    return trained, Recipe(
        name="tried",
        model=ModelConfig(builder=builder),
        data=DataConfig(source=lambda: arrays(x, y, outputs=2)),
        training=TrainingConfig(epochs=1, global_batch_size=16, precision="float32"),
        quantization=quantization,
        int8_nodes="all",
        export_dir=str(tmp_path / "out") if export else None,
    )


def quiet():
    return Console(file=io.StringIO())


@pytest.mark.parametrize(
    ("build", "quantization", "message"),
    [
        (random_at_inference, None, "must not depend on a variable"),
        (python_function, None, "touches Python"),
        (reads_a_file, QUANTIZED, "touches files"),
        (subclassed, AWARE, "functional or Sequential"),
        (not_a_number, None, "holds NaN"),
    ],
    ids=["random", "python", "file", "subclassed", "nan"],
)
def test_a_model_that_cannot_be_exported_is_refused_before_it_is_trained(build, quantization, message, tmp_path):
    models, tried = recipe(build, tmp_path, quantization)
    with pytest.raises(UnsupportedModelError, match=message):
        run(tried, console=quiet())
    assert not models[0].compiled
    assert not (tmp_path / "out" / "float32").exists()


def test_an_op_that_a_format_does_not_have_is_known_before_the_training(tmp_path):
    def build(inputs, head):
        decomposed = keras.ops.qr(layers.Reshape((2, 2))(inputs))[1]
        return keras.Model(inputs, head(layers.Flatten()(decomposed)))

    models, tried = recipe(build, tmp_path)
    with pytest.raises(UnsupportedModelError, match="Every op of a model in ONNX"):
        run(dataclasses.replace(tried, formats=("saved_model", "onnx")), console=quiet())
    assert not models[0].compiled
    assert not (tmp_path / "out" / "float32").exists()


def test_what_int8_cannot_exclude_is_known_before_the_training(tmp_path):
    models, tried = recipe(
        lambda inputs, head: keras.Model(inputs, head(inputs)), tmp_path, QuantizationConfig(exclude=("no_such_layer",))
    )
    with pytest.raises(ConfigError, match="no_such_layer"):
        run(tried, console=quiet())
    assert not models[0].compiled


def dropping(inputs, head):
    return keras.Model(inputs, head(layers.Dropout(0.5)(layers.Dense(8)(inputs))))


def test_the_trial_changes_neither_the_model_nor_the_random_numbers(tmp_path, monkeypatch):
    """The loss is the same with the trial and without it."""
    losses = []
    for tries in (True, False):
        if not tries:
            monkeypatch.setattr("tfopt.runner.recipe_run.rehearse", lambda *_, **__: None)
        _, tried = recipe(dropping, tmp_path, QUANTIZED, export=False)
        losses.append(run(tried, console=quiet()).report.phases[0].history["loss"])
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_int8_values_that_fade_in_an_untrained_model_end_no_run():
    """The signal of a deep model may be some 1e-12 before it is trained, which LiteRT's steps do not hold."""
    x = np.random.default_rng(0).random((16, 8, 8, 3), np.float32)
    fading = keras.initializers.RandomNormal(stddev=1e-4, seed=1)
    model = keras.Sequential(
        [keras.Input((8, 8, 3))]
        + [layers.Conv2D(8, 3, activation="relu", use_bias=False, kernel_initializer=fading) for _ in range(3)]
        + [layers.GlobalAveragePooling2D(), layers.Dense(2, use_bias=False)]
    )
    config = ExportConfig(format="litert", precision="int8", int8_nodes="all")
    check_export(model, config, x)
    check_export(model, ExportConfig(format="litert"), x)
