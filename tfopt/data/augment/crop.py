"""The padded random crop and the flip: pixels move by whole numbers, so that they are copied and not computed.

A row of an image is contiguous in memory, and so is the part of a row that a crop keeps. On a CPU, one slice for each
image copies whole rows, and `tf.reverse` has a fast form for rows of pixels. The kernel of the projective transform
computes the place of each pixel and takes 20 times as long. A GPU starts a kernel for each slice, which takes longer
than the copy. There, two kernels gather the pixels of all images.
"""

from __future__ import annotations

import tensorflow as tf

from tfopt.data.augment.geometry import Moves
from tfopt.data.augment.pixels import by_group

SLICES = 16  # in one step of the loop over the batch


def crop_and_flip(
    images: tf.Tensor, moves: Moves, *, crop: int, fill_mode: str, fill_value: float, on_gpu: bool = False
) -> tf.Tensor:
    """Pads each image, crops it at its offset, and mirrors it.

    Args:
        images: Tensor [batch, height, width, channels] of any dtype.
        moves: The offsets, and which images are mirrored. The other changes are not looked at.
        crop: Padding of each side, in pixels.
        fill_mode, fill_value: Content of the padding; the value is in the unit of the pixels.
        on_gpu: Whether the pixels are gathered, for a GPU. The result is the same.
    Example:
        >>> image = tf.reshape(tf.constant([1, 2, 3], tf.uint8), (1, 1, 3, 1))
        >>> moves = Moves(tf.constant([0.0]), tf.constant([1.0]), tf.constant([False]), tf.constant([True]))
        >>> crop_and_flip(image, moves, crop=1, fill_mode="constant", fill_value=9)[0, 0, :, 0].numpy().tolist()
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
    moved = tf.reshape(_slices(padded, down, right, shape), shape) if crop else images
    moved = tf.ensure_shape(moved, images.shape)
    moved = by_group(moved, tf.cast(moves.mirror_x, tf.int32), [None, lambda part, _: _mirrored_x(part)])
    return by_group(moved, tf.cast(moves.mirror_y, tf.int32), [None, lambda part, _: _mirrored_y(part)])


def _pad(images: tf.Tensor, pixels: int, fill_mode: str, fill_value: float) -> tf.Tensor:
    if fill_mode == "constant":
        shape = tf.shape(images)  # three dimensions are padded in half of the time of four
        rows = tf.reshape(images, (shape[0], shape[1], shape[2] * shape[3]))
        around = pixels * shape[3]
        paddings = [[0, 0], [pixels, pixels], [around, around]]
        padded = tf.pad(rows, paddings, constant_values=tf.cast(fill_value, images.dtype))
        sizes = (shape[0], shape[1] + 2 * pixels, shape[2] + 2 * pixels, shape[3])
        return tf.reshape(padded, sizes)
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


def _slices(padded: tf.Tensor, down: tf.Tensor, right: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """Returns the crop of each image as rows, [batch, height, width * channels]."""
    wide = tf.shape(padded)
    rows = tf.reshape(padded, (shape[0], wide[1], wide[2] * shape[3]))
    begins = tf.stack([tf.range(shape[0]), down, right * shape[3]], axis=1)
    steps = (shape[0] + SLICES - 1) // SLICES
    # The last step repeats the last image until it has as many slices as the others.
    begins = tf.gather(begins, tf.minimum(tf.range(steps * SLICES), shape[0] - 1))
    begins = tf.reshape(begins, (steps, SLICES, 3))
    one = tf.stack([1, shape[1], shape[2] * shape[3]])

    def slice_some(step: tf.Tensor, done: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        parts = [tf.slice(rows, begin, one) for begin in tf.unstack(begins[step], num=SLICES)]
        return step + 1, done.write(step, tf.concat(parts, axis=0))

    empty = tf.TensorArray(padded.dtype, size=steps, infer_shape=False)
    _, done = tf.while_loop(lambda step, _: step < steps, slice_some, (tf.constant(0), empty))
    return done.concat()[: shape[0]]


def _mirrored_x(images: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(images)
    rows = tf.reshape(images, (shape[0] * shape[1], shape[2], shape[3]))
    return tf.reshape(tf.reverse(rows, [1]), shape)


def _mirrored_y(images: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(images)
    rows = tf.reshape(images, (shape[0], shape[1], shape[2] * shape[3]))
    return tf.reshape(tf.reverse(rows, [1]), shape)
