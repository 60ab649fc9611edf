"""Each layer and operation that tfopt follows, and what it leaves alone, by the outputs of the shrunk model."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from masked_parent import assert_equals_masked_parent, give_statistics, kept_units

from tfopt.compat.tensorflow import uses_onednn
from tfopt.models.text.attention import CausalAttention
from tfopt.pruning import ChannelGroups, StructuredPruningConfig, shrink

CONFIG = StructuredPruningConfig(ratio=0.5, round_to=1, criterion="random")


def conv(filters=8, **options):
    return layers.Conv2D(filters, 3, padding="same", **options)


def image(*body):
    def build():
        x = inputs = keras.Input((8, 8, 3))
        for each in body:
            x = each()(x) if isinstance(each, type) else each(x)
        return keras.Model(inputs, layers.Dense(2, name="logits")(layers.Flatten()(x)))

    return build


def sequence(*body):
    def build():
        x = inputs = keras.Input((3, 5))
        for each in body:
            x = each(x)
        return keras.Model(inputs, layers.Dense(2, name="logits")(layers.GlobalAveragePooling1D()(x)))

    return build


def squeeze_and_excite(x):
    s = layers.GlobalAveragePooling2D(keepdims=True)(x)
    s = layers.Conv2D(4, 1, activation="relu")(s)
    return layers.Multiply()([x, layers.Conv2D(x.shape[-1], 1, activation="sigmoid")(s)])


def residual(x):
    return layers.Add()([x, conv(x.shape[-1])(x)])


def branches(x):
    return layers.Concatenate()([conv(6)(x), x, layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2)(x)])


def shared(x):
    layer = conv(x.shape[-1])
    return layer(layer(x))


def nested(x):
    body = keras.Sequential([keras.Input(x.shape[1:]), conv(6, activation="relu"), conv(4)], name="body")
    return layers.Concatenate()([body(x), body(layers.Dropout(0.1)(x))])


def heads(x):
    return layers.MultiHeadAttention(4, 3, value_dim=5)(x, x)


def cross(x):
    return layers.MultiHeadAttention(4, 3, output_shape=7)(x, layers.Dense(9)(x), layers.Dense(5)(x))


def by_hand(x):
    """Attention from plain operations: the heads are split and joined again by reshape and transpose."""
    query, key, value = (layers.Dense(12)(x) for _ in range(3))
    query, key, value = (ops.transpose(ops.reshape(each, (-1, 3, 4, 3)), (0, 2, 1, 3)) for each in (query, key, value))
    scores = ops.softmax(query * key, axis=2)  # a product of each position alone: elementwise
    return ops.reshape(ops.transpose(scores * value, (0, 2, 1, 3)), (-1, 3, 12))


def causal(x):
    return CausalAttention(4)(*(layers.Dense(12)(x) for _ in range(3)))


FOLLOWED = {
    "conv2d": image(conv(), layers.ReLU()),
    "strided and biasless": image(lambda x: layers.Conv2D(8, 3, strides=2, use_bias=False)(x)),
    "batch normalization": image(conv(), layers.BatchNormalization(), layers.Activation("swish")),
    "batch normalization without scale": image(conv(), layers.BatchNormalization(scale=False, center=False)),
    "group normalization": image(conv(12), layers.GroupNormalization(4)),
    "instance normalization": image(conv(), layers.GroupNormalization(-1)),
    "grouped convolution": image(conv(8), conv(8, groups=4)),
    "depthwise": image(conv(), layers.DepthwiseConv2D(3, depth_multiplier=2)),
    "separable": image(conv(), layers.SeparableConv2D(6, 3, depth_multiplier=2)),
    "transposed": image(conv(), layers.Conv2DTranspose(6, 2, strides=2), conv(4)),
    "dilated": image(conv(8, dilation_rate=2)),
    "pooling and padding": image(conv(), layers.ZeroPadding2D(1), layers.MaxPooling2D(2), layers.UpSampling2D(2)),
    "global pooling": image(conv(), layers.GlobalMaxPooling2D()),
    "prelu": image(conv(), layers.PReLU(shared_axes=(1, 2))),
    "squeeze and excite": image(conv(), squeeze_and_excite),
    "residual": image(conv(), residual, residual),
    "branches": image(conv(), branches, conv(4)),
    "shared layer": image(conv(), shared),
    "nested model called twice": image(conv(), nested),
    "arithmetic": image(conv(), lambda x: ops.relu(x + 3.0) * x / 6 - ops.abs(x)),
    "reshape": image(conv(), layers.Reshape((64, 8)), layers.Dense(6), layers.Permute((2, 1)), layers.Permute((2, 1))),
    "reshape and squeeze": image(
        conv(), lambda x: ops.squeeze(ops.expand_dims(ops.reshape(x, (-1, 64, 8)), 1), 1), layers.Dense(4)
    ),
    "channels split in two axes": image(
        conv(), layers.Reshape((64, 4, 2)), layers.Permute((2, 1, 3)), layers.Permute((2, 1, 3))
    ),
    "slices": image(conv(), lambda x: x[:, 1:, ..., :][:, 0], layers.Dense(6)),
    "mean of the pixels": image(conv(), lambda x: ops.mean(x, axis=(1, 2), keepdims=True)),
    "einsum": image(conv(), layers.EinsumDense("...x,xyz->...yz", (4, 3), bias_axes="yz"), layers.Dense(5)),
    "conv1d": sequence(layers.Conv1D(8, 3, padding="causal"), layers.Conv1DTranspose(6, 3), layers.Dense(5)),
    "separable and depthwise 1d": sequence(layers.SeparableConv1D(8, 3, padding="same"), layers.DepthwiseConv1D(3)),
    "lstm": sequence(layers.LSTM(8, return_sequences=True), layers.Dense(6)),
    "gru": sequence(layers.GRU(8, return_sequences=True), layers.GRU(6, return_sequences=True, reset_after=False)),
    "simple rnn": sequence(layers.SimpleRNN(8, return_sequences=True)),
    "bidirectional": sequence(layers.Bidirectional(layers.LSTM(6, return_sequences=True)), layers.Dense(4)),
    "bidirectional sum": sequence(layers.Bidirectional(layers.GRU(6, return_sequences=True), merge_mode="sum")),
    "time distributed": sequence(layers.TimeDistributed(layers.Dense(8)), layers.TimeDistributed(layers.Dense(6))),
    "attention heads": sequence(heads),
    "attention of other inputs": sequence(cross),
    "grouped queries": sequence(lambda x: layers.GroupQueryAttention(3, 4, 2)(x, x)),
    "attention without weights": sequence(lambda x: layers.Attention()([layers.Dense(8)(x), layers.Dense(8)(x)])),
    "causal attention": sequence(causal, layers.Dense(5)),
    "attention by hand": sequence(by_hand, layers.Dense(5)),
    "recurrent layers behind a mask": sequence(
        layers.Masking(),
        layers.Bidirectional(layers.SimpleRNN(6, return_sequences=True)),
        layers.SimpleRNN(6, return_sequences=True),
        layers.TimeDistributed(layers.Dense(6)),
    ),
    "attention behind a mask": sequence(
        layers.Masking(), layers.Dense(8), lambda x: layers.Attention()([layers.Dense(8)(x), x])
    ),
    "steps in the batch": sequence(lambda x: ops.reshape(layers.Dense(6)(ops.reshape(x, (-1, 5))), (-1, 3, 6))),
    "repeated vector": sequence(
        layers.GlobalAveragePooling1D(), layers.Dense(6), layers.RepeatVector(3), layers.Dense(5)
    ),
}


# Each is as one before it in the table.
ALIKE = (
    *("strided and biasless", "batch normalization without scale", "instance normalization", "reshape and squeeze"),
    *("simple rnn", "attention behind a mask"),
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in FOLLOWED]
)
def test_the_shrunk_model_equals_the_masked_parent(name):
    keras.utils.set_random_seed(0)
    model = FOLLOWED[name]()
    give_statistics(model)
    result = shrink(model, CONFIG)
    assert result.model.count_params() == result.report.metrics["parameters"] < model.count_params()
    channels = ChannelGroups(model)  # knows before the smaller model is built what its graph has
    assert channels.multiply_adds(kept_units(channels, result)) == result.report.metrics["multiply_adds"]
    assert_equals_masked_parent(model, result, channels)


def test_a_mask_is_no_initial_state_that_keeps_the_units():
    report = shrink(FOLLOWED["recurrent layers behind a mask"](), CONFIG).report
    assert [skip.name for skip in report.skipped if skip.kind != "Any"] == ["logits"]  # Any makes the mask


class OwnDense(layers.Dense):
    """A subclass may compute something else than its class."""

    def call(self, inputs):
        return super().call(inputs)[..., ::-1]


class OwnModel(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.dense = layers.Dense(4)

    def call(self, inputs):
        return self.dense(inputs)


def with_lora(x):
    layer = layers.Dense(8, name="odd")
    y = layer(x)
    layer.enable_lora(2)
    return y


NOT_FOLLOWED = {
    "lambda": image(conv(6), layers.Lambda(lambda x: x[..., ::-1], name="odd"), conv(4)),
    "subclass of a layer": image(conv(6), OwnDense(8, name="odd"), conv(4)),
    "subclassed model": image(conv(6), lambda x: OwnModel()(x), conv(4)),
    "unit normalization": image(conv(6), layers.UnitNormalization(name="odd"), conv(4)),
    "softmax": image(conv(6, activation="softmax", name="odd"), conv(4)),
    "layer normalization": image(conv(6), layers.LayerNormalization(name="odd"), conv(4)),
    "channels first": image(conv(6), conv(4, data_format="channels_first", name="odd"), conv(4)),
    "channels reversed": image(conv(6), lambda x: x[..., ::-1], conv(4)),
    "channels split": image(conv(6), lambda x: ops.split(x, 2, axis=-1)[0], conv(4)),
    "cumulative sum": image(conv(6), lambda x: ops.cumsum(x, axis=-1), conv(4)),
    "mean of the channels": image(conv(6), lambda x: x - ops.mean(x, axis=-1, keepdims=True), conv(4)),
    "one channel for all": image(conv(1), lambda x: x * layers.SeparableConv2D(6, 3, padding="same")(x), conv(4)),
    "constant": image(conv(6), lambda x: x + np.arange(6.0), conv(4)),
    "permuted channels": image(conv(6), layers.Permute((3, 1, 2)), layers.Conv2D(4, 3), conv(4)),
    "low-rank part": image(conv(6), with_lora, conv(4)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_is_not_followed_keeps_its_channels_and_is_named(name):
    if name == "channels first" and not uses_onednn():
        pytest.skip("without oneDNN, TensorFlow computes convolutions of channels first on GPUs only")
    keras.utils.set_random_seed(0)
    model = NOT_FOLLOWED[name]()
    result = shrink(model, CONFIG)
    first = next(layer for layer in model.layers if isinstance(layer, layers.Conv2D))
    reason = next(skip.reason for skip in result.report.skipped if skip.name == first.name)
    odd = next((layer.name for layer in model.layers if layer.name == "odd"), None)
    assert odd is None or f"{odd!r}" in reason
    assert result.model.get_layer(first.name).filters == first.filters
    assert_equals_masked_parent(model, result)  # the layers around it shrink


def test_widths_under_a_layer_normalization_shrink_when_asked():
    model = image(conv(), layers.LayerNormalization(name="norm"), conv(4))()
    config = StructuredPruningConfig(ratio=0.5, round_to=1, widths=True, criterion="l1")
    result = shrink(model, config)
    first = model.layers[1]
    assert result.model.get_layer(first.name).filters == 4
    assert "the statistics of norm change" in str(result.report)
    kept = list(result.channels[first.name])
    np.testing.assert_array_equal(result.model.get_layer(first.name).kernel, first.kernel.numpy()[..., kept])
