"""Random functional graphs: the shrunk model equals its masked parent, whatever is added, joined or shared."""

import warnings

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras import layers, ops
from masked_parent import assert_equals_masked_parent, examples, give_statistics, outputs

from tfopt.errors import TfoptWarning
from tfopt.pruning import StructuredPruningConfig, shrink

WIDTHS = (4, 6, 8)


def match(x, width):
    return x if x.shape[-1] == width else layers.Conv2D(width, 1)(x)


def add(draw, x, others):
    return layers.Add()([x, match(draw(st.sampled_from(others)), x.shape[-1])])


def multiply(draw, x, others):
    gate = layers.GlobalAveragePooling2D(keepdims=True)(draw(st.sampled_from(others)))
    return layers.Multiply()([x, layers.Conv2D(x.shape[-1], 1, activation="sigmoid")(gate)])


def concatenate(draw, x, others):
    return layers.Concatenate()([x, draw(st.sampled_from(others))])


def convolve(draw, x, others):
    return layers.Conv2D(draw(st.sampled_from(WIDTHS)), 3, padding="same")(x)


def convolve_groups(draw, x, others):
    return layers.Conv2D(8, 3, padding="same", groups=2)(match(x, draw(st.sampled_from((4, 8)))))


def share(draw, x, others):
    layer = layers.Conv2D(x.shape[-1], 1)
    return layers.Add()([layer(x), layer(match(draw(st.sampled_from(others)), x.shape[-1]))])


def nest(draw, x, others):
    width = draw(st.sampled_from(WIDTHS))
    inner = keras.Input(x.shape[1:])
    inside = keras.Model(inner, layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(inner)))
    return layers.Add()([inside(x), match(x, width)])


def normalize(draw, x, others):
    kinds = (layers.BatchNormalization, layers.LayerNormalization, lambda: layers.GroupNormalization(2))
    return draw(st.sampled_from(kinds))()(x)


def depthwise(draw, x, others):
    return layers.DepthwiseConv2D(3, padding="same", depth_multiplier=draw(st.sampled_from((1, 2))))(x)


def activate(draw, x, others):
    return draw(st.sampled_from((ops.relu, ops.sigmoid, lambda x: x * 0.5 + 1.0, layers.Activation("gelu"))))(x)


def through_rows(draw, x, others):
    rows = layers.Dense(draw(st.sampled_from(WIDTHS)))(layers.Reshape((16, x.shape[-1]))(x))
    return layers.Reshape((4, 4, rows.shape[-1]))(rows)


def attend(draw, x, others):
    rows = layers.Reshape((16, x.shape[-1]))(x)
    return layers.Reshape((4, 4, x.shape[-1]))(layers.MultiHeadAttention(2, 3)(rows, rows))


def mix(draw, x, others):
    return layers.Lambda(lambda x: x + x[..., :1])(x)  # not followed


STEPS = (
    add, multiply, concatenate, convolve, convolve_groups, share, nest, normalize, depthwise, activate, through_rows,
    attend, mix,
)  # fmt: skip


@st.composite
def models(draw):
    inputs = keras.Input((4, 4, 3))
    found = [layers.Conv2D(8, 3, padding="same")(inputs)]
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=7)):
        found.append(step(draw, found[-1], found))
    flat = layers.Flatten()(found[-1])
    ends = [layers.Dense(2)(flat), layers.GlobalAveragePooling2D()(draw(st.sampled_from(found)))]
    return keras.Model(inputs, ends if draw(st.booleans()) else ends[0])


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(models(), st.sampled_from((0.25, 0.5, 0.75)), st.sampled_from(("layer", "global")), st.integers(0, 2**16))
def test_random_graphs(model, ratio, scope, seed):
    keras.utils.set_random_seed(seed)
    model.set_weights([np.random.default_rng(seed).normal(0, 0.3, each.shape) ** 2 for each in model.get_weights()])
    give_statistics(model)
    config = StructuredPruningConfig(ratio=ratio, round_to=1, scope=scope)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TfoptWarning)  # all channels of a graph may lead to what is not followed
        result = shrink(model, config)
    inputs = examples(model)
    assert [out.shape for out in outputs(result.model, inputs)] == [out.shape for out in outputs(model, inputs)]
    assert_equals_masked_parent(model, result, mattered=False)
