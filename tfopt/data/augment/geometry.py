"""Geometric changes of each image: one projective transform, and a faster form for a padded crop and a flip.

A pixel p = (x, y) of the output comes from the place

    p_in = offset + centre + F A (p - centre - shift)        A = (R S z)^-1

of the input. F mirrors, R rotates, S shears and z is the size of the content. The offset is that of the random crop.
So one kernel reads each pixel once, where a chain of four layers reads and rounds it four times.

A crop and a flip alone move pixels by whole numbers, so that they are copied and not computed. A row of an image is
contiguous in memory, and so is the part of a row that a crop keeps. On a CPU, one slice for each image copies whole
rows, and `tf.reverse` has a fast form for rows of pixels; the kernel of the projective transform takes many times as
long. On a GPU, the start of a kernel for each slice takes longer than the copy. There, two kernels gather the pixels of
all images.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow as tf

from tfopt.data.augment.config import AugmentConfig
from tfopt.data.augment.pixels import as_dtype, by_group, places_by_group

# The dtypes other than float32 that the kernel takes as they are. Masks of other whole numbers pass as int32.
KERNEL_DTYPES = (tf.uint8, tf.int32, tf.int64)
MOST_SLICES = 256  # for a batch of known size; a larger one, or one of unknown size, needs a loop
SLICES = 16  # in one step of that loop


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
    """Moves the pixels of images [batch, height, width, channels] by `transforms`, in one kernel.

    Args:
        fill_mode, fill_value: Content of the free border; the value is in the unit of the pixels.
        nearest: Whether a pixel is copied from the nearest place, as in masks. Otherwise four pixels are averaged.
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


def crop_and_flip(
    images: tf.Tensor,
    moves: Moves,
    *,
    crop: int,
    flip: str | None,
    fill_mode: str,
    fill_value: float,
    on_gpu: bool = False,
) -> tf.Tensor:
    """Pads each image [batch, height, width, channels] of any dtype, crops it at its offset, and mirrors it.

    Args:
        moves: The offsets, and which images are mirrored. The other changes are not looked at.
        crop: Padding of each side, in pixels.
        flip: "horizontal", "vertical" or "both" if images may be mirrored, else None.
        fill_mode, fill_value: Content of the padding; the value is in the unit of the pixels.
        on_gpu: Whether the pixels are gathered, for a GPU. The result is the same.
    Example:
        >>> image = tf.reshape(tf.constant([1, 2, 3], tf.uint8), (1, 1, 3, 1))
        >>> moves = Moves(tf.constant([0.0]), tf.constant([1.0]), tf.constant([False]), tf.constant([True]))
        >>> moved = crop_and_flip(image, moves, crop=1, flip="horizontal", fill_mode="constant", fill_value=9)
        >>> moved[0, 0, :, 0].numpy().tolist()
        [9, 3, 2]
    """
    shape = tf.shape(images)
    down, right = (tf.cast(offset, tf.int32) + crop for offset in (moves.offset_y, moves.offset_x))
    padded = _pad(images, crop, fill_mode, fill_value) if crop else images
    if on_gpu:
        rows = down[:, None] + _places(shape[1], moves.mirror_y)
        columns = right[:, None] + _places(shape[2], moves.mirror_x)
        moved = tf.gather(tf.gather(padded, rows, axis=1, batch_dims=1), columns, axis=2, batch_dims=1)
        return tf.ensure_shape(moved, images.shape)
    if flip in (None, "vertical"):
        moved = tf.reshape(_slices(padded, tf.range(shape[0]), down, right, images), shape) if crop else images
    else:
        # Mirrored images last, so that they are one part of the batch.
        places = places_by_group(tf.cast(moves.mirror_x, tf.int32), 2)
        order, as_they_are = tf.concat(places, axis=0), tf.size(places[0])
        ordered = _slices(padded, order, down, right, images) if crop else tf.gather(images, order)
        ordered = tf.reshape(ordered, shape)
        moved = tf.dynamic_stitch(places, [ordered[:as_they_are], _mirrored(ordered[as_they_are:], axis=2)])
    if flip in ("vertical", "both"):
        moved = by_group(moved, tf.cast(moves.mirror_y, tf.int32), [None, lambda part, _: _mirrored(part, axis=1)])
    return tf.ensure_shape(moved, images.shape)


def _pad(images: tf.Tensor, pixels: int, fill_mode: str, fill_value: float) -> tf.Tensor:
    if fill_mode == "constant":
        shape = tf.shape(images)  # three dimensions are padded in half of the time of four
        rows = tf.reshape(images, (shape[0], shape[1], shape[2] * shape[3]))
        around = pixels * shape[3]
        paddings = [[0, 0], [pixels, pixels], [around, around]]
        padded = tf.pad(rows, paddings, constant_values=tf.cast(fill_value, images.dtype))
        return tf.reshape(padded, (shape[0], shape[1] + 2 * pixels, shape[2] + 2 * pixels, shape[3]))
    for axis in (1, 2):
        images = tf.gather(images, _source(tf.shape(images)[axis], pixels, fill_mode), axis=axis)
    return images


def _source(size: tf.Tensor, pixels: int, fill_mode: str) -> tf.Tensor:
    """Returns the row of the image that each row of the padded image shows."""
    place = tf.range(-pixels, size + pixels)
    if fill_mode == "nearest":
        return tf.clip_by_value(place, 0, size - 1)
    if fill_mode == "wrap":
        return place % size
    place %= 2 * size  # reflect: the image, its mirror image, the image and so on
    return tf.minimum(place, 2 * size - 1 - place)


def _places(size: tf.Tensor, is_mirrored: tf.Tensor) -> tf.Tensor:
    """Returns the places 0, 1 ... of each image, or those from the end if it is mirrored: [batch, size]."""
    place = tf.range(size)[None]
    return tf.where(tf.reshape(is_mirrored, (-1, 1)), size - 1 - place, place)


def _slices(padded: tf.Tensor, order: tf.Tensor, down: tf.Tensor, right: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    """Returns the crops in an order of the images, as rows of numbers: [batch, height, width * channels]."""
    shape, wide = tf.shape(images), tf.shape(padded)
    rows = tf.reshape(padded, (wide[0], wide[1], wide[2] * wide[3]))
    one = tf.stack([1, shape[1], shape[2] * shape[3]])
    begins = tf.gather(tf.stack([tf.range(shape[0]), down, right * shape[3]], axis=1), order)
    batch = images.shape[0]
    if batch is not None and batch <= MOST_SLICES:
        return tf.concat([tf.slice(rows, begin, one) for begin in tf.unstack(begins, num=batch)], axis=0)
    # The last step of the loop repeats the last image until it has as many slices as the others.
    steps = (shape[0] + SLICES - 1) // SLICES
    begins = tf.gather(begins, tf.minimum(tf.range(steps * SLICES), shape[0] - 1))
    begins = tf.reshape(begins, (steps, SLICES, 3))

    def slice_some(step: tf.Tensor, done: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        for place, begin in enumerate(tf.unstack(begins[step], num=SLICES)):
            done = done.write(step * SLICES + place, tf.slice(rows, begin, one))
        return step + 1, done

    empty = tf.TensorArray(padded.dtype, size=steps * SLICES, infer_shape=False)
    _, done = tf.while_loop(lambda step, _: step < steps, slice_some, (tf.constant(0), empty))
    return done.concat()[: shape[0]]


def _mirrored(images: tf.Tensor, axis: int) -> tf.Tensor:
    batch, height, width, channels = tf.unstack(tf.shape(images), num=4)
    three = (batch * height, width, channels) if axis == 2 else (batch, height, width * channels)
    return tf.reshape(tf.reverse(tf.reshape(images, three), [1]), tf.shape(images))
