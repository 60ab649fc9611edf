"""Copies of models: all state goes over; a copy that computes something else is refused by the name of its layer."""

import json
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.errors import TfoptWarning, UnsupportedLayerError, UnsupportedModelError
from tfopt.models.copying import copy_model
from tfopt.models.float32_outputs import float32_outputs
from tfopt.pruning import PruningConfig, ShrinkSchedule, StructuredPruningConfig, prune, shrink
from tfopt.quantization import QuantizationConfig, quantize

X = (np.random.default_rng(0).normal(size=(32, 8)) * 30 + 500).astype("float32")
WORDS = np.array([["good movie"], ["bad film"], ["good film"], ["unknown"]])
NUMBERS = np.array([[7], [9], [12], [9]])
FAR = StructuredPruningConfig(ratio=1e-4)  # a ratio at which every channel stays


def adapted(layer, data=X):
    layer.adapt(data)
    return layer


def dense_after(*first):
    return keras.Sequential([keras.Input((8,)), *first, layers.Dense(16, "relu"), layers.Dense(3)])


def after_table(table, data):
    """A model that gets the vectors, or the numbers, of a look-up layer."""
    inputs = keras.Input(data.shape[1:], dtype="string" if data.dtype.kind == "U" else data.dtype)
    found = table(inputs)
    vectors = layers.Embedding(40, 8)(found) if found.dtype == "int64" else keras.ops.cast(found, "float32")
    return keras.Model(inputs, layers.Dense(3)(layers.Dense(16, "relu")(layers.Flatten()(vectors))))


def distance(model, other, inputs):
    """The largest difference of outputs, relative to the largest output."""
    expected, received = (each(tf.constant(inputs)).numpy() for each in (model, other))
    return np.abs(expected - received).max() / np.abs(expected).max()


@pytest.mark.filterwarnings("ignore:shrink changed nothing")
def test_an_adapted_normalization_stays_adapted_in_every_pass():
    model = dense_after(adapted(layers.Normalization()))
    assert distance(model, copy_model(model), X) == 0
    assert distance(model, shrink(model, FAR).model, X) == 0
    trained = quantize(model, QuantizationConfig(training=True), calibration_data=X)
    assert distance(model, trained, X) < 0.1
    quantized = quantize(model, keras.quantizers.Int8QuantizationConfig()).model
    assert distance(model, quantized, X) < 0.1


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("table", "data"),
    [
        (lambda: layers.StringLookup(), WORDS),
        (lambda: layers.StringLookup(output_mode="tf_idf"), WORDS),
        (lambda: layers.StringLookup(vocabulary=["good film", "bad film"]), WORDS),
        (lambda: layers.TextVectorization(output_sequence_length=4), WORDS),
        (lambda: layers.TextVectorization(output_mode="tf_idf"), WORDS),
        (lambda: layers.IntegerLookup(output_mode="multi_hot"), NUMBERS),
        (lambda: layers.Discretization(num_bins=4, output_mode="one_hot"), X[:, :1]),
        (lambda: layers.CategoryEncoding(num_tokens=20), NUMBERS),
        (lambda: layers.Hashing(num_bins=20), WORDS),
    ],
)
def test_look_up_layers_keep_their_tables(table, data):
    made = table()
    if hasattr(made, "adapt") and not getattr(made, "input_vocabulary", None):
        made.adapt(data)
    model = after_table(made, data)
    assert distance(model, copy_model(model), data) == 0
    smaller = shrink(model, StructuredPruningConfig(ratio=0.5)).model
    assert np.isfinite(smaller(tf.constant(data))).all()
    assert smaller.count_params() < model.count_params()


def test_keras_quantizes_behind_a_text_vectorization():
    model = after_table(adapted(layers.TextVectorization(output_sequence_length=4), WORDS), WORDS)
    assert distance(model, quantize(model, keras.quantizers.Int8QuantizationConfig()).model, WORDS) < 0.1


class Scale(layers.Layer):
    """Divides by what `adapt` found. Subclasses keep it in different places."""

    scale = 1.0

    def adapt(self, data):
        self.scale = np.abs(data).max(axis=0)

    def call(self, inputs):
        return inputs / self.scale


class InConfig(Scale):
    def __init__(self, scale=1.0, **options):
        super().__init__(**options)
        self.scale = np.asarray(scale, "float32")

    def get_config(self):
        return {**super().get_config(), "scale": self.scale.tolist()}


class InOwnVariables(Scale):
    def save_own_variables(self, store):
        store["scale"] = self.scale

    def load_own_variables(self, store):
        self.scale = np.asarray(store["scale"])


class InAssets(Scale):
    def save_assets(self, directory):
        Path(directory, "scale.json").write_text(json.dumps(self.scale.tolist()))

    def load_assets(self, directory):
        self.scale = np.array(json.loads(Path(directory, "scale.json").read_text()), "float32")


class FromWeights(Scale):
    def build(self, shape):
        self.found = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=False)
        self.finalize_state()

    def adapt(self, data):
        self.build(data.shape)
        self.found.assign(np.abs(data).max(axis=0))
        self.finalize_state()

    def finalize_state(self):
        self.scale = self.found.numpy()


class InVariableOfTensorFlow(Scale):
    def build(self, shape):
        self.scale = tf.Variable(np.ones(shape[-1], "float32"))

    def adapt(self, data):
        self.build(data.shape)
        self.scale.assign(np.abs(data).max(axis=0))


class InTable(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, -1.0)

    def adapt(self, data):
        self.table.insert(tf.range(1000, dtype=tf.int64), tf.range(1000.0) ** 2)

    def call(self, inputs):
        return tf.ensure_shape(self.table.lookup(tf.cast(inputs, tf.int64)), inputs.shape)

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, "float32")


@pytest.mark.parametrize("kind", [InConfig, InOwnVariables, InAssets, FromWeights, InVariableOfTensorFlow, InTable])
def test_state_of_own_layers_goes_over(kind):
    model = dense_after(adapted(kind()))
    assert distance(model, copy_model(model), X) == 0


class Holder(layers.Layer):
    """Its state is that of the layers inside it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.norm, self.dense = layers.Normalization(), layers.Dense(8)

    def build(self, shape):
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, inputs):
        return self.dense(self.norm(inputs))


class Subclassed(keras.Model):
    def __init__(self, units=16, **options):
        super().__init__(**options)
        self.units, self.holder, self.head = units, Holder(), layers.Dense(units)

    def call(self, inputs):
        return self.head(self.holder(inputs))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def test_layers_inside_layers_nested_models_and_subclassed_models():
    own = Subclassed()
    own.holder.build((None, 8))
    own(X)
    own.holder.norm.adapt(X)
    copy = copy_model(own)
    assert type(copy) is Subclassed
    assert distance(own, copy, X) == 0

    # Two levels, a layer that is called twice, and a part that is frozen by itself.
    holder = Holder()
    inner = keras.Sequential([keras.Input((8,)), holder, layers.BatchNormalization()])
    inputs = keras.Input((8,))
    outer = keras.Model(inputs, layers.Dense(3)(own(inner(inner(inputs, training=False), training=False))))
    holder.norm.adapt(X)
    holder.dense.trainable = False
    copy = copy_model(outer)
    assert distance(outer, copy, X) == 0
    assert len(copy.variables) == len(outer.variables)
    assert len(copy.trainable_variables) == len(outer.trainable_variables)
    assert distance(lambda x: outer(x, training=True), lambda x: copy(x, training=True), X) == 0
    trained = quantize(outer, QuantizationConfig(training=True), calibration_data=X)
    assert distance(outer, trained, X) < 0.1


def test_masks_and_seeds_go_over_and_the_model_stays_as_it_is():
    class Noise(layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.seed = keras.random.SeedGenerator(3)
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, inputs):
            self.calls.assign_add(1)
            return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.seed)

    model = dense_after(Noise())
    model(X)  # the seed moves on
    prune(model, PruningConfig(target_sparsity=0.5))
    state = [variable.numpy() for variable in model.variables]
    copy = copy_model(model)
    for before, old, new in zip(state, model.variables, copy.variables, strict=True):
        np.testing.assert_array_equal(before, old)
        np.testing.assert_array_equal(before, new)
    assert copy.layers[1].kernel.constraint.kept.numpy().sum() == 64
    assert distance(model, copy, X) == 0


def test_a_copy_that_computes_something_else_is_refused_before_anything_changes():
    model = dense_after(layers.Dense(8), adapted(Scale(name="scale")))
    message = "Received: 'scale' \\(Scale\\), whose copy gives a difference of .* times the largest value"
    with pytest.raises(UnsupportedLayerError, match=message):
        shrink(model)
    with pytest.raises(UnsupportedLayerError, match=message):
        ShrinkSchedule(model)
    assert all(variable.constraint is None for variable in model.variables)
    with pytest.raises(UnsupportedLayerError, match=message):
        quantize(model, QuantizationConfig(training=True), calibration_data=X)
    with pytest.raises(UnsupportedLayerError, match=message):
        quantize(model, keras.quantizers.Int8QuantizationConfig())
    assert "call" not in vars(model.layers[1])  # where outputs were recorded

    class Words(layers.Layer):  # a table that adapt makes
        table = None

        def adapt(self, words):
            pairs = tf.lookup.KeyValueTensorInitializer(words[:, 0], np.arange(1, len(words) + 1))
            self.table = tf.lookup.StaticHashTable(pairs, 0)

        def call(self, inputs):
            return self.table.lookup(inputs)  # None in a copy

        def compute_output_spec(self, inputs):
            return keras.KerasTensor(inputs.shape, "int64")

    with pytest.raises(UnsupportedLayerError, match="'words' \\(Words\\), whose copy gives an error: AttributeError"):
        copy_model(after_table(adapted(Words(name="words"), WORDS), WORDS))


def test_what_cannot_be_compared_and_what_is_untied_is_said():
    class Random(layers.Layer):
        def call(self, inputs):
            return inputs + tf.random.normal(tf.shape(inputs))

    with pytest.warns(TfoptWarning, match="was not compared with it: two calls with the same inputs differ"):
        copy_model(dense_after(Random()))

    @keras.saving.register_keras_serializable("tests")
    class Head(layers.Layer):
        def __init__(self, embedding, **options):
            super().__init__(**options)
            self.embedding = embedding

        def call(self, inputs):
            return keras.ops.matmul(inputs, keras.ops.transpose(self.embedding.embeddings))

        def get_config(self):
            return {**super().get_config(), "embedding": keras.saving.serialize_keras_object(self.embedding)}

        @classmethod
        def from_config(cls, config):
            return cls(**{**config, "embedding": keras.saving.deserialize_keras_object(config["embedding"])})

    inputs, embedding = keras.Input((4,), dtype="int32"), layers.Embedding(20, 8)
    model = keras.Model(inputs, Head(embedding, name="head")(embedding(inputs)))
    with pytest.warns(TfoptWarning, match="has 1 variables more"):
        copy_model(model)
    # Keras' int8 gives such a head the integers of the embedding: outputs a thousand times too large.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TfoptWarning)
        with pytest.raises(
            UnsupportedLayerError, match="'head' \\(Head\\), whose quantized copy gives a difference of"
        ):
            quantize(model, keras.quantizers.Int8QuantizationConfig())


def test_a_model_without_a_config_is_refused():
    class Own(keras.Model):
        def __init__(self, units):
            super().__init__()
            self.dense = layers.Dense(units)

        def call(self, inputs):
            return self.dense(inputs)

    model = Own(3)
    model(X)
    with pytest.raises(UnsupportedModelError, match="Give its class a get_config"):
        copy_model(model)


def test_a_normalization_in_half_precision_gets_exact_statistics_with_float32_outputs():
    norm = layers.Normalization(invert=True, dtype="mixed_float16")
    norm.adapt(np.array([[99_900.0], [100_100.0]]))  # beyond the range of float16
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False, dtype="mixed_float16"), norm])
    float32_outputs(model)
    np.testing.assert_allclose(model(np.zeros((1, 1))), [[100_000.0]])
