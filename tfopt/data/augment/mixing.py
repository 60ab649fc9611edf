"""Cutout, mixup and cutmix: parts of images are replaced, and the targets follow.

Mixup and cutmix mix each image with a partner, another image of the batch. The target becomes the same mixture:

    keep * target + (1 - keep) * target of the partner

For mixup, keep is the weight of the image. For cutmix, it is the share of its pixels that stay.

Reference:
    DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout", 2017, arXiv:1708.04552.
    Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018, arXiv:1710.09412.
    Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers", ICCV 2019, arXiv:1905.04899.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfopt.data.augment.config import AugmentConfig
from tfopt.data.augment.pixels import as_dtype, largest

GREY = 0.5


class Boxes(NamedTuple):
    """A rectangle in each image, as whole numbers [batch]. The last row and the last column are not inside."""

    top: tf.Tensor
    bottom: tf.Tensor
    left: tf.Tensor
    right: tf.Tensor


class Mixture(NamedTuple):
    """How the examples of a batch are mixed."""

    partner: tf.Tensor
    """Place of the partner of each example, int32 [batch]."""
    keep: tf.Tensor
    """Share of the example itself, float32 [batch]."""
    boxes: Boxes
    """The pixels that cutmix takes from the partner."""
    is_cutmix: tf.Tensor
    """Whether the batch has cutmix, else mixup."""


def draw_cutout(seed: tf.Tensor, side: float, batch: tf.Tensor, size: tf.Tensor) -> Boxes:
    """Draws a square with its centre anywhere in each image. The part outside of the image is cut off.

    Its side is in pixels, or below 1 a fraction of the shorter side of the image.
    """
    shorter = tf.cast(tf.reduce_min(size), tf.float32)
    pixels = tf.maximum(tf.round(side * shorter), 1.0) if side < 1 else tf.constant(float(side))
    return _boxes(seed, tf.fill((batch,), pixels), tf.fill((batch,), pixels), size)


def draw_mixture(seed: tf.Tensor, config: AugmentConfig, batch: tf.Tensor, size: tf.Tensor) -> Mixture:
    """Draws how the examples of a batch are mixed: by mixup or by cutmix, with whom, and how much.

    Example:
        >>> config = AugmentConfig(mixup=0.2)
        >>> mixture = draw_mixture(tf.constant([0, 1]), config, tf.constant(4), tf.constant([8, 8]))
        >>> sorted(mixture.partner.numpy().tolist()), bool(mixture.is_cutmix)
        ([0, 1, 2, 3], False)
    """
    seeds = [tf.random.experimental.stateless_fold_in(seed, number) for number in range(5)]
    partner = tf.argsort(tf.random.stateless_uniform((batch,), seeds[0]))
    if config.mixup and config.cutmix:
        is_cutmix = tf.random.stateless_uniform((), seeds[1]) < 0.5
    else:
        is_cutmix = tf.constant(bool(config.cutmix))
    weight = draw_beta(seeds[2], batch, config.mixup) if config.mixup else tf.ones((batch,))
    share = draw_beta(seeds[3], batch, config.cutmix) if config.cutmix else tf.ones((batch,))
    height, width = tf.unstack(tf.cast(size, tf.float32), num=2)
    side = tf.sqrt(1 - share)
    boxes = _boxes(seeds[4], tf.round(side * height), tf.round(side * width), size)
    area = tf.cast((boxes.bottom - boxes.top) * (boxes.right - boxes.left), tf.float32)
    return Mixture(partner, tf.where(is_cutmix, 1 - area / (height * width), weight), boxes, is_cutmix)


def draw_beta(seed: tf.Tensor, batch: tf.Tensor, alpha: float) -> tf.Tensor:
    """Draws from Beta(alpha, alpha), float32 [batch].

    It is G / (G + H) of two gamma variables. Their logarithms are drawn, because a gamma variable of a small alpha is
    often too small for a floating-point number: G(alpha) = G(alpha + 1) U^(1 / alpha).
    """
    seeds = [tf.random.experimental.stateless_fold_in(seed, number) for number in range(2)]
    gamma = tf.random.stateless_gamma((2, batch), seeds[0], alpha + 1.0, dtype=tf.float64)
    uniform = 1 - tf.random.stateless_uniform((2, batch), seeds[1], dtype=tf.float64)
    logarithms = tf.math.log(gamma) + tf.math.log(uniform) / alpha
    return tf.cast(tf.sigmoid(logarithms[0] - logarithms[1]), tf.float32)


def cut_out(images: tf.Tensor, boxes: Boxes, value: float | None = None) -> tf.Tensor:
    """Fills a box in each image with grey, or in each mask with a value.

    Example:
        >>> one = [tf.constant([0]), tf.constant([1]), tf.constant([0]), tf.constant([1])]
        >>> cut_out(tf.zeros((1, 1, 2, 1)), Boxes(*one))[0, 0, :, 0].numpy().tolist()
        [0.5, 0.0]
    """
    grey = round(GREY * largest(images.dtype)) if images.dtype == tf.uint8 else GREY
    return _filled(images, boxes, tf.fill(tf.shape(images), tf.cast(grey if value is None else value, images.dtype)))


def mix_images(images: tf.Tensor, mixture: Mixture, config: AugmentConfig) -> tf.Tensor:
    """Mixes each image with its partner, by mixup or by cutmix.

    Example:
        >>> images = tf.constant([[[[0.0]]], [[[1.0]]]])
        >>> config = AugmentConfig(mixup=1)
        >>> mixture = draw_mixture(tf.constant([0, 1]), config, tf.constant(2), tf.constant([1, 1]))
        >>> swapped = mixture._replace(partner=tf.constant([1, 0]), keep=tf.constant([0.75, 0.75]))
        >>> mix_images(images, swapped, config)[:, 0, 0, 0].numpy().tolist()
        [0.25, 0.75]
    """
    if not config.cutmix:
        return _averaged(images, mixture)
    if not config.mixup:
        return paste(images, mixture)
    return tf.cond(mixture.is_cutmix, lambda: paste(images, mixture), lambda: _averaged(images, mixture))


def mix_targets(targets: tf.Tensor, weight: tf.Tensor | None, mixture: Mixture) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Mixes each target with that of its partner, and each weight of an example with that of its partner.

    A target with a weight counts in the mixture as often as its weight says.

    Example:
        >>> boxes = Boxes(*[tf.constant([0, 0])] * 4)
        >>> mixture = Mixture(tf.constant([1, 0]), tf.constant([0.75, 0.75]), boxes, tf.constant(False))
        >>> mix_targets(tf.constant([[1.0, 0.0], [0.0, 1.0]]), None, mixture)[0].numpy().tolist()
        [[0.75, 0.25], [0.25, 0.75]]
    """
    keep, give = mixture.keep, 1 - mixture.keep
    mixed_weight = None
    if weight is not None:
        exact = tf.cast(weight, tf.float32)
        keep, give = keep * exact, give * tf.gather(exact, mixture.partner)
        total = keep + give
        mixed_weight = tf.cast(total, weight.dtype)
        keep, give = tf.math.divide_no_nan(keep, total), tf.math.divide_no_nan(give, total)
    exact = tf.cast(targets, tf.float32)
    mixed = _of_each(keep, targets) * exact + _of_each(give, targets) * tf.gather(exact, mixture.partner)
    return tf.cast(mixed, targets.dtype), mixed_weight


def paste(images: tf.Tensor, mixture: Mixture) -> tf.Tensor:
    """Replaces the box of each image, or of each mask, by that of its partner."""
    return _filled(images, mixture.boxes, tf.gather(images, mixture.partner))


def _averaged(images: tf.Tensor, mixture: Mixture) -> tf.Tensor:
    own = tf.cast(images, tf.float32)
    other = tf.gather(own, mixture.partner)
    return as_dtype(other + _of_each(mixture.keep, images) * (own - other), images.dtype)


def _boxes(seed: tf.Tensor, heights: tf.Tensor, widths: tf.Tensor, size: tf.Tensor) -> Boxes:
    """Draws boxes of the given sizes, [batch], with their centres anywhere in the images."""
    draws = tf.random.stateless_uniform((2, tf.shape(heights)[0]), seed)
    edges = []
    for drawn, lengths, limit in zip(tf.unstack(draws, num=2), (heights, widths), tf.unstack(size, num=2), strict=True):
        centre = tf.floor(drawn * tf.cast(limit, tf.float32))
        begin = tf.cast(centre - tf.floor(lengths / 2), tf.int32)
        end = begin + tf.cast(lengths, tf.int32)
        edges += [tf.clip_by_value(edge, 0, limit) for edge in (begin, end)]
    return Boxes(*edges)


def _filled(images: tf.Tensor, boxes: Boxes, contents: tf.Tensor) -> tf.Tensor:
    """Replaces the pixels in a box by those of another image."""
    shape = tf.shape(images)
    rows, columns = tf.range(shape[1])[None], tf.repeat(tf.range(shape[2]), shape[3])[None]
    down = (rows >= boxes.top[:, None]) & (rows < boxes.bottom[:, None])
    across = (columns >= boxes.left[:, None]) & (columns < boxes.right[:, None])
    # Rows of numbers instead of rows of pixels: a condition of the shape of the images is four times as fast as one
    # that is repeated for each channel.
    flat = tf.stack([shape[0], shape[1], shape[2] * shape[3]])
    chosen = tf.where(down[:, :, None] & across[:, None], tf.reshape(contents, flat), tf.reshape(images, flat))
    return tf.ensure_shape(tf.reshape(chosen, shape), images.shape)


def _of_each(values: tf.Tensor, like: tf.Tensor) -> Any:
    """Returns one value for each example, with as many dimensions as a tensor."""
    return tf.reshape(values, (-1, *[1] * (like.shape.rank - 1)))
