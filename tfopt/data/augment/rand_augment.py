"""RandAugment and AugMix: random operations, drawn for each image.

Both work on 256 levels: floating-point images are rounded to them.

Reference:
    Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space", 2020,
    arXiv:1909.13719.
    Hendrycks et al., "AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty", ICLR 2020,
    arXiv:1912.02781.
"""

from __future__ import annotations

import tensorflow as tf

from tfopt.data.augment.colour import check_channels
from tfopt.data.augment.config import AugmentConfig
from tfopt.data.augment.operations import AUG_MIX_OPERATIONS, OPERATIONS, apply_operations
from tfopt.data.augment.pixels import as_dtype, as_levels, from_levels, largest

STRONGEST = 10  # magnitude of the largest change
CHAINS, LONGEST_CHAIN = 3, 3


def rand_augment(
    images: tf.Tensor, masks: tf.Tensor | None, seed: tf.Tensor, config: AugmentConfig, mask_fill: int = 0
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Applies random operations to each image, one after the other, each with the same strength.

    Args:
        images: Tensor [batch, height, width, channels] of 1 or 3 channels, uint8 or floating-point from 0 to 1.
        masks: Tensor [batch, height, width, 1] that follows the geometric operations, or None.
        seed: Tensor of two whole numbers.
        config: Number and strength of the operations.
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
        levels, masks = apply_operations(
            levels,
            masks,
            operations[step],
            magnitudes[step],
            fill_mode=config.fill_mode,
            fill_value=config.fill_value,
            mask_fill=mask_fill,
        )
    return from_levels(levels, images.dtype), masks


def aug_mix(images: tf.Tensor, seed: tf.Tensor, config: AugmentConfig) -> tf.Tensor:
    """Averages each image with three copies, each changed by one to three random operations.

    The loss of AugMix that compares predictions is not part of it.

    Args:
        images: Tensor [batch, height, width, channels] of 1 or 3 channels, uint8 or floating-point from 0 to 1.
        seed: Tensor of two whole numbers.
        config: Strength of the operations.
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
        changed, _ = apply_operations(
            changed,
            None,
            tf.where(step < lengths, operations[step], OPERATIONS.index("identity")),
            magnitudes[step],
            fill_mode=config.fill_mode,
            fill_value=config.fill_value,
            mask_fill=0,
        )
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
