"""RandAugment and AugMix: random operations, drawn for each image.

Both work on 256 levels: floating-point images are rounded to them. The images of a batch are divided by the kernel that
their operations need. The five geometric operations are one projective transform, four operations are one colour
matrix, and two are one table of bits. So a batch needs few kernels, and an image passes through one of them only.

An operation has a magnitude from 0 to 1, where 1 is the largest change. Half of the changes that have a direction go in
the opposite direction.

Reference:
    Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space", 2020,
    arXiv:1909.13719.
    Hendrycks et al., "AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty", ICLR 2020,
    arXiv:1912.02781.
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from tfopt.data.augment.config import AugmentConfig
from tfopt.data.augment.geometry import Moves, project, transforms
from tfopt.data.augment.pixels import (
    LEVELS,
    as_dtype,
    as_levels,
    by_group,
    check_channels,
    colour_matrix,
    from_levels,
    largest,
    mean_luma,
    recolour,
)

STRONGEST = 10  # magnitude of the largest change
CHAINS, LONGEST_CHAIN = 3, 3
# The place of an operation is drawn: AugMix takes those of both only.
MOVES = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
OF_BOTH = ("identity", "autocontrast", "equalize", "posterize", "solarize", *MOVES)
OPERATIONS = (*OF_BOTH, "saturation", "contrast", "brightness", "sharpness")
KERNELS = ("identity", "geometry", "colour", "bits", "equalize", "sharpness")
_KERNEL_OF = {
    **dict.fromkeys(MOVES, "geometry"),
    **dict.fromkeys(("autocontrast", "saturation", "contrast", "brightness"), "colour"),
    **dict.fromkeys(("posterize", "solarize"), "bits"),
}
KERNEL_OF = np.array([KERNELS.index(_KERNEL_OF.get(name, name)) for name in OPERATIONS], np.int32)
AUG_MIX_OPERATIONS = len(OF_BOTH)
# The largest changes, as in the papers: 30 degrees, a tangent of 0.3, 150 of 331 pixels, 90%, 4 of 8 bits.
DEGREES, SHEAR, SHIFT, COLOUR, BITS = 30, 0.3, 150 / 331, 0.9, 4
SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32)[:, :, None, None] / 13


def rand_augment(
    images: tf.Tensor, masks: tf.Tensor | None, seed: tf.Tensor, config: AugmentConfig, mask_fill: int = 0
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Applies random operations to each image, one after the other, each with the same strength.

    Args:
        images: Tensor [batch, height, width, channels] of 1 or 3 channels, uint8 or floating-point from 0 to 1.
        masks: Tensor [batch, height, width, 1] that follows the geometric operations, or None.
        seed: Tensor of two whole numbers.
        config: Number and strength of the operations, and the content of the free border.
        mask_fill: Class number of the free border of a mask.
    Example:
        >>> images = tf.zeros((2, 8, 8, 3), tf.uint8)
        >>> rand_augment(images, None, tf.constant([0, 1]), AugmentConfig(rand_augment=2))[0].shape
        TensorShape([2, 8, 8, 3])
    """
    check_channels(images, saturates=True)
    levels = as_levels(images)
    shape = (config.rand_augment, tf.shape(images)[0])
    operations = tf.random.stateless_uniform(shape, _part(seed, 0), 0, len(OPERATIONS), tf.int32)
    directions = tf.random.stateless_uniform(shape, _part(seed, 1), 0, 2, tf.int32)
    magnitudes = tf.cast(2 * directions - 1, tf.float32) * (config.rand_augment_magnitude / STRONGEST)
    for step in range(config.rand_augment):
        levels, masks = apply_operations(levels, masks, operations[step], magnitudes[step], config, mask_fill)
    return from_levels(levels, images.dtype), masks


def aug_mix(images: tf.Tensor, seed: tf.Tensor, config: AugmentConfig) -> tf.Tensor:
    """Averages each image with three copies, each changed by one to three random operations.

    The loss of AugMix that compares predictions is not part of it. For the arguments see `rand_augment`.

    Example:
        >>> aug_mix(tf.zeros((2, 8, 8, 1)), tf.constant([0, 1]), AugmentConfig(aug_mix=3)).shape
        TensorShape([2, 8, 8, 1])
    """
    check_channels(images, saturates=True)
    levels = as_levels(images)
    batch = tf.shape(images)[0]
    copies = CHAINS * batch
    shape = (LONGEST_CHAIN, copies)
    operations = tf.random.stateless_uniform(shape, _part(seed, 0), 1, AUG_MIX_OPERATIONS, tf.int32)
    magnitudes = tf.random.stateless_uniform(shape, _part(seed, 1), -1.0, 1.0) * (config.aug_mix / STRONGEST)
    lengths = tf.random.stateless_uniform((copies,), _part(seed, 2), 1, LONGEST_CHAIN + 1, tf.int32)
    changed = tf.tile(levels, (CHAINS, 1, 1, 1))
    for step in range(LONGEST_CHAIN):
        # A chain that has ended goes on with "identity".
        operation = tf.where(step < lengths, operations[step], OPERATIONS.index("identity"))
        changed, _ = apply_operations(changed, None, operation, magnitudes[step], config)
    chains, share = chain_weights(seed, batch)
    weights = tf.reshape(chains * share, (CHAINS, batch, 1, 1, 1))
    changed = tf.reshape(changed, tf.concat([[CHAINS], tf.shape(images)], axis=0))
    mixed = tf.reduce_sum(tf.cast(changed, tf.float32) * weights, axis=0)
    mixed += tf.cast(levels, tf.float32) * (1 - share)[:, None, None, None]
    if images.dtype != tf.uint8:
        mixed /= largest(tf.uint8)
    return tf.ensure_shape(as_dtype(mixed, images.dtype), images.shape)


def chain_weights(seed: tf.Tensor, batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws the weight of each chain, [3, batch], evenly among all that sum to 1, and the share of all chains, [batch].

    Example:
        >>> chains, share = chain_weights(tf.constant([0, 1]), tf.constant(2))
        >>> tf.reduce_sum(chains, axis=0).numpy().round(3).tolist()
        [1.0, 1.0]
    """
    exponential = -tf.math.log(1 - tf.random.stateless_uniform((CHAINS, batch), _part(seed, 3)))
    return exponential / tf.reduce_sum(exponential, axis=0), tf.random.stateless_uniform((batch,), _part(seed, 4))


def _part(seed: tf.Tensor, number: int) -> tf.Tensor:
    return tf.random.experimental.stateless_fold_in(seed, number)


def apply_operations(
    images: tf.Tensor,
    masks: tf.Tensor | None,
    operation: tf.Tensor,
    magnitude: tf.Tensor,
    config: AugmentConfig,
    mask_fill: int = 0,
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Applies to each image its operation. For the other arguments see `rand_augment`.

    Args:
        images: uint8 tensor [batch, height, width, channels] of 1 or 3 channels.
        operation: Place of the operation of each image in OPERATIONS, int32 [batch].
        magnitude: Strength and direction of each operation, from -1 to 1, [batch].
    Example:
        >>> images, magnitude = tf.constant([[[[10], [200]]]], tf.uint8), tf.constant([0.5])
        >>> solarize = tf.constant([OPERATIONS.index("solarize")])
        >>> apply_operations(images, None, solarize, magnitude, AugmentConfig())[0][0, 0, :, 0].numpy().tolist()
        [10, 55]
    """

    def move(part: tf.Tensor, place: tf.Tensor, fill: float, nearest: bool) -> tf.Tensor:
        moves = _moves(tf.gather(operation, place), tf.gather(magnitude, place))
        matrices = transforms(moves, tf.size(place), tf.shape(part)[1:3])
        return project(part, matrices, fill_mode=config.fill_mode, fill_value=fill, nearest=nearest)

    def drawn(place: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.gather(operation, place), tf.gather(magnitude, place)

    kernels = tf.gather(tf.constant(KERNEL_OF), operation)
    changed = by_group(
        images,
        kernels,
        [
            None,
            lambda part, place: move(part, place, round(config.fill_value * largest(tf.uint8)), nearest=False),
            lambda part, place: _recolour(part, *drawn(place)),
            lambda part, place: _change_bits(part, *drawn(place)),
            lambda part, _: _equalize(part),
            lambda part, place: _sharpen(part, tf.gather(magnitude, place)),
        ],
    )
    if masks is not None:
        is_moved = tf.cast(kernels == KERNELS.index("geometry"), tf.int32)
        masks = by_group(masks, is_moved, [None, lambda part, place: move(part, place, mask_fill, nearest=True)])
    return changed, masks


def _moves(operation: tf.Tensor, magnitude: tf.Tensor) -> Moves:
    def of(name: str, largest: float) -> tf.Tensor:
        return tf.where(operation == OPERATIONS.index(name), magnitude * largest, 0.0)

    return Moves(
        radians=of("rotate", math.radians(DEGREES)),
        shear_x=of("shear_x", SHEAR),
        shear_y=of("shear_y", SHEAR),
        shift_x=of("translate_x", SHIFT),
        shift_y=of("translate_y", SHIFT),
    )


def _recolour(images: tf.Tensor, operation: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
    def factor(name: str) -> tf.Tensor:
        return tf.where(operation == OPERATIONS.index(name), 1 + magnitude * COLOUR, 1.0)

    contrast = factor("contrast")
    matrix = colour_matrix(images, contrast * factor("brightness"), factor("saturation"))
    offset = ((1 - contrast) * mean_luma(images))[:, None]
    # Automatic contrast stretches the values of each channel over the whole range.
    low, high = (tf.cast(reduce(images, axis=(1, 2)), tf.float32) for reduce in (tf.reduce_min, tf.reduce_max))
    stretches = (operation == OPERATIONS.index("autocontrast"))[:, None] & (high > low)
    scale = tf.where(stretches, largest(tf.uint8) / tf.maximum(high - low, 1.0), 1.0)
    offset = tf.where(stretches, -low * scale, offset)
    return recolour(images, matrix * scale[:, None], offset)


def _change_bits(images: tf.Tensor, operation: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
    """Solarizes (inverts the values from a threshold on) or posterizes (clears the low bits)."""
    strength = tf.abs(magnitude)
    white = tf.constant(LEVELS - 1, tf.uint8)
    # The quarter keeps 25.5 and 51.0 (magnitudes of 0.9 and 0.8) away from where the last bit decides the rounding.
    threshold = tf.cast((LEVELS - 1) * (1 - strength) + 0.25, tf.uint8)
    cleared = tf.cast(tf.round(BITS * strength), tf.uint8)
    solarizes = operation == OPERATIONS.index("solarize")
    kept = tf.where(solarizes, white, tf.bitwise.left_shift(white, cleared))[:, None, None, None]
    inverts = (images >= threshold[:, None, None, None]) & solarizes[:, None, None, None]
    return tf.bitwise.bitwise_and(tf.bitwise.bitwise_xor(images, tf.cast(inverts, tf.uint8) * white), kept)


def _equalize(images: tf.Tensor) -> tf.Tensor:
    """Gives each channel an even histogram. The lowest value becomes 0, the highest 255."""
    shape = tf.shape(images)
    channels = shape[0] * shape[3]
    first = tf.reshape(tf.range(channels) * LEVELS, (shape[0], 1, 1, shape[3]))
    places = tf.cast(images, tf.int32) + first  # the place of each value in the tables of all channels
    counts = tf.math.bincount(
        tf.reshape(places, (-1,)), minlength=channels * LEVELS, maxlength=channels * LEVELS, dtype=tf.int32
    )
    counts = tf.cast(tf.reshape(counts, (channels, LEVELS)), tf.float32)
    up_to = tf.cumsum(counts, axis=1)
    lowest = tf.reduce_min(tf.where(counts > 0, up_to, math.inf), axis=1, keepdims=True)
    others = up_to[:, -1:] - lowest
    table = (LEVELS - 1) * (up_to - lowest) / tf.maximum(others, 1.0)
    table = tf.where(others > 0, table, tf.range(LEVELS, dtype=tf.float32))  # one value only: no change
    return tf.gather(tf.reshape(as_dtype(table, tf.uint8), (-1,)), places)


def _sharpen(images: tf.Tensor, magnitude: tf.Tensor) -> tf.Tensor:
    """Adds or removes the difference to a smoothed image. The pixels of the edge stay."""
    exact = tf.cast(images, tf.float32)
    kernel = tf.tile(SMOOTH, (1, 1, images.shape[-1], 1))
    smooth = tf.nn.depthwise_conv2d(exact, kernel, (1, 1, 1, 1), "SAME")
    rows, columns = (tf.range(length) for length in tf.unstack(tf.shape(images)[1:3], num=2))
    inner = (rows > 0) & (rows < rows[-1]), (columns > 0) & (columns < columns[-1])
    factor = COLOUR * magnitude[:, None, None, None] * tf.cast(inner[0][:, None, None] & inner[1][:, None], tf.float32)
    return as_dtype(exact + factor * (exact - smooth), tf.uint8)
