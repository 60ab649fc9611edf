"""Networks of depthwise convolutions for small devices: MobileNetV2 and MobileNetV3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from tfopt.errors import unknown_name
from tfopt.models.arguments import check_arguments
from tfopt.models.channels_last import channels_last
from tfopt.models.vision.applications import body

if TYPE_CHECKING:
    import keras

Size = Literal["small", "large"]
LAST_UNITS = {"small": 1024, "large": 1280}


@channels_last
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
    import keras  # here, so that a list of the builders needs no TensorFlow
    from keras import layers

    check_arguments(input_shape=input_shape, outputs=outputs, alpha=alpha, dropout=dropout, norm_momentum=norm_momentum)
    application = keras.applications.MobileNetV2(
        weights=None,
        include_top=False,
        input_tensor=keras.Input(tuple(input_shape), name="image"),
        alpha=alpha,
        name="mobilenet_v2",
    )
    model = body(application, small_images=small_images, norm_momentum=norm_momentum)
    x = layers.GlobalAveragePooling2D(name="pool")(model.outputs[0])
    if dropout:
        x = layers.Dropout(dropout, name="dropout")(x)
    logits = layers.Dense(outputs, dtype="float32", name="logits")(x)
    return keras.Model(model.inputs[0], logits, name="mobilenet_v2")


@channels_last
def mobilenet_v3(
    input_shape: Sequence[int],
    outputs: int,
    *,
    size: Size = "small",
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
    import keras  # here, so that a list of the builders needs no TensorFlow
    from keras import layers

    check_arguments(input_shape=input_shape, outputs=outputs, alpha=alpha, dropout=dropout, norm_momentum=norm_momentum)
    if size not in get_args(Size):
        raise unknown_name("size", str(size), get_args(Size))
    make = {"small": keras.applications.MobileNetV3Small, "large": keras.applications.MobileNetV3Large}[size]
    application = make(
        weights=None,
        include_top=False,
        include_preprocessing=False,
        input_tensor=keras.Input(tuple(input_shape), name="image"),
        alpha=alpha,
        name=f"mobilenet_v3_{size}",
    )
    model = body(application, small_images=small_images, norm_momentum=norm_momentum)
    x = layers.GlobalAveragePooling2D(name="pool")(model.outputs[0])
    units = LAST_UNITS[size] if alpha <= 1 else 8 * round(LAST_UNITS[size] * alpha / 8)
    x = layers.Dense(units, activation="hard_silu", name="dense")(x)
    if dropout:
        x = layers.Dropout(dropout, name="dropout")(x)
    logits = layers.Dense(outputs, dtype="float32", name="logits")(x)
    return keras.Model(model.inputs[0], logits, name=f"mobilenet_v3_{size}")
