"""The tf.data pipeline from examples in memory, or any dataset of examples, to batches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfopt.data import augment

# Larger sets than this are shuffled within a window of so many examples.
SHUFFLE_BUFFER = 10_000
PREFETCH = 2


def pipeline(
    data: Any,
    *,
    batch_size: int,
    training: bool = True,
    cache: bool = True,
    random_shift: int = 0,
    seed: int = 0,
    prefetch: int = PREFETCH,
) -> tf.data.Dataset:
    """Caches, shuffles, batches and prefetches.

    Args:
        data: Single examples, not batches: a tf.data.Dataset of (input, label), or a tuple of arrays.
        batch_size: Examples per batch; with a distribution strategy, over all replicas together.
        training: Whether to shuffle, anew in every epoch. The last batch may be smaller either way.
        cache: Whether to keep the examples in memory, so that reading and decoding happen once.
        random_shift: In training, shift images by up to so many pixels; see tfopt.data.augment.
        seed: Of the shuffle and the shifts.
        prefetch: Batches made ready ahead of the training step; tf.data.AUTOTUNE leaves it to tf.data's autotuner.
    Example:
        >>> import numpy as np
        >>> batches = pipeline((np.zeros((10, 4)), np.zeros(10)), batch_size=4)
        >>> [x.shape[0] for x, y in batches]
        [4, 4, 2]
    """
    dataset = data if isinstance(data, tf.data.Dataset) else tf.data.Dataset.from_tensor_slices(data)
    if cache and isinstance(data, tf.data.Dataset):  # arrays are in memory already
        dataset = dataset.cache()
    if training:
        size = int(dataset.cardinality())
        dataset = dataset.shuffle(size if 0 < size < SHUFFLE_BUFFER else SHUFFLE_BUFFER, seed=seed)
        if random_shift:
            dataset = augment.random_shift(dataset, random_shift, seed=seed)
    options = tf.data.Options()
    # The autotuner sleeps for ever longer between looks, and the end of an epoch waits until it wakes: for a short
    # epoch that is up to half of its time (benchmarks/plan_choices.py).
    options.autotune.enabled = prefetch == tf.data.AUTOTUNE
    return dataset.batch(batch_size).prefetch(prefetch).with_options(options)
