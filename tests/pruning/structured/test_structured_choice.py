"""How many channels leave, and which: targets, rounding, scope, criteria, and errors that leave the model as it was."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from masked_parent import examples, outputs

import tfopt
from tfopt.errors import ConfigError, TfoptWarning, UnsupportedModelError
from tfopt.profiling.cost import count_flops
from tfopt.pruning import ChannelGroups, StructuredPruningConfig, shrink


def convolutions():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(16, 3, name="first"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.Conv2D(32, 3, name="second"),
            layers.Flatten(),
            layers.Dense(4, name="logits"),
        ]
    )


def resnet_of(depth):
    keras.utils.set_random_seed(0)
    return tfopt.models.resnet_cifar((32, 32, 3), 10, depth=depth)


@pytest.fixture(scope="module")
def resnet():
    return resnet_of(8)


@pytest.mark.parametrize(
    ("depth", "target", "share", "scope"),
    [
        (8, "target_flops", 0.5, "layer"),
        (8, "target_parameters", 0.4, "global"),
        pytest.param(14, "target_flops", 0.3, "global", marks=pytest.mark.slow),
        pytest.param(14, "target_parameters", 0.4, "layer", marks=pytest.mark.slow),
    ],
)
def test_a_target_is_met_as_nearly_as_the_steps_allow(depth, target, share, scope):
    result = shrink(resnet_of(depth), StructuredPruningConfig(**{target: share, "scope": scope}))
    what = "multiply_adds" if target == "target_flops" else "parameters"
    metrics = result.report.metrics
    assert metrics["multiply_adds"] == count_flops(result.model).multiply_adds
    assert metrics["parameters"] == result.model.count_params()
    assert 0.9 * share < metrics[what] / metrics[f"{what}_before"] <= share


class OwnWidth(layers.Layer):
    """A layer of a user's own: tfopt cannot know what it computes."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        return keras.ops.matmul(x, self.kernel)


def strangers():
    """Layers that are not followed, with much of the model's work, between layers that are."""
    shared = keras.Sequential([keras.Input((6, 6, 16)), layers.Conv2D(64, 1), layers.Conv2D(16, 1)], name="shared")
    x = inputs = keras.Input((8, 8, 3))
    x = layers.SpectralNormalization(layers.Conv2D(16, 3), name="spectral")(x)
    x = shared(shared(x))
    x = layers.Lambda(lambda x: keras.ops.matmul(x, keras.ops.ones((16, 16))), name="product")(x)
    x = layers.Reshape((4, 9, 16))(x)
    x = layers.TimeDistributed(keras.Sequential([layers.Conv1D(16, 3)]), name="steps")(x)
    x = OwnWidth(name="own")(layers.Reshape((28, 16))(x))
    x = layers.Bidirectional(layers.RNN(layers.SimpleRNNCell(8)), name="cells")(x)
    return keras.Model(inputs, layers.Dense(4, name="logits")(layers.Dense(512, name="wide")(x)))


def test_a_target_counts_the_whole_model_and_the_report_names_what_is_not_followed():
    model = strangers()
    result = shrink(model, StructuredPruningConfig(target_flops=0.75, round_to=8))
    before, after = count_flops(model).multiply_adds, count_flops(result.model).multiply_adds
    assert 0.9 * 0.75 < after / before <= 0.75
    metrics = result.report.metrics
    assert (metrics["multiply_adds"], metrics["multiply_adds_before"]) == (after, before)
    reasons = {skip.name: skip.reason for skip in result.report.skipped}
    for name in ("spectral", "product", "steps", "own", "cells"):
        assert "follow" in reasons[name], name
    with pytest.raises(ConfigError, match=r"smallest possible is 0\.\d.*'own', 'cells' cannot shrink"):
        shrink(model, StructuredPruningConfig(target_flops=0.1))


def test_a_target_for_open_sizes_needs_one_of_them():
    x = inputs = keras.Input((None, 16))
    x = layers.Conv1D(64, 3, strides=2, padding="same")(x)
    x = layers.MultiHeadAttention(16, 8)(x, x)
    x = layers.Conv1D(64, 3, strides=2)(x)
    model = keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))
    with pytest.raises(ConfigError, match="open_size must be given"):
        shrink(model, StructuredPruningConfig(target_flops=0.5))
    for size in (32, 512):
        result = shrink(model, StructuredPruningConfig(target_flops=0.5, open_size=size, round_to=2))
        shares = [count_flops(each, open_size=size).multiply_adds for each in (result.model, model)]
        assert 0.47 < shares[0] / shares[1] <= 0.5
    report = shrink(model, StructuredPruningConfig(ratio=0.5)).report  # needs no count
    assert "multiply_adds" not in report.metrics
    assert any(skip.kind == "multiply-adds" and "open_size must be given" in skip.reason for skip in report.skipped)


def test_widths_are_multiples_of_round_to(resnet):
    result = shrink(resnet, StructuredPruningConfig(target_flops=0.37, round_to=4))
    filters = [layer.filters for layer in result.model.layers if isinstance(layer, layers.Conv2D)]
    assert any(number % 8 for number in filters)
    assert not any(number % 4 for number in filters)


def test_wide_groups_become_multiples_of_sixteen_by_default():
    """Kernels compute 16 channels at once: 40 take as long as 48. Narrow groups have finer steps."""
    model = keras.Sequential([keras.Input((8, 8, 3))])
    for width in (32, 64, 96, 128):
        model.add(layers.Conv2D(width, 1, name=f"wide{width}"))
    model.add(layers.Dense(2))
    smaller = shrink(model, StructuredPruningConfig(ratio=0.3)).model
    assert [layer.filters for layer in smaller.layers[:4]] == [24, 48, 64, 96]
    by_eight = shrink(model, StructuredPruningConfig(ratio=0.3, round_to=8)).model
    assert [layer.filters for layer in by_eight.layers[:4]] == [24, 48, 64, 88]


def test_global_scope_takes_more_from_groups_of_unequal_channels():
    model = convolutions()
    kernel = model.get_layer("second").kernel
    scales = np.where(np.arange(32) < 24, 0.01, 1.0)  # most filters of the second convolution are small
    kernel.assign(kernel.numpy() * scales)
    config = StructuredPruningConfig(ratio=0.5, scope="global", criterion=lambda weights: weights[:, :27].max(1))
    result = shrink(model, config)  # the first values are those of the filter itself
    assert len(result.channels["first"]) == 16
    assert result.channels["second"] == tuple(range(24, 32))


@pytest.mark.timed
@pytest.mark.slow
def test_a_target_of_latency_is_measured_here():
    x = image = keras.Input((32, 32, 16))
    for _ in range(
        3
    ):  # so much work that the smallest takes a fifth of the time, far from the target on a busy machine
        x = layers.Conv2D(128, 3, activation="relu")(x)
    model = keras.Model(image, layers.Dense(4)(layers.GlobalMaxPooling2D()(x)))
    config = StructuredPruningConfig(target_latency=0.7, batch_size=8)
    result = shrink(model, config)
    metrics = result.report.metrics
    assert 0 < metrics["latency_ms"] < metrics["latency_ms_before"]
    assert metrics["multiply_adds"] < metrics["multiply_adds_before"]
    open_size = keras.Sequential([keras.Input((None, None, 1)), layers.Conv2D(32, 3), layers.GlobalMaxPooling2D()])
    open_size.add(layers.Dense(2))
    with pytest.raises(ConfigError, match="The input must have fixed sizes"):
        shrink(open_size, config)


def test_a_group_keeps_what_max_ratio_says():
    model = convolutions()
    config = StructuredPruningConfig(target_parameters=0.5, max_ratio=0.5, scope="global", round_to=1)
    result = shrink(model, config)
    assert len(result.channels["first"]) >= 8
    assert len(result.channels["second"]) >= 16


def filters_of(model):
    """The values of each channel of the first convolution: its filter, then the slice of the next kernel."""
    first, second = (model.get_layer(name).kernel.numpy() for name in ("first", "second"))
    return np.concatenate([np.moveaxis(first, 3, 0).reshape(16, -1), np.moveaxis(second, 2, 0).reshape(16, -1)], axis=1)


REFERENCES = {
    "l1": lambda model: np.abs(filters_of(model)).sum(1),
    "l2": lambda model: np.linalg.norm(filters_of(model), axis=1),
    "fpgm": lambda model: np.array(
        [sum(np.linalg.norm(one - other) for other in filters_of(model)) for one in filters_of(model)]
    ),
    "bn_scale": lambda model: np.abs(model.get_layer("norm").gamma.numpy()),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("criterion", REFERENCES)
def test_criteria_equal_numpy(criterion):
    model = convolutions()
    model.get_layer("norm").gamma.assign(np.random.default_rng(3).normal(size=16))
    expected = np.sort(np.argsort(REFERENCES[criterion](model))[-8:])
    result = shrink(model, StructuredPruningConfig(ratio=0.5, criterion=criterion))
    assert result.channels["first"] == tuple(expected)
    if criterion == "bn_scale":
        assert [skip.reason for skip in result.report.skipped if skip.name == "second"] == [
            "it has no batch normalization with a scale"
        ]


def test_taylor_equals_gradients_by_hand():
    model = convolutions()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    data = [(random.normal(size=(4, 8, 8, 3)).astype("f4"), np.arange(4)) for _ in range(3)]
    weights = [model.get_layer("first").kernel, model.get_layer("first").bias, model.get_layer("second").kernel]
    weights += [model.get_layer("norm").gamma, model.get_layer("norm").beta]
    scores = np.zeros(16)
    for inputs, targets in data[:2]:
        with tf.GradientTape() as tape:
            loss = model.loss(targets, model(inputs, training=False))
        gradients = tape.gradient(loss, [weight.value for weight in weights])
        kernel, bias, following, gamma, beta = (w.numpy() * g.numpy() for w, g in zip(weights, gradients, strict=True))
        scores += (kernel.sum((0, 1, 2)) + bias + following.sum((0, 1, 3)) + gamma + beta) ** 2
    config = StructuredPruningConfig(ratio=0.5, criterion="taylor", gradient_batches=2)
    assert shrink(model, config, data).channels["first"] == tuple(np.sort(np.argsort(scores)[-8:]))
    with pytest.raises(ConfigError, match="data must be given"):
        shrink(model, config)


def test_a_strided_convolution_of_pixels_keeps_sixteen_input_channels():
    x = inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(32, 3, name="first")(x)
    x = layers.Conv2D(32, 1, strides=2, name="second")(x)
    model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))
    result = shrink(model, StructuredPruningConfig(ratio=0.75))
    assert [result.model.get_layer(name).filters for name in ("first", "second")] == [16, 8]


def test_a_function_is_a_criterion():
    model = convolutions()
    result = shrink(model, StructuredPruningConfig(ratio=0.5, criterion=lambda weights: np.arange(len(weights))))
    assert result.channels["first"] == tuple(range(8, 16))


def test_a_zero_channel_changes_nothing_when_it_leaves():
    model = convolutions()
    kernel, gamma = model.get_layer("first").kernel, model.get_layer("norm").gamma
    dead = [1, 2, 5, 7, 8, 11, 12, 15]
    kernel.assign(np.where(np.isin(np.arange(16), dead), 0, kernel.numpy()))
    gamma.assign(np.where(np.isin(np.arange(16), dead), 0, 1))
    inputs = examples(model)
    before = outputs(model, inputs)
    result = shrink(
        model, StructuredPruningConfig(ratio=0.5, criterion=lambda w: w[:, :27].any(1), exclude=("second",))
    )
    assert set(result.channels["first"]) == set(range(16)) - set(dead)
    for one, other in zip(before, outputs(result.model, inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_groups_print_their_weights():
    text = str(ChannelGroups(convolutions()))
    assert text.splitlines() == [
        "first: 16 channels in first.kernel axis 3, first.bias axis 0, norm.gamma axis 0, norm.beta axis 0, "
        "norm.moving_mean axis 0, norm.moving_variance axis 0, second.kernel axis 2",
        "second: 32 channels in second.kernel axis 3, second.bias axis 0, logits.kernel axis 0",
    ]


def test_excluded_layers_keep_their_channels():
    result = shrink(convolutions(), StructuredPruningConfig(ratio=0.5, exclude=("first",)))
    assert result.model.get_layer("first").filters == 16
    assert [(skip.name, skip.reason) for skip in result.report.skipped if skip.name == "first"] == [
        ("first", "excluded")
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": 50}, "ratio must be in (0, 1) or None. Received: ratio=50. It is a share; did you mean 0.5?"),
        ({"ratio": 1.0}, "ratio must be in (0, 1) or None. Received: ratio=1.0"),
        ({"ratio": 0.5, "target_flops": 0.5}, "Only one of ratio, target_flops"),
        ({"criterion": "l22"}, "Did you mean 'l2'?"),
        ({"round_to": 0}, "round_to must be"),
        ({"exclude": ("frist",)}, "exclude must name layers of the model. Received: 'frist'"),
        ({"ratio": 0.99}, "ratio must leave at least one channel of each group. Received: ratio=0.99"),
        ({"target_flops": 0.001}, "target_flops must be reachable. Received: 0.001"),
        ({"criterion": lambda weights: weights[:3]}, "criterion must return one finite score per channel"),
    ],
)
def test_wrong_settings(settings, message):
    model = convolutions()
    before = model.get_weights()
    with pytest.raises(ConfigError, match=re.escape(message)):
        shrink(model, StructuredPruningConfig(**settings))
    assert all(np.array_equal(one, other) for one, other in zip(before, model.get_weights(), strict=True))


def test_wrong_models():
    class Own(keras.Model):
        pass

    for model, message in (
        (Own(), "must be functional or Sequential"),
        (keras.Sequential([layers.Dense(4)]), "must be built"),
        ("model.keras", "must be a Keras 3 model"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            shrink(model)


def test_a_model_without_removable_channels_warns():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="logits")])
    with pytest.warns(TfoptWarning, match="shrink changed nothing: it is the model's output 'logits'"):
        result = shrink(model)
    assert outputs(result.model, examples(model))[0].shape == (3, 3)
