"""The values of pixels: uint8 from 0 to 255, or floating-point numbers from 0 to 1. The dtype decides which."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

LEVELS = 256


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
        images: Tensor [batch, ...].
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
