"""The random resized crop: a box of random area and aspect ratio of each image, resized to the size of the image.

The area is even in a range of shares of the image. The logarithm of the aspect ratio is even, so that 3:4 is as likely
as 4:3. A pair whose box is larger than the image is drawn again, up to TRIES times. If no pair fits, the box is the
largest one in the centre whose aspect ratio is in the range.

Reference:
    Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, arXiv:1409.4842.
"""

from __future__ import annotations

import tensorflow as tf

from tfopt.data.augment.pixels import as_dtype

TRIES = 10


def draw_boxes(
    seed: tf.Tensor, scale: tuple[float, float], ratio: tuple[float, float], batch: tf.Tensor | int, size: tf.Tensor
) -> tf.Tensor:
    """Draws a box for each image of a batch.

    Args:
        scale: Smallest and largest share of the area.
        ratio: Smallest and largest width over height.
        batch: Number of images.
        size: (height, width) of the images.
    Returns: (top, left, height, width) in pixels, int32 [batch, 4].
    Example:
        >>> draw_boxes(tf.constant([0, 1]), (1, 1), (1, 1), tf.constant(1), tf.constant([8, 8])).numpy().tolist()
        [[0, 0, 8, 8]]
    """
    seeds = tf.random.experimental.stateless_split(seed, 3)
    height, width = tf.unstack(tf.cast(size, tf.float32), num=2)
    areas = tf.random.stateless_uniform((batch, TRIES), seeds[0], *map(float, scale)) * height * width
    logs = tf.math.log(tf.constant(ratio, tf.float32))
    ratios = tf.exp(tf.random.stateless_uniform((batch, TRIES), seeds[1], logs[0], logs[1]))
    heights, widths = tf.round(tf.sqrt(areas / ratios)), tf.round(tf.sqrt(areas * ratios))
    fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
    # The last column fits always.
    centred = [tf.minimum(height, tf.round(width / ratio[0])), tf.minimum(width, tf.round(height * ratio[1]))]
    chosen = tf.argmax(tf.pad(tf.cast(fits, tf.int32), [[0, 0], [0, 1]], constant_values=1), axis=1)
    sides = [
        tf.gather(tf.concat([drawn, tf.fill((batch, 1), tf.maximum(1.0, last))], axis=1), chosen, batch_dims=1)
        for drawn, last in zip((heights, widths), centred, strict=True)
    ]
    free = tf.stack([height, width]) - tf.stack(sides, axis=1)
    anywhere = tf.floor(tf.random.stateless_uniform((batch, 2), seeds[2]) * (free + 1))
    corners = tf.where((chosen == TRIES)[:, None], tf.floor(free / 2), tf.minimum(anywhere, free))
    return tf.cast(tf.concat([corners, tf.stack(sides, axis=1)], axis=1), tf.int32)


def resized_crop(images: tf.Tensor, boxes: tf.Tensor, *, nearest: bool = False) -> tf.Tensor:
    """Cuts a box out of each image [batch, height, width, channels], and resizes it to the height and width.

    Args:
        boxes: (top, left, height, width) for each image, as `draw_boxes` returns them.
        nearest: Whether a pixel is copied from the nearest place, as in masks of any dtype. Otherwise pixels are
            bilinear.
    Example:
        >>> image = tf.reshape(tf.constant([0, 100, 200, 50], tf.uint8), (1, 1, 4, 1))
        >>> resized_crop(image, tf.constant([[0, 0, 1, 2]]))[0, 0, :, 0].numpy().tolist()
        [0, 25, 75, 100]
    """
    size = tf.shape(images)[1:3]
    if nearest:
        rows, columns = (_nearest(boxes[:, axis], boxes[:, axis + 2], size[axis]) for axis in (0, 1))
        copied = tf.gather(tf.gather(images, rows, axis=1, batch_dims=1), columns, axis=2, batch_dims=1)
        return tf.ensure_shape(copied, images.shape)

    def cut(place: tf.Tensor) -> tf.Tensor:
        top, left, height, width = tf.unstack(boxes[place], num=4)
        part = tf.slice(images, tf.stack([place, top, left, 0]), tf.stack([1, height, width, -1]))
        if part.dtype != tf.uint8:
            part = tf.cast(part, tf.float32)
        return tf.ensure_shape(as_dtype(tf.image.resize(part, size)[0], images.dtype), images.shape[1:])

    cropped = tf.map_fn(cut, tf.range(tf.shape(images)[0]), fn_output_signature=tf.TensorSpec(None, images.dtype))
    return tf.ensure_shape(cropped, images.shape)


def _nearest(start: tf.Tensor, length: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Returns the pixel under the centre of each of `size` equal parts of [start, start + length): [batch, size]."""
    middles = 2 * tf.range(size) + 1
    return start[:, None] + middles[None] * length[:, None] // (2 * size)
