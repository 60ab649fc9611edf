"""Keras 2 models become Keras 3 models: the outputs of tf_keras itself are the reference."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import tfopt
from tfopt.errors import TfoptWarning, UnsupportedLayerError, UnsupportedModelError
from tfopt.pruning.tfmot import import_tfmot

IMAGE, SEQUENCE, TOKENS = (8, 8, 3), (6, 4), (6,)
RANDOM = np.random.default_rng(1)


def randomized(model):
    """Returns the model with other values in all weights, also in those that begin as zeros or ones."""
    model.set_weights([RANDOM.uniform(0.05, 0.6, array.shape).astype(array.dtype) for array in model.get_weights()])
    return model


def batch(shape, dtype="float32"):
    if dtype == "int32":
        return RANDOM.integers(0, 5, (3, *shape)).astype(dtype)
    return RANDOM.normal(size=(3, *shape)).astype(dtype)


def outputs_equal(old, new, inputs, tolerance=1e-5):
    expected, received = old(inputs, training=False), new(inputs, training=False)
    tf.nest.assert_same_structure(expected, received, check_types=False)
    for reference, output in zip(tf.nest.flatten(expected), keras.tree.flatten(received), strict=True):
        np.testing.assert_allclose(output, reference, rtol=tolerance, atol=tolerance)


def weights_equal(old, new):
    for reference, weight in zip(old.get_weights(), new.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, reference)


LAYERS = {
    "dense": (lambda: layers.Dense(3, "gelu", kernel_regularizer="l2", kernel_initializer="he_normal"), (4,)),
    "conv": (lambda: layers.Conv2D(4, 3, strides=2, padding="same", dilation_rate=1, groups=1), IMAGE),
    "conv1d causal": (lambda: layers.Conv1D(4, 3, padding="causal", dilation_rate=2), SEQUENCE),
    "conv transposed": (lambda: layers.Conv2DTranspose(4, 3, strides=2, padding="same"), IMAGE),
    "separable": (lambda: layers.SeparableConv2D(5, 3, depth_multiplier=2), IMAGE),
    "depthwise": (lambda: layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same"), IMAGE),
    "batch norm": (lambda: layers.BatchNormalization(axis=[2], epsilon=0.1), IMAGE),
    "layer norm": (lambda: layers.LayerNormalization(axis=[1, 2]), IMAGE),
    "group norm": (lambda: layers.GroupNormalization(3), IMAGE),
    "leaky relu": (lambda: layers.LeakyReLU(alpha=0.4), (4,)),
    "prelu": (lambda: layers.PReLU(shared_axes=[1, 2]), IMAGE),
    "lstm": (lambda: layers.LSTM(5, return_sequences=True, unit_forget_bias=False), SEQUENCE),
    "gru": (lambda: layers.GRU(5), SEQUENCE),
    "gru before": (lambda: layers.GRU(5, reset_after=False, go_backwards=True), SEQUENCE),
    "bidirectional": (lambda: layers.Bidirectional(layers.LSTM(4, return_sequences=True), merge_mode="sum"), SEQUENCE),
    "two directions": (lambda: layers.Bidirectional(layers.GRU(4), backward_layer=layers.GRU(3, go_backwards=True)),
                       SEQUENCE),
    "cells": (lambda: layers.RNN([layers.LSTMCell(4), layers.GRUCell(3)]), SEQUENCE),
    "conv lstm": (lambda: layers.ConvLSTM1D(2, 3, recurrent_activation="sigmoid"), (3, *SEQUENCE)),
    "time distributed": (lambda: layers.TimeDistributed(layers.Conv1D(3, 2)), (3, *SEQUENCE)),
    "einsum": (lambda: layers.EinsumDense("abc,cd->abd", (None, 7), bias_axes="d"), SEQUENCE),
    "upsampling": (lambda: layers.UpSampling2D(2, interpolation="bilinear"), IMAGE),
    "resizing": (lambda: layers.Resizing(5, 11), IMAGE),
    "rescaling": (lambda: layers.Rescaling([2.0, 3.0, 4.0], offset=-1.0), IMAGE),
    "lstm dropout": (lambda: layers.LSTM(5, dropout=0.2, recurrent_dropout=0.2), SEQUENCE),
    "spatial dropout": (lambda: layers.SpatialDropout2D(0.2), IMAGE),
    "discretization": (lambda: layers.Discretization([-0.5, 0.5]), (4,)),
    "random": (lambda: layers.RandomRotation(0.2, seed=3), IMAGE),
    "softmax": (lambda: layers.Softmax(axis=1), SEQUENCE),
    "pooling": (lambda: layers.AveragePooling2D(3, strides=2, padding="same"), IMAGE),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_a_layer_has_the_same_name_weights_and_outputs(make, shape):
    layer = make()
    old = randomized(tf_keras.Sequential([tf_keras.Input(shape), layer], name="old"))
    new = tfopt.from_tf_keras(old)
    assert (new.name, [each.name for each in new.layers]) == ("old", [layer.name])
    weights_equal(old, new)
    outputs_equal(old, new, batch(shape))


def test_an_embedding_masks_the_layers_behind_it():
    old = randomized(
        tf_keras.Sequential([tf_keras.Input(TOKENS), layers.Embedding(5, 4, mask_zero=True), layers.LSTM(3)])
    )
    new = tfopt.from_tf_keras(old)
    outputs_equal(old, new, np.array([[1, 2, 3, 0, 0, 0], [4, 0, 0, 0, 0, 0]], "float32"))


def merged(merge, **options):
    tokens = tf_keras.Input((None,), dtype="int32")
    words = layers.Embedding(5, 4, mask_zero=True)(tokens)
    shifted = layers.Masking(0.0)(layers.ZeroPadding1D((1, 0))(words)[:, :-1])
    both = merge(**options)([words, layers.Dense(4)(words), words * 2.0, shifted])
    return tf_keras.Model(tokens, layers.GlobalAveragePooling1D()(both))


@pytest.mark.parametrize(
    ("merge", "options"), [(layers.Add, {}), (layers.Concatenate, {}), (layers.Concatenate, {"axis": 2})]
)
def test_a_merge_has_the_mask_of_keras_2(merge, options, tmp_path):
    """In Keras 3 an input without a mask takes the mask away, and two masks become one by an or."""
    old = randomized(merged(merge, **options))
    new = tfopt.from_tf_keras(old)
    tokens = np.array([[1, 2, 3, 0, 0], [4, 1, 0, 0, 0]], "int32")
    outputs_equal(old, new, tokens)
    new.save(tmp_path / "new.keras")
    outputs_equal(old, keras.models.load_model(tmp_path / "new.keras"), tokens)


def test_a_sequential_model_without_an_input_takes_any_batch():
    old = tf_keras.Sequential([layers.Dense(3, "relu"), layers.Dense(2)])
    old(tf.zeros((1, 4)))
    new = tfopt.from_tf_keras(old)
    assert new.input_shape == (None, 4)
    outputs_equal(old, new, batch((4,)))


def test_words_and_adapted_statistics_come_along():
    text = layers.TextVectorization(output_sequence_length=4)
    text.adapt(["the cat sat", "the dog"])
    words = tf_keras.Sequential([tf_keras.Input((1,), dtype="string"), text])
    outputs_equal(words, tfopt.from_tf_keras(words), tf.constant([["the dog ran"], ["cat"]]))
    for layer in (layers.Normalization(), layers.Discretization(num_bins=3)):
        layer.adapt(batch((4,)))
        adapted = tf_keras.Sequential([tf_keras.Input((4,)), layer])
        outputs_equal(adapted, tfopt.from_tf_keras(adapted), batch((4,)))


def attention():
    inputs = tf_keras.Input(SEQUENCE, name="sequence")
    states = tf_keras.Input((5,), name="state")
    mask = tf_keras.Input((6, 6), dtype="bool", name="mask")
    x, weights = layers.MultiHeadAttention(2, 3, name="attention")(inputs, inputs, None, mask, True)
    sequence, *last = layers.LSTM(5, return_sequences=True, return_state=True)(x, initial_state=[states, states])
    read = layers.Attention(use_scale=True, name="read")([sequence, sequence])
    scored = layers.Bidirectional(layers.GRU(5))(read, initial_state=[states, last[0]])
    return tf_keras.Model({"a": inputs, "c": states, "b": mask}, {"scored": scored, "weights": [weights, *last]})


def test_attention_states_and_structures_of_inputs_and_outputs():
    old = randomized(attention())
    mask = RANDOM.random((3, 6, 6)) < 0.7
    mask[..., 0] = True  # rows without any key differ: Keras 2 and Keras 3 give them other large negative scores
    outputs_equal(old, tfopt.from_tf_keras(old), {"a": batch(SEQUENCE), "b": mask, "c": batch((5,))})


def residual():
    """Two inputs through the same layers, with a model inside, and two outputs."""
    left, right = tf_keras.Input(IMAGE, name="left"), tf_keras.Input(IMAGE, name="right")
    shared = layers.Conv2D(4, 3, padding="same", name="block/shared")
    inner = tf_keras.Sequential([layers.BatchNormalization(name="norm"), layers.ReLU(6.0)], name="inner")
    wide_input = tf_keras.Input((8, 8, 4))
    wide = tf_keras.Model(wide_input, layers.Add()([inner(wide_input), wide_input]), name="wide")
    x, y = wide(shared(left)), wide(inner(shared(right)), training=False)
    sums = layers.Concatenate()([layers.add([x, y]), layers.Dropout(0.5)(layers.Subtract()([x, y]))])
    pooled = layers.GlobalAveragePooling2D(keepdims=True, name="pooled")(sums)
    head = layers.Dense(2, name="head", dtype="float32")
    return tf_keras.Model([left, right], [head(layers.Flatten()(pooled)), head(layers.Flatten()(pooled) * 2.0)])


def test_shared_layers_models_inside_and_two_outputs():
    old = randomized(residual())
    new = tfopt.from_tf_keras(old)
    assert new.count_params() == old.count_params()
    outputs_equal(old, new, [batch(IMAGE), batch(IMAGE)])
    inner, wide = new.get_layer("inner"), new.get_layer("wide")
    assert wide.get_layer("inner") is inner
    assert new.get_layer("block_shared").kernel.shape == (3, 3, 3, 4)
    assert [tensor.name for tensor in new.inputs] == ["left", "right"]


def test_a_model_for_each_step_of_a_sequence():
    frame = tf_keras.Sequential([tf_keras.Input(IMAGE), layers.Conv2D(2, 3), layers.Flatten()], name="frame")
    old = tf_keras.Sequential([tf_keras.Input((4, *IMAGE)), layers.TimeDistributed(frame), layers.GRU(3)])
    new = tfopt.from_tf_keras(old)
    assert isinstance(new.layers[0].layer, keras.Sequential)
    outputs_equal(old, new, batch((4, *IMAGE)))


def operations():
    x = tf_keras.Input(SEQUENCE)
    a = tf.nn.relu(x[:, 1:, ::2] - 0.5) / 2.0 + tf.constant([1.0, -2.0])
    b = tf.reshape(tf.transpose(x, [0, 2, 1]), [-1, 6, 4]) ** 2
    c = tf.concat([a, tf.expand_dims(x[..., 0], -1)[:, :5]], axis=-1)
    d = tf.reduce_mean(c, axis=[1], keepdims=True) @ tf.ones((3, 4)) - tf.math.rsqrt(tf.abs(x) + 1.0)
    e = tf.clip_by_value(tf.stack([b, d], 1), -0.3, tf.reduce_max(3.0 - d))
    f = tf.where(x > 0.1, x, -x) + tf.cast(tf.cast(x, tf.int32), "float32") + tf.split(x, [3, 3], axis=1)[1][:, :1]
    g = tf.matmul(x, x, transpose_b=True) * tf.nn.softmax(tf.matmul(x, x, transpose_b=True), axis=1)
    return tf_keras.Model(x, [a, tf.squeeze(e[:, :1], 1), f, tf.pad(g, [[0, 0], [1, 0], [0, 2]]), tf.nn.silu(2.0 * x)])


def test_operations_of_tensorflow_between_layers(tmp_path):
    old = operations()
    new = tfopt.from_tf_keras(old)
    outputs_equal(old, new, batch(SEQUENCE))
    assert {layer.name for layer in old.layers} <= {operation.name for operation in new.operations}
    new.save(tmp_path / "new.keras")
    outputs_equal(old, keras.models.load_model(tmp_path / "new.keras"), batch(SEQUENCE))


def test_trainable_flags_and_the_precision_of_layers():
    inputs = tf_keras.Input((4,))
    frozen = tf_keras.Sequential([layers.Dense(3, name="first"), layers.Dense(3, name="last")], name="frozen")
    outputs = layers.Dense(2, name="head", dtype="float32")(frozen(inputs))
    old = tf_keras.Model(inputs, layers.Dense(2, name="half", dtype="mixed_bfloat16")(outputs))
    frozen.trainable = False
    frozen.get_layer("last").trainable = True
    new = tfopt.from_tf_keras(old)
    inner = new.get_layer("frozen")
    # Keras 2 does not train a layer inside a frozen model.
    assert not any(layer.trainable for layer in (inner, *inner.layers))
    assert [layer.dtype_policy.name for layer in new.layers[-2:]] == ["float32", "mixed_bfloat16"]
    assert len(new.trainable_weights) == len(old.trainable_weights)
    assert not new.compiled


@pytest.mark.slow
def test_mobilenet_v2_of_keras_2():
    old = tf_keras.applications.MobileNetV2((32, 32, 3), weights=None, classes=10, classifier_activation=None)
    for layer in old.layers:
        if isinstance(layer, layers.BatchNormalization):
            randomized(layer)
    new = tfopt.from_tf_keras(old)
    images = batch((32, 32, 3))
    assert np.std(old(images)) > 0.1  # the outputs do depend on the images
    outputs_equal(old, new, images, tolerance=1e-4)
    weights_equal(old, new)
    assert [layer.name for layer in new.layers] == [layer.name for layer in old.layers]


@pytest.mark.slow
def test_a_pruned_model_keeps_its_zeros_and_is_pruned_further():
    old = tf_keras.Sequential([tf_keras.Input(IMAGE), layers.Conv2D(8, 3), layers.Flatten(), layers.Dense(4)])
    tfopt.prune(old, tfopt.PruningConfig(target_sparsity=0.5))
    new = tfopt.from_tf_keras(old)
    zeros = [array == 0 for array in new.get_weights() if array.ndim > 1]
    assert zeros[0].mean() == 0.5
    weights_equal(old, new)
    tfopt.prune(new, tfopt.PruningConfig(target_sparsity=0.75))
    pruned = [array == 0 for array in new.get_weights() if array.ndim > 1]
    assert pruned[0].mean() == 0.75
    assert all(np.all(now[before]) for now, before in zip(pruned, zeros, strict=True))
    new.compile("adam", "mse")
    new.fit(batch(IMAGE), batch((4,)), verbose=0)
    trained = [array for array in new.get_weights() if array.ndim > 1]
    assert all(np.all(now[before] == 0) for now, before in zip(trained, pruned, strict=True))


class Scale(layers.Layer):
    def __init__(self, factor, **options):
        super().__init__(**options)
        self.factor = factor

    def build(self, shape):
        self.gain = self.add_weight("gain", (shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.gain * self.factor

    def get_config(self):
        return super().get_config() | {"factor": self.factor}


class Scale3(keras.layers.Layer):
    columns = slice(None)

    def __init__(self, factor, **options):
        super().__init__(**options)
        self.factor = factor

    def build(self, shape):
        self.gain = self.add_weight(shape[-1:][self.columns], name="gain", initializer="ones")

    def call(self, x):
        return x * self.gain * self.factor

    def compute_output_shape(self, shape):
        return shape


class Scalar(Scale3):
    columns = slice(0, 0)


class Doubled(Scale3):
    def call(self, x):
        return 2 * super().call(x)


def scaled():
    return tf_keras.Sequential([tf_keras.Input(SEQUENCE), layers.TimeDistributed(Scale(3.0)), Scale(2.0, name="gains")])


def test_layers_and_functions_of_the_users_own():
    old = randomized(scaled())
    new = tfopt.from_tf_keras(old, custom_objects={"Scale": Scale3})
    assert isinstance(new.get_layer("gains"), Scale3)
    outputs_equal(old, new, batch(SEQUENCE))
    steps = tf_keras.Sequential([tf_keras.Input(SEQUENCE), layers.LSTM(3, recurrent_activation="hard_sigmoid")])
    own = {"hard_sigmoid": lambda x: keras.ops.clip(0.2 * x + 0.5, 0.0, 1.0)}
    outputs_equal(steps, tfopt.from_tf_keras(steps, custom_objects=own), 5 * batch(SEQUENCE))


class Subclassed(tf_keras.Model):
    def call(self, inputs):
        return inputs


def built_subclassed():
    model = Subclassed()
    model(tf.zeros((1, 2)))
    return model


def with_layer(layer):
    return tf_keras.Sequential([tf_keras.Input(SEQUENCE), layer])


def with_call(call):
    x = tf_keras.Input(SEQUENCE)
    return tf_keras.Model(x, call(x))


def wrapped_by_tfmot():
    return import_tfmot().sparsity.keras.prune_low_magnitude(with_layer(layers.Dense(3)))


@pytest.mark.parametrize(
    ("make", "custom_objects", "error", "message"),
    [
        (lambda: keras.Sequential(), {}, UnsupportedModelError, "must be a model of tf_keras .*needs no conversion"),
        (lambda: layers.Dense(3), {}, UnsupportedModelError, "must be a model, not a layer"),
        (lambda: tf_keras.Sequential([layers.Dense(3)]), {}, UnsupportedModelError, "must be built"),
        (built_subclassed, {}, UnsupportedModelError, "functional or Seq"),
        (lambda: with_layer(layers.Lambda(abs, name="mine")), {}, UnsupportedLayerError, r"'mine' \(Lambda\).*custom"),
        (wrapped_by_tfmot, {}, UnsupportedLayerError, r"\(PruneLowMagnitude\).*strip_pruning\(model\) first"),
        (scaled, {}, UnsupportedLayerError, r"\(Scale\). Pass custom_objects"),
        (scaled, {"Scale": Scalar}, UnsupportedLayerError, r"'scale\w*' .* the shapes \[\(4,\)\].*\[\(\)\]"),
        (scaled, {"Scale": Doubled}, UnsupportedModelError, "the output 'gains' .* a difference of [0-9]"),
        (lambda: with_call(lambda x: tf.cumsum(x)), {}, UnsupportedLayerError, r"\(tf.math.cumsum\)"),
        (lambda: with_call(lambda x: tf.transpose(x, None, True)), {}, UnsupportedLayerError, "conjugate"),
        (lambda: with_call(lambda x: x[: tf.shape(x)[0]]), {}, UnsupportedLayerError, r"\(tf.compat.v1.shape\)"),
        (lambda: with_layer(layers.GRU(2, time_major=True)), {}, UnsupportedLayerError, "no argument 'time_major'"),
        (lambda: with_layer(layers.LSTM(3, "hard_sigmoid")), {}, UnsupportedLayerError, "hard_sigmoid is max"),
        (lambda: with_layer(layers.ThresholdedReLU()), {}, UnsupportedLayerError, "ThresholdedReLU"),
    ],
)  # fmt: skip
def test_what_keras_3_does_not_have_is_refused(make, custom_objects, error, message):
    with pytest.raises(error, match=message):
        tfopt.from_tf_keras(make(), custom_objects=custom_objects)


def test_a_stateful_model_is_converted_without_a_call():
    old = tf_keras.Sequential([tf_keras.Input(batch_shape=(3, *SEQUENCE)), layers.GRU(2, stateful=True)])
    with pytest.warns(TfoptWarning, match="stateful"):
        new = tfopt.from_tf_keras(old)
    weights_equal(old, new)
    np.testing.assert_array_equal(old.layers[0].states[0], 0)
    outputs_equal(old, new, batch(SEQUENCE))


@pytest.mark.parametrize(
    "use",
    [
        lambda model: tfopt.compile(model, tfopt.plan(), loss="mse"),
        lambda model: tfopt.shrink(model, tfopt.StructuredPruningConfig(ratio=0.5)),
        tfopt.keep_zeros,
        tfopt.float32_outputs,
        tfopt.tensor_core_alignment,
        tfopt.pruning.ChannelGroups,
        lambda model: tfopt.diagnose(model, np.zeros((8, 4), "float32")),
    ],
)
def test_what_takes_keras_3_models_only_names_the_remedy(use):
    model = tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(2)], name="old")
    with pytest.raises(UnsupportedModelError, match=r"tf_keras model 'old'.*tfopt\.from_tf_keras"):
        use(model)


def test_tf_keras_is_not_imported_for_a_keras_3_model(fresh_python):
    script = (
        "import sys, keras, tfopt\n"
        "try: tfopt.from_tf_keras(keras.Sequential())\n"
        "except tfopt.UnsupportedModelError: sys.exit('tf_keras' in sys.modules)\n"
        "sys.exit(2)"
    )
    fresh_python("-c", script, check=True)
