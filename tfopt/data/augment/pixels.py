"""The values of pixels and their colours. uint8 values are from 0 to 255, floating-point ones from 0 to 1.

Brightness, contrast, saturation and hue of each image are one 3x3 colour matrix and one offset. With the luma w (the
weights of red, green and blue in the brightness that an eye sees), a brightness b, a contrast k, a saturation s and a
rotation of the hue by t, in this order, the new pixel is

    k (1 w' + s cos(t) (I - 1 w') + s sin(t) J) pixel  +  b + (1 - k) mean(w' pixel)

I - 1 w' leaves the colour without its luma. J turns this colour by a right angle about the grey axis, in the YIQ space
of NTSC television, which keeps the luma. Saturation and hue keep grey as it is, so that the offset is the same for the
three channels. So one matrix product per batch does the work of four passes.

Reference:
    Haeberli, "Matrix Operations for Image Processing", 1993.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.data.augment.config import AugmentConfig
from tfopt.errors import ConfigError

LEVELS = 256
LUMA = np.array([0.299, 0.587, 0.114], np.float32)
YIQ = np.array([LUMA, [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]], np.float64)
# Each row of a product is (pixel as a row) times (matrix), so that the matrices are transposed.
GREY_PART = np.outer(LUMA, np.ones(3)).astype(np.float32)
COLOUR_PART = np.eye(3, dtype=np.float32) - GREY_PART
QUARTER_TURN = (np.linalg.inv(YIQ) @ [[0, 0, 0], [0, 0, -1], [0, 1, 0]] @ YIQ).T.astype(np.float32)


def largest(dtype: tf.DType) -> float:
    """Returns the value of white.

    Example:
        >>> largest(tf.uint8), largest(tf.float16)
        (255.0, 1.0)
    """
    return LEVELS - 1.0 if dtype == tf.uint8 else 1.0


def as_dtype(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns float32 values in the dtype of the pixels: rounded for uint8, and never outside of its range.

    Example:
        >>> as_dtype(tf.constant([-3.0, 0.6, 300.0]), tf.uint8).numpy().tolist()
        [0, 1, 255]
    """
    return tf.saturate_cast(values + 0.5 if dtype == tf.uint8 else values, dtype)


def as_levels(images: tf.Tensor) -> tf.Tensor:
    """Returns images as uint8. Floating-point numbers are rounded to 256 levels."""
    if images.dtype == tf.uint8:
        return images
    return as_dtype(tf.cast(images, tf.float32) * largest(tf.uint8), tf.uint8)


def from_levels(levels: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns uint8 images in the dtype that they had before `as_levels`.

    Example:
        >>> from_levels(as_levels(tf.constant([0.0, 1.0])), tf.float32).numpy().tolist()
        [0.0, 1.0]
    """
    if dtype == tf.uint8:
        return levels
    return tf.cast(tf.cast(levels, tf.float32) / largest(tf.uint8), dtype)


def by_group(images: tf.Tensor, groups: tf.Tensor, changes: list[Any]) -> tf.Tensor:
    """Changes each image of a batch by the function of its group. Each function sees its images only, as one batch.

    Args:
        groups: Number of the group of each image, int32 [batch].
        changes: For each group a function of (images, their places in the batch). None changes nothing.
    Example:
        >>> by_group(tf.constant([1, 2, 3]), tf.constant([0, 1, 0]), [None, lambda x, places: -x]).numpy().tolist()
        [1, -2, 3]
    """
    places = places_by_group(groups, len(changes))
    changed = []
    for place, change in zip(places, changes, strict=True):
        part = tf.gather(images, place)
        changed.append(part if change is None else change(part, place))
    return tf.ensure_shape(tf.dynamic_stitch(places, changed), images.shape)


def places_by_group(groups: tf.Tensor, count: int) -> list[tf.Tensor]:
    """Returns the places of the images of each group, in order.

    `tf.dynamic_partition` is not used: TensorFlow believes that its results have the same length, and an optimized
    graph then takes the length of one for that of another.

    Example:
        >>> [place.numpy().tolist() for place in places_by_group(tf.constant([0, 1, 0]), 2)]
        [[0, 2], [1]]
    """
    return [tf.cast(tf.where(groups == group)[:, 0], tf.int32) for group in range(count)]


def change_colours(images: tf.Tensor, seed: tf.Tensor, config: AugmentConfig) -> tf.Tensor:
    """Changes brightness, contrast, saturation and hue of each image by random numbers.

    Example:
        >>> white = tf.ones((1, 2, 2, 3))
        >>> change_colours(white, tf.constant([0, 1]), AugmentConfig(hue=0.5)).numpy().round(2).tolist()[0][0][0]
        [1.0, 1.0, 1.0]
    """
    check_channels(images, saturates=bool(config.saturation or config.hue))
    ranges = (config.brightness, config.contrast, config.saturation, 2 * math.pi * config.hue)
    draws = tf.random.stateless_uniform((4, tf.shape(images)[0]), seed, -1.0, 1.0)
    brightness, contrast, saturation, hue = tf.unstack(draws * tf.constant(ranges)[:, None], num=4)
    matrix = colour_matrix(images, 1 + contrast, 1 + saturation, hue)
    offset = brightness * largest(images.dtype)
    if config.contrast:
        offset -= contrast * mean_luma(images)
    return recolour(images, matrix, offset[:, None])


def colour_matrix(
    images: tf.Tensor, contrast: tf.Tensor, saturation: tf.Tensor | float = 1.0, hue: tf.Tensor | float = 0.0
) -> tf.Tensor:
    """Returns the colour matrix of each image, [batch, channels, channels]. Images of one channel have no hue."""
    if images.shape[-1] != 3:
        return contrast[:, None, None] * tf.eye(images.shape[-1])
    cos, sin = saturation * tf.cos(hue), saturation * tf.sin(hue)
    cos, sin = (tf.broadcast_to(each, tf.shape(contrast))[:, None, None] for each in (cos, sin))
    return contrast[:, None, None] * (GREY_PART + cos * COLOUR_PART + sin * QUARTER_TURN)


def recolour(images: tf.Tensor, matrix: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    """Multiplies each pixel by the matrix of its image, [batch, channels, channels], adds its offset, and clips.

    The offset is [batch, channels], or [batch, 1] for all channels, in the unit of the pixels.
    """
    shape = tf.shape(images)
    pixels = tf.reshape(tf.cast(images, tf.float32), (shape[0], shape[1] * shape[2], shape[3]))
    changed = tf.matmul(pixels, matrix) + offset[:, None]
    if images.dtype != tf.uint8:
        changed = tf.clip_by_value(changed, 0.0, largest(images.dtype))
    return tf.ensure_shape(tf.reshape(as_dtype(changed, images.dtype), shape), images.shape)


def mean_luma(images: tf.Tensor) -> tf.Tensor:
    """Returns the mean brightness of each image, [batch], in the unit of the pixels."""
    shape = tf.shape(images)
    pixels = tf.reshape(tf.cast(images, tf.float32), (shape[0], shape[1] * shape[2], shape[3]))
    means = tf.reduce_mean(pixels, axis=1)
    return tf.linalg.matvec(means, LUMA) if images.shape[-1] == 3 else tf.reduce_mean(means, axis=-1)


def check_channels(images: tf.Tensor, *, saturates: bool) -> None:
    """Raises ConfigError unless the images have channels whose colour can be changed."""
    channels = images.shape[-1]
    if channels is None or (saturates and channels not in (1, 3)):
        rule = "1 or 3 channels (grey, or red, green and blue)" if saturates else "a known number of channels"
        raise ConfigError(
            f"Images must have {rule} for a change of colours. Received: images of shape {tuple(images.shape)}. "
            "Set saturation, hue, rand_augment and aug_mix to 0."
        )
