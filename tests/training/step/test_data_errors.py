"""Data that does not fit the model is told by its shapes, names and values."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import ConfigError, TrainingError
from tfopt.training import TrainingConfig, compile, plan

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = np.zeros((16, 1), "float32")
CLASSES = (np.arange(16) % 3).astype("int32")


def decided(**settings):
    return plan(TrainingConfig(**{"precision": "float32", "global_batch_size": 8, "jit_compile": False, **settings}))


def classifier(**settings):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compile(model, decided(**settings), optimizer="sgd", loss=loss)
    return model


def two_outputs(**options):
    inputs = keras.Input((4,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("u", "v")}
    model = keras.Model(inputs, outputs)
    compile(model, decided(), optimizer="sgd", **options)
    return model


def test_labels_for_one_of_two_outputs_name_the_other():
    model = two_outputs(loss={"v": "mse"}, metrics={"u": ["mae"]})
    with pytest.raises(ConfigError, match="Received: labels for 'v', and none for 'u'"):
        model.fit(X, {"v": Y}, verbose=0)
    assert "u_mae" in model.fit(X, {"u": Y, "v": Y}, verbose=0).history


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (X[:, :2], CLASSES, r"inputs \(None, 2\) and labels \(None,\), for a model with inputs \(None, 4\)"),
        (X, np.zeros((16, 5)), r"labels \(None, 5\), for a model with inputs \(None, 4\) and outputs \(None, 3\)"),
        (X, None, "and labels none"),
    ],
)
def test_shapes_that_do_not_fit_are_told(x, y, words):
    with pytest.raises(ConfigError, match=words):
        classifier().fit(x, y, verbose=0)


def test_images_of_several_sizes_are_to_be_resized():
    images = tf.data.Dataset.range(4).map(lambda number: (tf.zeros((8 + number % 2, 8, 1)), number))
    model = keras.Sequential([keras.Input((None, None, 1)), keras.layers.GlobalMaxPooling2D(), keras.layers.Dense(1)])
    compile(model, decided(), loss="mse")
    with pytest.raises(ConfigError, match=r"one shape.*\[8,8,1\] and \[9,8,1\]\. Resize the images to one size before"):
        model.fit(decided().pipeline(images), verbose=0)


def test_shapes_of_a_later_call_are_told_as_well():
    model = classifier()
    model.fit(X, CLASSES, verbose=0)
    with pytest.raises(ConfigError, match=r"inputs \(None, 3\)"):
        model.evaluate(X[:, :3], CLASSES, verbose=0)
    with pytest.raises(ConfigError, match=r"labels \(8, 5\)"):
        model.train_on_batch(X[:8], np.zeros((8, 5)))


@pytest.mark.parametrize("label", [7, pytest.param(-1, marks=pytest.mark.slow)])
def test_a_label_out_of_range_is_named_with_the_range(label):
    labels = np.where(np.arange(16) == 5, label, CLASSES)
    model = classifier()
    message = rf"Labels must be class numbers, from 0 to 2 for 3 outputs. Received: {label}\."
    with pytest.raises(ConfigError, match=message):
        model.fit(X, labels, verbose=0)
    with pytest.raises(ConfigError, match=message):
        model.evaluate(X, labels, verbose=0)


def test_under_xla_the_loss_is_no_number_and_the_label_is_named():
    labels = np.where(np.arange(16) == 5, 7, CLASSES)
    prepared = decided(jit_compile=True)
    with pytest.raises(TrainingError, match="the label 7 is not a class number of the model, which are 0 to 2"):
        classifier(jit_compile=True).fit(prepared.pipeline((X, labels)), verbose=0)


def test_an_id_out_of_range_is_named():
    layers = [keras.layers.Embedding(10, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
    compile(model, decided(), loss="mse")
    with pytest.raises(ConfigError, match=r"Received: 12 in place \[\d+,1\] of a batch, with 10 rows"):
        model.fit(np.array([[1, 12, 1, 1]] * 16), Y, verbose=0)


def test_text_for_a_model_of_numbers_is_told():
    with pytest.raises(ConfigError, match=r"must be numbers where the model computes with them\. Received: text"):
        classifier().fit(decided().pipeline((X.astype(str), CLASSES)), verbose=0)


@pytest.mark.parametrize("dtype", ["U", "S", object])
def test_arrays_of_text_are_told_and_tensors_of_text_are_taken(dtype):
    words = np.array([["red"], ["blue"]] * 8, dtype)
    reads = keras.layers.StringLookup(vocabulary=["red", "blue"], output_mode="one_hot")
    model = keras.Sequential([keras.Input((1,), dtype="string"), reads, keras.layers.Dense(3)])
    compile(model, decided(), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer="sgd")
    with pytest.raises(ConfigError, match=r"must hold numbers\. Received: an array of dtype (str|bytes|object)"):
        model.fit(words, CLASSES, verbose=0)
    model.fit(tf.constant(words), CLASSES, verbose=0)


class Raising(keras.layers.Layer):
    def call(self, x):
        raise ValueError("a fault of the model")


def test_an_error_of_the_users_own_code_stays_what_it_is():
    model = keras.Sequential([Raising()])
    compile(model, decided(), loss="mse")
    with pytest.raises(ValueError, match="a fault of the model") as caught:
        model.fit(X, Y, verbose=0)
    assert not isinstance(caught.value, ConfigError)


class OwnCompile(keras.Sequential):
    """Takes few of Keras' arguments, has one of its own, and a loss of its own."""

    def compile(self, optimizer, margin, loss="mae"):
        super().compile(optimizer, loss)
        self.margin = margin


def test_an_own_compile_receives_what_it_takes():
    prepared = decided(steps_per_execution=2)
    model = OwnCompile([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ConfigError, match=r"missing a required argument: 'margin'\). Pass it to tfopt.compile"):
        compile(model, prepared)
    with pytest.raises(ConfigError, match=r"metrics must be an argument of OwnCompile.compile. Received: compile"):
        compile(model, prepared, metrics=["mae"], margin=1.0)
    assert not model.compiled
    compile(model, prepared, optimizer="sgd", margin=2.0)
    assert (model.margin, model.loss, model.steps_per_execution, model.jit_compile) == (2.0, "mae", 2, False)
    assert np.isfinite(model.fit(prepared.pipeline((X, Y)), verbose=0).history["loss"][0])
