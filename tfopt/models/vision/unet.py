"""U-Net, a model of masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfopt.errors import ConfigError
from tfopt.models.arguments import builder

if TYPE_CHECKING:
    import keras
    from keras import KerasTensor


@builder()
def unet(
    input_shape: Sequence[int],
    outputs: int,
    *,
    width: int = 64,
    depth: int = 4,
    norm_momentum: float = 0.99,
) -> keras.Model:
    """Builds U-Net, which gives the class of every pixel.

    A contracting path halves height and width `depth` times, an expanding path doubles them again, and each step of the
    expanding path also reads the features of the same size on the way down. Two things differ from the paper: the
    convolutions pad their input (padding="same"), so that a mask is as large as its image, and batch normalization
    follows each of them.

    Args:
        input_shape: (height, width, channels). Height and width must be multiples of 2**depth, or None.
        outputs: Number of classes.
        width: Number of filters at full size. Each step down doubles it.
        depth: Number of steps down, and of steps up.
        norm_momentum: Momentum of the moving statistics of batch normalization. A training of few hundred steps needs
            0.9, because at 0.99 the statistics lag behind the weights.
    Returns: A model from [batch, height, width, channels] to logits [batch, height, width, outputs]. With the defaults,
        3 channels and 2 classes, it has 31,037,698 trained parameters.
    Raises:
        ConfigError: Height or width is no multiple of 2**depth.
    Example:
        >>> unet((32, 32, 1), 3, width=8, depth=2).output_shape
        (None, 32, 32, 3)

    Reference:
        Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI 2015,
        arXiv:1505.04597.
    """
    import keras  # here, so that a list of the builders needs no TensorFlow
    from keras import layers

    _check_sizes(input_shape, depth)
    inputs = keras.Input(tuple(input_shape), name="image")
    x, skipped = inputs, []
    for step in range(depth):
        x = _two_convolutions(x, width * 2**step, norm_momentum, f"down{step + 1}")
        skipped.append(x)
        x = layers.MaxPooling2D(name=f"down{step + 1}_pool")(x)
    x = _two_convolutions(x, width * 2**depth, norm_momentum, "bottom")
    for step in reversed(range(depth)):
        filters, name = width * 2**step, f"up{step + 1}"
        x = layers.Conv2DTranspose(filters, 2, strides=2, name=f"{name}_transpose")(x)
        x = layers.Concatenate(name=f"{name}_concat")([skipped[step], x])
        x = _two_convolutions(x, filters, norm_momentum, name)
    logits = layers.Conv2D(outputs, 1, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="unet")


def _check_sizes(input_shape: Sequence[int], depth: int) -> None:
    multiple = 2**depth
    if any(side is not None and (side % multiple) for side in input_shape[:2]):
        nearest = ["any" if side is None else multiple * max(1, round(side / multiple)) for side in input_shape[:2]]
        raise ConfigError(
            f"Height and width must be multiples of {multiple} with depth={depth}. Received: "
            f"input_shape={tuple(input_shape)}. The nearest are {nearest[0]} and {nearest[1]}."
        )


def _two_convolutions(x: KerasTensor, filters: int, momentum: float, name: str) -> KerasTensor:
    from keras import layers

    for number in (1, 2):
        x = layers.Conv2D(
            filters,
            3,
            padding="same",
            use_bias=False,  # batch normalization has its own
            kernel_initializer="he_normal",
            name=f"{name}_conv{number}",
        )(x)
        x = layers.BatchNormalization(momentum=momentum, name=f"{name}_norm{number}")(x)
        x = layers.ReLU(name=f"{name}_relu{number}")(x)
    return x
