"""Geometric changes: crop, flip, rotation, zoom, translation and shear of each image, as one projective transform.

A pixel p = (x, y) of the output comes from the place

    p_in = offset + centre + F A (p - centre - shift)        A = (R S z)^-1

of the input. F mirrors, R rotates, S shears and z is the size of the content. The offset is that of the random crop.
So one kernel reads each pixel once, where a chain of four layers reads and rounds it four times.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow as tf

from tfopt.data.augment.config import AugmentConfig
from tfopt.data.augment.pixels import as_dtype

# The dtypes other than float32 that the kernel takes as they are. Masks of other whole numbers pass as int32.
KERNEL_DTYPES = (tf.uint8, tf.int32, tf.int64)


class Moves(NamedTuple):
    """The geometric change of each image of a batch: tensors [batch], or numbers that hold for all images."""

    offset_y: tf.Tensor | float = 0.0
    """Rows between a pixel of the crop and its place in the image, a whole number."""
    offset_x: tf.Tensor | float = 0.0
    mirror_y: tf.Tensor | bool = False
    """Whether the image is mirrored from top to bottom."""
    mirror_x: tf.Tensor | bool = False
    radians: tf.Tensor | float = 0.0
    """Angle of the rotation."""
    size: tf.Tensor | float = 1.0
    """Size of the content; 1 keeps it."""
    shift_y: tf.Tensor | float = 0.0
    """Translation, as a fraction of the height."""
    shift_x: tf.Tensor | float = 0.0
    shear_y: tf.Tensor | float = 0.0
    """Tangent of the angle by which the horizontal lines lean."""
    shear_x: tf.Tensor | float = 0.0


def draw_moves(config: AugmentConfig, seed: tf.Tensor, batch: tf.Tensor) -> Moves:
    """Draws the geometric change of each image of a batch.

    Example:
        >>> moves = draw_moves(AugmentConfig(crop=2), tf.constant([0, 1]), tf.constant(100))
        >>> sorted(set(moves.offset_x.numpy().tolist()))
        [-2.0, -1.0, 0.0, 1.0, 2.0]
    """
    draws = tf.unstack(tf.random.stateless_uniform((9, batch), seed), num=9)

    def between(drawn: tf.Tensor, largest: float) -> tf.Tensor:
        return (2 * drawn - 1) * largest

    half = tf.fill((batch,), 0.5 if config.flip else 0.0)
    return Moves(
        offset_y=tf.floor(draws[0] * (2 * config.crop + 1)) - config.crop,
        offset_x=tf.floor(draws[1] * (2 * config.crop + 1)) - config.crop,
        mirror_y=(draws[2] < half) & (config.flip in ("vertical", "both")),
        mirror_x=(draws[3] < half) & (config.flip in ("horizontal", "both")),
        radians=between(draws[4], math.radians(config.rotation_degrees)),
        size=1 + between(draws[5], config.zoom),
        shift_y=between(draws[6], config.translation),
        shift_x=between(draws[7], config.translation),
        shear_x=tf.tan(between(draws[8], math.radians(config.shear_degrees))),
    )


def transforms(moves: Moves, batch: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Returns the projective transform of each image, [batch, 8], as ImageProjectiveTransformV3 takes it.

    Args:
        moves: The change of each image.
        batch: Number of images.
        size: Height and width of the images.
    Example:
        >>> transforms(Moves(mirror_x=True), tf.constant(1), tf.constant([4, 4])).numpy()[0, [0, 2, 4]].tolist()
        [-1.0, 3.0, 1.0]
    """
    height, width = tf.unstack(tf.cast(size, tf.float32), num=2)
    centre_y, centre_x = (height - 1) / 2, (width - 1) / 2
    to_y, to_x = centre_y + moves.shift_y * height, centre_x + moves.shift_x * width
    cos, sin = tf.cos(moves.radians), tf.sin(moves.radians)
    scale = 1 / (moves.size * (1 - moves.shear_x * moves.shear_y))
    along_x = scale * (1 - 2 * tf.cast(moves.mirror_x, tf.float32))
    along_y = scale * (1 - 2 * tf.cast(moves.mirror_y, tf.float32))
    xx, xy = along_x * (cos + moves.shear_x * sin), along_x * (sin - moves.shear_x * cos)
    yx, yy = -along_y * (sin + moves.shear_y * cos), along_y * (cos - moves.shear_y * sin)
    x0 = moves.offset_x + centre_x - xx * to_x - xy * to_y
    y0 = moves.offset_y + centre_y - yx * to_x - yy * to_y
    rows = [tf.broadcast_to(value, (batch,)) for value in (xx, xy, x0, yx, yy, y0, 0.0, 0.0)]
    return tf.stack(rows, axis=1)


def project(
    images: tf.Tensor, matrices: tf.Tensor, *, fill_mode: str, fill_value: float, nearest: bool = False
) -> tf.Tensor:
    """Moves the pixels of each image, in one kernel.

    Args:
        images: Tensor [batch, height, width, channels].
        matrices: One transform for each image; see `transforms`.
        fill_mode, fill_value: Content of the free border; the value is in the unit of the pixels.
        nearest: Whether a pixel is copied from the nearest place, as in masks. Otherwise four pixels are averaged.
    Returns: The moved images, in the same dtype.
    Example:
        >>> image = tf.reshape(tf.constant([1, 2, 3], tf.uint8), (1, 1, 3, 1))
        >>> mirror = transforms(Moves(mirror_x=True), tf.constant(1), tf.constant([1, 3]))
        >>> project(image, mirror, fill_mode="constant", fill_value=0)[0, 0, :, 0].numpy().tolist()
        [3, 2, 1]
    """
    dtype = images.dtype
    if not nearest or dtype.is_floating:
        images = tf.cast(images, tf.float32)
    elif dtype not in KERNEL_DTYPES:
        images = tf.cast(images, tf.int32)
    moved = tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=matrices,
        output_shape=tf.shape(images)[1:3],
        fill_value=tf.cast(fill_value, tf.float32),
        interpolation="NEAREST" if nearest else "BILINEAR",
        fill_mode=fill_mode.upper(),
    )
    moved = tf.ensure_shape(moved, images.shape)
    return tf.cast(moved, dtype) if nearest else as_dtype(moved, dtype)
