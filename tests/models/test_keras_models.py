"""Models of keras.applications and backbones of KerasHub by name, wherever the name of a builder goes."""

import sys

import keras
import numpy as np
import pytest
from keras import layers

from tfopt.errors import ConfigError
from tfopt.models import BUILDERS, find_builder
from tfopt.models.keras_models import APPLICATIONS, keras_builder
from tfopt.recipe import ModelConfig, Recipe


def test_every_model_of_keras_applications_has_a_name():
    """The list is in tfopt, so that a name is checked without Keras."""
    functions = {name for name in dir(keras.applications) if name[0].isupper()}
    assert set(APPLICATIONS) == functions


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("MobileNet", "mixed_bfloat16"),
        pytest.param("MobileNet", "float32", marks=pytest.mark.slow),
        pytest.param("MobileNetV3Small", "mixed_bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_model_of_keras_has_float32_logits(name, policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = keras_builder(f"keras:{name}")((32, 32, 3), 7)
    finally:
        keras.config.set_dtype_policy(before)
    assert model.input_shape == (None, 32, 32, 3)
    assert model.output_shape == (None, 7)
    assert model.outputs[0].dtype == "float32"
    logits = np.asarray(model(np.random.default_rng(0).random((2, 32, 32, 3), "float32")))
    assert logits.dtype == "float32"
    assert not np.allclose(logits.sum(-1), 1)  # no softmax


def test_arguments_pass_on():
    build = keras_builder("keras:MobileNet")
    whole, narrow = (build((32, 32, 1), 3, alpha=alpha).count_params() for alpha in (1.0, 0.25))
    assert narrow < 0.1 * whole


@pytest.mark.parametrize("name", [pytest.param("EfficientNetB0", marks=pytest.mark.slow), "MobileNetV3Small"])
def test_no_layer_of_the_model_scales_pixels_unless_asked(name):
    build = keras_builder(f"keras:{name}")

    def scales(model):
        return [layer.scale != 1 for layer in model.layers if isinstance(layer, layers.Rescaling)]

    def normalizes(model):
        found = [layer for layer in model.layers if isinstance(layer, layers.Normalization)]
        return [layer for layer in found if layer.input_mean is not None]

    plain, asked = build((32, 32, 3), 3), build((32, 32, 3), 3, include_preprocessing=True)
    assert not any(scales(plain))
    assert not normalizes(plain)
    assert any(scales(asked)) or normalizes(asked)


def test_a_head_of_its_own_suits_weights_of_other_classes():
    model = keras_builder("keras:MobileNet")((32, 32, 3), 4, alpha=0.25, include_top=False)
    assert model.layers[-1].name == "logits"
    assert model.output_shape == (None, 4)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("keras:DenseNet12", "Did you mean 'keras:DenseNet121'"),
        ("keras:resnet50", "Expected one of"),
        ("resnet_cifr", "Did you mean 'resnet_cifar'"),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion(name, remedy):
    with pytest.raises(ConfigError, match=remedy):
        find_builder(name)
    with pytest.raises(ConfigError, match=f"Unknown builder '{name}'"):
        ModelConfig(builder=name)


def test_registered_names_are_found_too():
    assert {name: find_builder(name) for name in BUILDERS} == BUILDERS


def test_a_recipe_and_its_toml_take_such_a_name(tmp_path):
    recipe = Recipe(name="mine", model=ModelConfig(builder="keras:MobileNet", arguments={"alpha": 0.25}))
    (tmp_path / "mine.toml").write_text(recipe.to_toml())
    model = Recipe.from_toml(tmp_path / "mine.toml").model.build((32, 32, 3), 5)
    assert model.output_shape == (None, 5)


def test_arguments_that_keras_refuses_are_a_config_error():
    with pytest.raises(ConfigError, match="arguments must have values that builder 'keras:MobileNetV2' accepts"):
        ModelConfig(builder="keras:MobileNetV2", arguments={"width": 2}).build((32, 32, 3), 5)


def test_without_keras_hub_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    config = ModelConfig(builder="keras_hub:ResNetBackbone")
    with pytest.raises(ConfigError, match=r"needs the package keras_hub. Install it: pip install 'tfopt\[hub\]'"):
        config.build((32, 32, 3), 5)


RESNET = {
    "input_conv_filters": [64],
    "input_conv_kernel_sizes": [3],
    "stackwise_num_filters": [64, 16],
    "stackwise_num_blocks": [1, 1],
    "stackwise_num_strides": [1, 2],
    "block_type": "basic_block",
}
VIT = {"patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
BERT = {"vocabulary_size": 50, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}


class TestKerasHub:
    """With KerasHub installed: pip install 'tfopt[hub]'."""

    @pytest.fixture(autouse=True)
    def needs_keras_hub(self):
        pytest.importorskip("keras_hub", reason="needs the extra hub")

    @pytest.mark.parametrize(("name", "arguments"), [("ResNetBackbone", RESNET), ("ViTBackbone", VIT)])
    def test_a_backbone_of_images_gets_its_shape_and_a_head(self, name, arguments):
        model = ModelConfig(builder=f"keras_hub:{name}", arguments=arguments).build((32, 32, 3), 5)
        assert model.output_shape == (None, 5)
        assert model(np.zeros((2, 32, 32, 3), "float32")).dtype == "float32"

    def test_a_backbone_of_text_takes_the_tokens_alone_and_ignores_padding(self):
        model = keras_builder("keras_hub:BertBackbone")((12,), 5, **BERT, max_sequence_length=24)
        tokens = np.random.default_rng(0).integers(1, 50, (2, 12))
        tokens[:, 8:] = 0
        whole = np.asarray(model(tokens))
        assert whole.shape == (2, 5)
        shorter = keras_builder("keras_hub:BertBackbone")((8,), 5, **BERT, max_sequence_length=24)
        shorter.set_weights(model.get_weights())
        np.testing.assert_allclose(shorter(tokens[:, :8]), whole, atol=1e-5)

    def test_without_pooling_each_position_has_logits(self):
        model = keras_builder("keras_hub:GPT2Backbone")((12,), 50, pooling=False, **BERT)
        assert model.output_shape == (None, 12, 50)

    def test_an_unknown_backbone_is_refused_with_a_suggestion(self):
        with pytest.raises(ConfigError, match="Did you mean 'keras_hub:ResNetBackbone'"):
            keras_builder("keras_hub:ResNetBackbon")((32, 32, 3), 5)

    def test_a_backbone_with_other_inputs_is_refused(self):
        arguments = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
        with pytest.raises(ConfigError, match="Write a builder of your own for it"):
            keras_builder("keras_hub:WhisperBackbone")((12,), 5, vocabulary_size=50, **arguments)
