"""resnet50, mobilenet_v2, mobilenet_v3 and efficientnet_v2: strides, stem, widths, and the functions of Keras."""

import keras
import numpy as np
import pytest
from keras import layers

from tfopt.errors import ConfigError
from tfopt.models import efficientnet_v2, mobilenet_v2, mobilenet_v3, resnet50, resnet_cifar
from tfopt.models.table import SMALL_MODELS

FROM_KERAS = {"mobilenet_v2": mobilenet_v2, "mobilenet_v3": mobilenet_v3, "efficientnet_v2": efficientnet_v2}


def test_resnet50_halves_the_size_in_the_3x3_convolution_and_begins_as_its_shortcuts():
    model = resnet50((64, 64, 3), 5, depths=(1, 2), width=8)
    assert model.name == "resnet11"
    strides = {layer.name: layer.strides for layer in model.layers if isinstance(layer, layers.Conv2D)}
    assert {name for name, stride in strides.items() if stride == (2, 2)} == {
        "stem_conv",
        "stage2_block1_2_conv",
        "stage2_block1_shortcut_conv",
    }
    assert not any(layer.use_bias for layer in model.layers if isinstance(layer, layers.Conv2D))
    gammas = {layer.name: np.asarray(layer.gamma) for layer in model.layers if layer.name.endswith("_norm")}
    assert {name for name, gamma in gammas.items() if not gamma.any()} == {
        "stage1_block1_3_norm",
        "stage2_block1_3_norm",
        "stage2_block2_3_norm",
    }
    both = keras.Model(model.input, [model.get_layer(f"stage2_block{n}_out").output for n in (1, 2)])
    before, after = both(np.random.default_rng(0).random((2, 64, 64, 3), "float32"))
    np.testing.assert_array_equal(before, after)


def test_the_stem_of_resnet50_keeps_small_images():
    assert resnet50((32, 32, 3), 5, depths=(1,), width=8).get_layer("pool").input.shape == (None, 8, 8, 32)
    small = resnet50((32, 32, 3), 5, depths=(1,), width=8, small_images=True)
    assert small.get_layer("pool").input.shape == (None, 32, 32, 32)
    assert small.get_layer("stem_conv").kernel_size == (3, 3)


@pytest.mark.parametrize("depths", [(), (2, 0)])
def test_a_stage_without_blocks_is_refused(depths):
    with pytest.raises(ConfigError, match=r"depths must be .* Give one number for each stage"):
        resnet50((32, 32, 3), 5, depths=depths)


@pytest.mark.parametrize("build", [resnet_cifar, resnet50])
def test_residual_networks_take_the_momentum_of_their_normalizations(build):
    arguments = {"depth": 8} if build is resnet_cifar else {"depths": (1,)}
    model = build((16, 16, 1), 3, width=8, norm_momentum=0.9, **arguments)
    assert {layer.momentum for layer in model.layers if isinstance(layer, layers.BatchNormalization)} == {0.9}


@pytest.mark.slow
@pytest.mark.parametrize("name", FROM_KERAS)
def test_small_images_keep_their_size_in_the_stem(name):
    arguments = SMALL_MODELS[name].arguments
    sizes = {}
    for small_images in (False, True):
        model = FROM_KERAS[name]((64, 64, 3), 3, **arguments, small_images=small_images, norm_momentum=0.8)
        sizes[small_images] = model.get_layer("pool").input.shape[1:3]
        assert {each.momentum for each in model.layers if isinstance(each, layers.BatchNormalization)} == {0.8}
    assert sizes == {False: (2, 2), True: (4, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FROM_KERAS)
def test_models_from_keras_compute_what_keras_computes(name):
    """The copy of the graph, with other names and strides, is the same function of the same weights."""
    model = FROM_KERAS[name]((64, 64, 3), 3)
    make = {
        "mobilenet_v2": keras.applications.MobileNetV2,
        "mobilenet_v3": keras.applications.MobileNetV3Small,
        "efficientnet_v2": keras.applications.EfficientNetV2B0,
    }[name]
    switch = {} if name == "mobilenet_v2" else {"include_preprocessing": False}
    original = make(weights=None, include_top=False, input_shape=(64, 64, 3), **switch)
    body = keras.Model(model.input, model.get_layer("pool").input)
    body.set_weights(original.get_weights())
    x = np.random.default_rng(0).random((2, 64, 64, 3), "float32")
    np.testing.assert_allclose(body(x), original(x), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_width_of_efficientnet_scales_every_layer():
    whole, half = (efficientnet_v2((32, 32, 3), 3, alpha=alpha) for alpha in (1.0, 0.5))
    for layer, narrow in zip(whole.layers, half.layers, strict=True):
        if isinstance(layer, layers.Conv2D) and layer.filters % 16 == 0:
            assert narrow.filters == layer.filters // 2
            assert narrow.name == layer.name


@pytest.mark.parametrize(("build", "known"), [(mobilenet_v3, "'large', 'small'"), (efficientnet_v2, "'b0', 'b1'")])
def test_an_unknown_size_is_refused_with_the_known_ones(build, known):
    with pytest.raises(ConfigError, match=f"Unknown size 'tiny'. Expected one of: {known}"):
        build((32, 32, 3), 3, size="tiny")
