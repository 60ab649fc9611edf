"""Residual networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfopt.errors import ConfigError

if TYPE_CHECKING:
    import keras
    from keras import KerasTensor


def resnet_cifar(input_shape: Sequence[int], outputs: int, *, depth: int = 20, width: int = 16) -> keras.Model:
    """Builds the residual network for small images: three stages of two-convolution blocks.

    The shortcut between stages is a 1x1 convolution with batch normalisation (option B of the paper).

    Args:
        input_shape: (height, width, channels), each side at least 8.
        outputs: Number of classes, or of values.
        depth: Number of layers with weights along the main path, 6n + 2: 8, 14, 20, 32, 44, 56, 110.
        width: Number of filters in the first stage. The later stages have twice and four times this number.
    Returns: A model from [batch, height, width, channels] to logits [batch, outputs].
    Raises:
        ConfigError: depth is not 6n + 2.
    Example:
        >>> resnet_cifar((32, 32, 3), 10, depth=8).output_shape
        (None, 10)

    Reference:
        He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385, section 4.2.
    """
    import keras  # here, so that a list of the builders needs no TensorFlow
    from keras import layers

    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise ConfigError(
            f"depth must be 6n + 2 with n at least 1. Received: depth={depth}. "
            f"The nearest is {6 * max(1, round((depth - 2) / 6)) + 2}."
        )
    inputs = keras.Input(tuple(input_shape), name="image")
    x = _conv_norm(inputs, width, 3, 1, "stem", relu=True)
    for stage in range(3):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _block(x, width * 2**stage, stride, f"stage{stage + 1}_block{block + 1}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    logits = layers.Dense(outputs, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name=f"resnet{depth}_cifar")


def _block(x: KerasTensor, filters: int, stride: int, name: str) -> KerasTensor:
    from keras import layers

    shortcut = x
    if stride != 1 or x.shape[-1] != filters:
        shortcut = _conv_norm(x, filters, 1, stride, f"{name}_shortcut", relu=False)
    x = _conv_norm(x, filters, 3, stride, f"{name}_1", relu=True)
    x = _conv_norm(x, filters, 3, 1, f"{name}_2", relu=False)
    x = layers.Add(name=f"{name}_add")([shortcut, x])
    return layers.ReLU(name=f"{name}_out")(x)


def _conv_norm(x: KerasTensor, filters: int, size: int, stride: int, name: str, *, relu: bool) -> KerasTensor:
    from keras import layers

    x = layers.Conv2D(
        filters,
        size,
        strides=stride,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=f"{name}_conv",
    )(x)
    x = layers.BatchNormalization(name=f"{name}_norm")(x)
    return layers.ReLU(name=f"{name}_relu")(x) if relu else x
