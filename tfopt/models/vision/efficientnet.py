"""EfficientNetV2: fused convolutions in the early stages, depthwise convolutions with channel attention after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from tfopt.errors import unknown_name
from tfopt.models.arguments import check_arguments
from tfopt.models.channels_last import channels_last
from tfopt.models.vision.applications import body

if TYPE_CHECKING:
    import keras

Size = Literal["b0", "b1", "b2", "b3", "s", "m", "l"]


@channels_last
def efficientnet_v2(
    input_shape: Sequence[int],
    outputs: int,
    *,
    size: Size = "b0",
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
    import keras  # here, so that a list of the builders needs no TensorFlow
    from keras import layers

    check_arguments(input_shape=input_shape, outputs=outputs, alpha=alpha, dropout=dropout, norm_momentum=norm_momentum)
    if size not in get_args(Size):
        raise unknown_name("size", str(size), get_args(Size))
    application = getattr(keras.applications, f"EfficientNetV2{size.upper()}")(
        weights=None,
        include_top=False,
        include_preprocessing=False,
        input_tensor=keras.Input(tuple(input_shape), name="image"),
    )
    model = body(application, small_images=small_images, norm_momentum=norm_momentum, alpha=alpha)
    x = layers.GlobalAveragePooling2D(name="pool")(model.outputs[0])
    if dropout:
        x = layers.Dropout(dropout, name="dropout")(x)
    logits = layers.Dense(outputs, dtype="float32", name="logits")(x)
    return keras.Model(model.inputs[0], logits, name=f"efficientnet_v2_{size}")
