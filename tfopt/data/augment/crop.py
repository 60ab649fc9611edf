"""The padded random crop and the flip: pixels move by whole numbers, so that they are copied and not computed.

A row of an image is contiguous in memory, and so is the part of a row that a crop keeps. On a CPU, one slice for each
image copies whole rows, and `tf.reverse` has a fast form for rows of pixels. The kernel of the projective transform
computes the place of each pixel, which takes many times as long. On a GPU, the start of a kernel for each slice takes
longer than the copy. There, two kernels gather the pixels of all images.
"""

from __future__ import annotations

import tensorflow as tf

from tfopt.data.augment.geometry import Moves
from tfopt.data.augment.pixels import by_group, places_by_group

MOST_SLICES = 256  # for a batch of known size; a larger one, or one of unknown size, needs a loop
SLICES = 16  # in one step of that loop


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
    """Pads each image, crops it at its offset, and mirrors it.

    Args:
        images: Tensor [batch, height, width, channels] of any dtype.
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
        moved = tf.dynamic_stitch(places, [ordered[:as_they_are], _mirrored_x(ordered[as_they_are:])])
    if flip in ("vertical", "both"):
        moved = by_group(moved, tf.cast(moves.mirror_y, tf.int32), [None, lambda part, _: _mirrored_y(part)])
    return tf.ensure_shape(moved, images.shape)


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


def _mirrored_x(images: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(images)
    rows = tf.reshape(images, (shape[0] * shape[1], shape[2], shape[3]))
    return tf.reshape(tf.reverse(rows, [1]), shape)


def _mirrored_y(images: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(images)
    rows = tf.reshape(images, (shape[0], shape[1], shape[2] * shape[3]))
    return tf.reshape(tf.reverse(rows, [1]), shape)
