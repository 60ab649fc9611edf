"""Convolutional networks: residual networks, and U-Net, a model of masks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tfopt.errors import ConfigError
from tfopt.models.building import builder, conv_norm, keras, layers, with_logits


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
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise ConfigError(
            f"depth must be 6n + 2 with n at least 1. Received: depth={depth}. "
            f"The nearest is {6 * max(1, round((depth - 2) / 6)) + 2}."
        )
    inputs = layers.Input(tuple(input_shape), name="image")
    x = conv_norm(inputs, width, 3, "stem", momentum=norm_momentum)
    x = _stages(x, [blocks] * 3, width, norm_momentum, bottleneck=False)
    return with_logits(inputs, x, outputs, f"resnet{depth}_cifar")


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
    inputs = layers.Input(tuple(input_shape), name="image")
    size, stride = (3, 1) if small_images else (7, 2)
    x = conv_norm(inputs, width, size, "stem", stride=stride, momentum=norm_momentum)
    if not small_images:
        x = layers.MaxPooling2D(3, strides=2, padding="same", name="stem_pool")(x)
    x = _stages(x, depths, width, norm_momentum, bottleneck=True)
    return with_logits(inputs, x, outputs, f"resnet{3 * sum(depths) + 2}")


def _stages(x: Any, depths: Sequence[int], width: int, momentum: float, *, bottleneck: bool) -> Any:
    """Adds stages of residual blocks and the mean over the pixels. Each later stage is half as large, twice as wide."""
    for stage, blocks in enumerate(depths):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _block(x, width * 2**stage, stride, f"stage{stage + 1}_block{block + 1}", momentum, bottleneck)
    return layers.GlobalAveragePooling2D(name="pool")(x)


def _block(x: Any, filters: int, stride: int, name: str, momentum: float, bottleneck: bool) -> Any:
    convolution = functools.partial(conv_norm, momentum=momentum)
    wide = 4 * filters if bottleneck else filters
    shortcut = x
    if stride != 1 or x.shape[-1] != wide:
        shortcut = convolution(x, wide, 1, f"{name}_shortcut", stride=stride, relu=False)
    if bottleneck:
        x = convolution(x, filters, 1, f"{name}_1")
        x = convolution(x, filters, 3, f"{name}_2", stride=stride)
        x = convolution(x, wide, 1, f"{name}_3", relu=False, gamma="zeros")
    else:
        x = convolution(x, filters, 3, f"{name}_1", stride=stride)
        x = convolution(x, filters, 3, f"{name}_2", relu=False)
    x = layers.Add(name=f"{name}_add")([shortcut, x])
    return layers.ReLU(name=f"{name}_out")(x)


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
    multiple = 2**depth
    if any(side is not None and (side % multiple) for side in input_shape[:2]):
        nearest = ["any" if side is None else multiple * max(1, round(side / multiple)) for side in input_shape[:2]]
        raise ConfigError(
            f"Height and width must be multiples of {multiple} with depth={depth}. Received: "
            f"input_shape={tuple(input_shape)}. The nearest are {nearest[0]} and {nearest[1]}."
        )
    inputs = layers.Input(tuple(input_shape), name="image")
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


def _two_convolutions(x: Any, filters: int, momentum: float, name: str) -> Any:
    for number in (1, 2):
        x = conv_norm(x, filters, 3, name, number=number, momentum=momentum)
    return x
