"""Residual networks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tfopt.errors import ConfigError
from tfopt.models.arguments import builder

if TYPE_CHECKING:
    import keras
    from keras import KerasTensor


@builder(depth=None)
def resnet_cifar(
    input_shape: Sequence[int], outputs: int, *, depth: int = 20, width: int = 16, norm_momentum: float = 0.99
) -> keras.Model:
    """Builds the residual network for small images: three stages of two-convolution blocks.

    The shortcut between stages is a 1x1 convolution with batch normalisation (option B of the paper).

    Args:
        input_shape: (height, width, channels), each side at least 8.
        outputs: Number of classes, or of values.
        depth: Number of layers with weights along the main path, 6n + 2: 8, 14, 20, 32, 44, 56, 110.
        width: Number of filters in the first stage. The later stages have twice and four times this number.
        norm_momentum: Momentum of the moving statistics of batch normalization. In a short training 0.9 follows the
            changing weights faster.
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
    conv_norm = functools.partial(_conv_norm, momentum=norm_momentum)
    inputs = keras.Input(tuple(input_shape), name="image")
    x = conv_norm(inputs, width, 3, 1, "stem", relu=True)
    for stage in range(3):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _block(conv_norm, x, width * 2**stage, stride, f"stage{stage + 1}_block{block + 1}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    logits = layers.Dense(outputs, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name=f"resnet{depth}_cifar")


@builder()
def resnet50(
    input_shape: Sequence[int],
    outputs: int,
    *,
    depths: Sequence[int] = (3, 4, 6, 3),
    width: int = 64,
    small_images: bool = False,
    norm_momentum: float = 0.99,
) -> keras.Model:
    """Builds ResNet-50 v1.5, or another depth and width of it: stages of blocks of 1x1, 3x3 and 1x1 convolutions.

    Version 1.5 halves the size in the 3x3 convolution of a block, and version 1 in the first 1x1 convolution. The last
    normalization of a block begins with gamma zero, so that each block begins as its shortcut. With 224x224x3 images
    and 1000 classes the model has 25,557,032 trained parameters and 4.1e9 multiply-adds.

    Args:
        input_shape: (height, width, channels).
        outputs: Number of classes, or of values.
        depths: Number of blocks in each stage. (3, 4, 23, 3) is ResNet-101.
        width: Number of filters of the 3x3 convolutions in the first stage. Each later stage has twice as many. The
            last convolution of a block has four times as many.
        small_images: Whether the stem keeps the size of the image: a 3x3 convolution without pooling, for images of
            about 32 pixels. Otherwise the stem divides the size by four.
        norm_momentum: Momentum of the moving statistics of batch normalization. In a short training 0.9 follows the
            changing weights faster.
    Returns: A model from [batch, height, width, channels] to logits [batch, outputs].
    Raises:
        ConfigError: depths is empty or has a number below 1.
    Example:
        >>> resnet50((32, 32, 3), 10, depths=(1, 1), width=8, small_images=True).output_shape
        (None, 10)

    Reference:
        He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385; Goyal et al., "Accurate,
        Large Minibatch SGD", 2017, arXiv:1706.02677, for the zero gamma and the place of the stride.
    """
    import keras  # here, so that a list of the builders needs no TensorFlow
    from keras import layers

    conv_norm = functools.partial(_conv_norm, momentum=norm_momentum)
    inputs = keras.Input(tuple(input_shape), name="image")
    if small_images:
        x = conv_norm(inputs, width, 3, 1, "stem", relu=True)
    else:
        x = conv_norm(inputs, width, 7, 2, "stem", relu=True)
        x = layers.MaxPooling2D(3, strides=2, padding="same", name="stem_pool")(x)
    for stage, blocks in enumerate(depths):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _bottleneck(conv_norm, x, width * 2**stage, stride, f"stage{stage + 1}_block{block + 1}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    logits = layers.Dense(outputs, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name=f"resnet{3 * sum(depths) + 2}")


def _bottleneck(
    conv_norm: Callable[..., KerasTensor], x: KerasTensor, filters: int, stride: int, name: str
) -> KerasTensor:
    from keras import layers

    shortcut = x
    if stride != 1 or x.shape[-1] != 4 * filters:
        shortcut = conv_norm(x, 4 * filters, 1, stride, f"{name}_shortcut", relu=False)
    x = conv_norm(x, filters, 1, 1, f"{name}_1", relu=True)
    x = conv_norm(x, filters, 3, stride, f"{name}_2", relu=True)
    x = conv_norm(x, 4 * filters, 1, 1, f"{name}_3", relu=False, gamma="zeros")
    x = layers.Add(name=f"{name}_add")([shortcut, x])
    return layers.ReLU(name=f"{name}_out")(x)


def _block(conv_norm: Callable[..., KerasTensor], x: KerasTensor, filters: int, stride: int, name: str) -> KerasTensor:
    from keras import layers

    shortcut = x
    if stride != 1 or x.shape[-1] != filters:
        shortcut = conv_norm(x, filters, 1, stride, f"{name}_shortcut", relu=False)
    x = conv_norm(x, filters, 3, stride, f"{name}_1", relu=True)
    x = conv_norm(x, filters, 3, 1, f"{name}_2", relu=False)
    x = layers.Add(name=f"{name}_add")([shortcut, x])
    return layers.ReLU(name=f"{name}_out")(x)


def _conv_norm(
    x: KerasTensor, filters: int, size: int, stride: int, name: str, *, relu: bool, momentum: float, gamma: str = "ones"
) -> KerasTensor:
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
    x = layers.BatchNormalization(momentum=momentum, gamma_initializer=gamma, name=f"{name}_norm")(x)
    return layers.ReLU(name=f"{name}_relu")(x) if relu else x
