"""Networks built from keras.applications, also for small images and other widths: MobileNetV2, MobileNetV3,
EfficientNetV2."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from tfopt.errors import unknown_name
from tfopt.models.building import builder, keras, layers, with_logits


def _body(
    make: Callable[..., keras.Model],
    input_shape: Sequence[int],
    small_images: bool,
    norm_momentum: float,
    *,
    width: float = 1.0,
    **arguments: Any,
) -> tuple[Any, Any]:
    """Returns the input of a model of keras.applications and the means of its last channels.

    The layers are made anew, with settings that keras.applications fixes: the stride of the first convolution with
    small images, the momentum (Keras sets 0.999 in some models, whose statistics need thousands of steps to reach those
    of the data), and the width, for functions of Keras without an argument alpha. Keras numbers the layers without a
    name over all models of a process. Here the numbers begin again with each model, so that two models name their
    layers alike.
    """
    inputs = keras.Input(tuple(input_shape), name="image")
    application = make(weights=None, include_top=False, input_tensor=inputs, **arguments)
    seen: Counter[str] = Counter()
    stem = next(layer for layer in application.layers if isinstance(layer, layers.Conv2D))

    def copy(layer: Any) -> Any:
        config = layer.get_config()
        config["name"] = _own_name(layer, seen)
        if layer is stem and small_images:
            config["strides"] = (1, 1)
        if width != 1 and "filters" in config:
            config["filters"] = _scaled(config["filters"], width)
        if width != 1 and isinstance(layer, layers.Reshape):  # the means of the channels, as an image of one pixel
            config["target_shape"] = (1, 1, _scaled(config["target_shape"][-1], width))
        if isinstance(layer, layers.BatchNormalization):
            config["momentum"] = norm_momentum
        return type(layer).from_config(config)

    model = keras.models.clone_model(application, clone_function=copy)
    return model.inputs[0], layers.GlobalAveragePooling2D(name="pool")(model.outputs[0])


def _scaled(filters: int, width: float) -> int:
    return max(8, 8 * round(filters * width / 8))


def _own_name(layer: Any, seen: Counter[str]) -> str:
    """Returns the name of a layer, with another number if Keras made it from the class, such as re_lu_12."""
    stem = re.sub(r"_\d+$", "", layer.name)
    if stem.replace("_", "") != type(layer).__name__.lower():
        return str(layer.name)
    seen[stem] += 1
    return f"{stem}_{seen[stem]}"


MobileNetSize = Literal["small", "large"]
LAST_UNITS = {"small": 1024, "large": 1280}


@builder()
def mobilenet_v2(
    input_shape: Sequence[int],
    outputs: int,
    *,
    alpha: float = 1.0,
    dropout: float = 0.2,
    small_images: bool = False,
    norm_momentum: float = 0.99,
) -> keras.Model:
    """Builds MobileNetV2 from keras.applications, with logits in float32.

    With 224x224x3 images and 1000 classes the model has 3,504,872 trained parameters and 300e6 multiply-adds. Keras
    counts 3,538,984, with the moving statistics.

    Args:
        input_shape: (height, width, channels). Values in [-1, 1] or [0, 1].
        outputs: Number of classes, or of values.
        alpha: Width: the number of filters of every layer is multiplied by it, and rounded to a multiple of 8. The last
            convolution has 1280 filters, or more with alpha above 1.
        dropout: Share of the activations before the output layer that training sets to zero.
        small_images: Whether the stem keeps the size of the image, for images of about 32 pixels. The model then
            divides the size by 16 instead of 32.
        norm_momentum: Momentum of the moving statistics of batch normalization.
    Returns: A model from [batch, height, width, channels] to logits [batch, outputs].
    Example:
        >>> mobilenet_v2((32, 32, 3), 10, alpha=0.35, small_images=True).output_shape
        (None, 10)

    Reference:
        Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018, arXiv:1801.04381.
    """
    inputs, x = _body(
        keras.applications.MobileNetV2, input_shape, small_images, norm_momentum, alpha=alpha, name="mobilenet_v2"
    )
    return with_logits(inputs, x, outputs, "mobilenet_v2", dropout=dropout)


@builder()
def mobilenet_v3(
    input_shape: Sequence[int],
    outputs: int,
    *,
    size: MobileNetSize = "small",
    alpha: float = 1.0,
    dropout: float = 0.2,
    small_images: bool = False,
    norm_momentum: float = 0.99,
) -> keras.Model:
    """Builds MobileNetV3 from keras.applications, with logits in float32.

    With 224x224x3 images and 1000 classes the small model has 2,542,856 trained parameters and 56e6 multiply-adds, the
    large one 5,483,032 and 219e6. Keras counts 2,554,968 and 5,507,432, with the moving statistics.

    Args:
        input_shape: (height, width, channels), each side at least 32. Values in [-1, 1] or [0, 1].
        outputs: Number of classes, or of values.
        size: "small" or "large".
        alpha: Width: the number of filters of every convolution is multiplied by it, and rounded to a multiple of 8.
        dropout: Share of the activations before the output layer that training sets to zero.
        small_images: Whether the stem keeps the size of the image, for images of about 32 pixels. The model then
            divides the size by 16 instead of 32.
        norm_momentum: Momentum of the moving statistics of batch normalization.
    Returns: A model from [batch, height, width, channels] to logits [batch, outputs].
    Raises:
        ConfigError: The size is unknown.
    Example:
        >>> mobilenet_v3((32, 32, 3), 10, alpha=0.5, small_images=True).output_shape
        (None, 10)

    Reference:
        Howard et al., "Searching for MobileNetV3", ICCV 2019, arXiv:1905.02244.
    """
    if size not in get_args(MobileNetSize):
        raise unknown_name("size", str(size), get_args(MobileNetSize))
    make, name = getattr(keras.applications, f"MobileNetV3{size.capitalize()}"), f"mobilenet_v3_{size}"
    settings: dict[str, Any] = {"include_preprocessing": False, "alpha": alpha, "name": name}
    inputs, x = _body(make, input_shape, small_images, norm_momentum, **settings)
    units = LAST_UNITS[size] if alpha <= 1 else _scaled(LAST_UNITS[size], alpha)
    x = layers.Dense(units, activation="hard_silu", name="dense")(x)
    return with_logits(inputs, x, outputs, name, dropout=dropout)


EfficientNetSize = Literal["b0", "b1", "b2", "b3", "s", "m", "l"]


@builder()
def efficientnet_v2(
    input_shape: Sequence[int],
    outputs: int,
    *,
    size: EfficientNetSize = "b0",
    alpha: float = 1.0,
    dropout: float = 0.2,
    small_images: bool = False,
    norm_momentum: float = 0.9,
) -> keras.Model:
    """Builds EfficientNetV2 from keras.applications, with logits in float32.

    With 1000 classes, b0 has 7,139,704 trained parameters, and s 21,458,488. Keras counts 7,200,312 and 21,612,360,
    with the moving statistics. b0 is for images of 224x224, with 0.72e9 multiply-adds; s is for 384x384, with 8.4e9.

    Args:
        input_shape: (height, width, channels). Values in [-1, 1] or [0, 1].
        outputs: Number of classes, or of values.
        size: "b0" to "b3", "s", "m" or "l".
        alpha: Width: the number of filters of every layer is multiplied by it, and rounded to a multiple of 8.
        dropout: Share of the activations before the output layer that training sets to zero.
        small_images: Whether the stem keeps the size of the image, for images of about 32 pixels. The model then
            divides the size by 16 instead of 32.
        norm_momentum: Momentum of the moving statistics of batch normalization.
    Returns: A model from [batch, height, width, channels] to logits [batch, outputs].
    Raises:
        ConfigError: The size is unknown.
    Example:
        >>> efficientnet_v2((32, 32, 3), 10, alpha=0.25).output_shape
        (None, 10)

    Reference:
        Tan and Le, "EfficientNetV2: Smaller Models and Faster Training", ICML 2021, arXiv:2104.00298.
    """
    if size not in get_args(EfficientNetSize):
        raise unknown_name("size", str(size), get_args(EfficientNetSize))
    make = getattr(keras.applications, f"EfficientNetV2{size.upper()}")
    inputs, x = _body(make, input_shape, small_images, norm_momentum, width=alpha, include_preprocessing=False)
    return with_logits(inputs, x, outputs, f"efficientnet_v2_{size}", dropout=dropout)
