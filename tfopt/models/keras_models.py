"""Builders of the models of keras.applications and of the backbones of KerasHub, by name: "keras:DenseNet121"."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfopt.data.arguments import optional_package
from tfopt.errors import ConfigError, unknown_name
from tfopt.models.building import channels_last, keras, layers, ops, with_logits

# Listed here, so that a name can be checked without Keras.
APPLICATIONS = (
    "ConvNeXtBase", "ConvNeXtLarge", "ConvNeXtSmall", "ConvNeXtTiny", "ConvNeXtXLarge", "DenseNet121", "DenseNet169",
    "DenseNet201", "EfficientNetB0", "EfficientNetB1", "EfficientNetB2", "EfficientNetB3", "EfficientNetB4",
    "EfficientNetB5", "EfficientNetB6", "EfficientNetB7", "EfficientNetV2B0", "EfficientNetV2B1", "EfficientNetV2B2",
    "EfficientNetV2B3", "EfficientNetV2L", "EfficientNetV2M", "EfficientNetV2S", "InceptionResNetV2", "InceptionV3",
    "MobileNet", "MobileNetV2", "MobileNetV3Large", "MobileNetV3Small", "NASNetLarge", "NASNetMobile", "ResNet101",
    "ResNet101V2", "ResNet152", "ResNet152V2", "ResNet50", "ResNet50V2", "VGG16", "VGG19", "Xception",
)  # fmt: skip
TEXT_INPUTS = ("token_ids", "padding_mask", "segment_ids")


def keras_builder(name: str) -> Callable[..., keras.Model]:
    """Returns the builder of a name such as "keras:DenseNet121" or "keras_hub:ResNetBackbone".

    Raises:
        ConfigError: keras.applications has no such model. (The backbones are known when KerasHub is imported.)
    Example:
        >>> keras_builder("keras:MobileNetV2")((32, 32, 3), 10, alpha=0.35).output_shape
        (None, 10)
    """
    family, _, model = name.partition(":")
    if family not in FAMILIES:
        raise unknown_name("family of builders", family, FAMILIES)
    if family == "keras" and model not in APPLICATIONS:
        raise unknown_name("builder", name, [f"keras:{known}" for known in APPLICATIONS])
    return functools.partial(FAMILIES[family], model)


@channels_last
def application(
    model: str,
    input_shape: Sequence[int],
    outputs: int,
    *,
    weights: str | None = None,
    include_top: bool = True,
    include_preprocessing: bool = False,
    **arguments: Any,
) -> keras.Model:
    """Builds a model of keras.applications, with logits in float32.

    Args:
        model: Name of the function.
        input_shape: (height, width, channels).
        outputs: Number of classes, or of values.
        weights: "imagenet" or the path of a weights file. None begins with random weights.
        include_top: Whether to use the head of Keras. If False, the head is a mean over all pixels and a dense layer;
            weights of another number of classes need this.
        include_preprocessing: Whether the layers of the model scale pixels from 0 to 255. If False, the model takes
            values as they come.
        arguments: More arguments of the function, such as alpha.
    """

    from tfopt.models.float32_outputs import float32_outputs, half_outputs  # here, because it imports TensorFlow

    make = getattr(keras.applications, model)
    inputs = keras.Input(tuple(input_shape), name="image")
    if "include_preprocessing" in inspect.signature(make).parameters:
        arguments["include_preprocessing"] = include_preprocessing
    if include_top:
        made = make(weights=weights, input_tensor=inputs, classes=outputs, classifier_activation=None, **arguments)
        logits = made.outputs[0]
    else:
        made = make(weights=weights, input_tensor=inputs, include_top=False, pooling="avg", **arguments)
        logits = layers.Dense(outputs, dtype="float32", name="logits")(made.outputs[0])
    built = keras.Model(inputs, logits, name=made.name)
    if not include_preprocessing:
        for layer in built.layers:
            if isinstance(layer, layers.Rescaling):  # the first EfficientNet has no switch for it
                layer.scale, layer.offset = 1.0, 0.0
    if half_outputs(built):
        float32_outputs(built)
    return built


@channels_last
def backbone(
    model: str,
    input_shape: Sequence[int | None],
    outputs: int,
    *,
    preset: str | None = None,
    pooling: bool = True,
    **arguments: Any,
) -> keras.Model:
    """Builds a backbone of KerasHub with a dense layer for float32 logits.

    Args:
        model: Name of the class in keras_hub.models.
        input_shape: (height, width, channels) of an image, or (length,) of tokens, where 0 is padding.
        outputs: Number of classes, tokens or values.
        preset: Name or path of a preset with trained weights. None begins with random weights.
        pooling: Whether the logits are of the whole example. If False, each position has logits.
        arguments: Arguments of the class. An image backbone gets its image_shape from input_shape.
    Raises:
        ConfigError: KerasHub is not installed, has no such backbone, or the backbone needs other inputs.
    """
    make = _backbone_class(model)
    image = len(input_shape) == 3
    if image and "image_shape" in inspect.signature(make).parameters:
        arguments = {"image_shape": tuple(input_shape)} | arguments
    body = make(**arguments) if preset is None else make.from_preset(preset, **arguments)
    if image:
        inputs = layers.Input(tuple(input_shape), name="image")
        features = body(inputs)
    else:
        inputs = layers.Input(tuple(input_shape), dtype="int32", name="tokens")
        features = body(_text_inputs(model, body, inputs))
    return with_logits(inputs, _features(features, pooling=pooling), outputs, model)


FAMILIES: Mapping[str, Callable[..., Any]] = types.MappingProxyType({"keras": application, "keras_hub": backbone})


def _backbone_class(model: str) -> Any:
    models = optional_package("keras_hub", "hub", f"The builder 'keras_hub:{model}'").models
    known = [name for name in dir(models) if name.endswith("Backbone") and name != "Backbone"]
    if model not in known:
        raise unknown_name("builder", f"keras_hub:{model}", [f"keras_hub:{name}" for name in known])
    return getattr(models, model)


def _text_inputs(model: str, body: Any, tokens: Any) -> Any:
    """Returns the inputs of a text backbone, made from the tokens alone."""
    wanted = list(body.input) if isinstance(body.input, dict) else []
    if not wanted or not set(wanted) <= set(TEXT_INPUTS):
        raise ConfigError(
            f"The backbone must take an image, or tokens with {' and '.join(TEXT_INPUTS[1:])}. Received: "
            f"builder='keras_hub:{model}', which takes {body.input!r}. Write a builder of your own for it."
        )
    made = {
        "token_ids": tokens,
        "padding_mask": ops.cast(ops.not_equal(tokens, 0), "int32"),
        "segment_ids": ops.zeros_like(tokens),
    }
    return {name: made[name] for name in wanted}


def _features(features: Any, *, pooling: bool) -> Any:
    """Returns [batch, channels] with pooling, else the features of each position."""
    if isinstance(features, dict):
        if pooling and "pooled_output" in features:
            return features["pooled_output"]
        features = features["sequence_output"]
    if not pooling or len(features.shape) == 2:
        return features
    pool = layers.GlobalAveragePooling2D if len(features.shape) == 4 else layers.GlobalAveragePooling1D
    return pool(name="pool")(features)
