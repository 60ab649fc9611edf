"""The tf.data pipeline from examples in memory, or any dataset of examples, to batches."""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from tfopt.data import augment
from tfopt.data.accepted import check_examples
from tfopt.data.memory import cached
from tfopt.data.position import EpochCounter, PerEpoch
from tfopt.errors import ConfigError, unknown_name

# Larger sets than this are shuffled within a window of so many examples.
SHUFFLE_BUFFER = 10_000
PREFETCH = 2
AUTO_SHARD = {
    "auto": tf.data.experimental.AutoShardPolicy.AUTO,
    "data": tf.data.experimental.AutoShardPolicy.DATA,
    "file": tf.data.experimental.AutoShardPolicy.FILE,
    "off": tf.data.experimental.AutoShardPolicy.OFF,
}


def pipeline(
    data: Any,
    *,
    batch_size: int,
    training: bool = True,
    cache: bool = True,
    random_shift: int = 0,
    seed: int = 0,
    prefetch: int = PREFETCH,
    epoch: EpochCounter | None = None,
    drop_remainder: bool = False,
    auto_shard: Literal["auto", "data", "file", "off"] = "auto",
) -> tf.data.Dataset:
    """Caches, shuffles, batches and prefetches.

    Args:
        data: Single examples, not batches: a tf.data.Dataset of (input, label), or a tuple of arrays. Several inputs
            are a tuple or a dict of arrays, not a list.
        batch_size: Examples per batch; with a distribution strategy, over all replicas together.
        training: Whether to shuffle, anew in every epoch. The last batch may be smaller either way.
        cache: Whether to keep the examples of a data set in memory, so that reading and decoding happen once. They are
            not kept, with a warning, if they take over 80% of the free memory. Where their size is unknown (no
            cardinality, or open shapes), the same limit ends the reading with an error, unless `auto_shard` is "file".
        random_shift: In training, shift images by up to so many pixels; see tfopt.data.augment.
        seed: Of the shuffle and the shifts.
        prefetch: Batches made ready ahead of the training step; tf.data.AUTOTUNE leaves it to tf.data's autotuner.
        epoch: Decides, with the seed alone, the order and the shifts, so that training can be resumed within an
            epoch. Without it, and while it stands at -1, they are new for each iterator: the same from one run to
            the next, as long as both make as many iterators.
        drop_remainder: Whether to leave out a last batch that is smaller, so that all have one shape.
        auto_shard: How the workers of a multi-worker strategy share the data: each reads all and keeps its part of
            every batch (data), each reads its own files (file), by files where there are some and else by data
            (auto), or each trains on all of it (off). Without several workers it does nothing.
    Raises:
        ConfigError: `auto_shard` is unknown, or goes by files with an `epoch`; the inputs to shift are not images;
            `data` is a list, a generator, a keras.utils.PyDataset or batched.
    Warns:
        TfoptWarning: The examples are too large to be kept in memory, or may be batches.
    Example:
        >>> import numpy as np
        >>> batches = pipeline((np.zeros((10, 4)), np.zeros(10)), batch_size=4)
        >>> [x.shape[0] for x, y in batches]
        [4, 4, 2]
    """
    if auto_shard not in AUTO_SHARD:
        raise unknown_name("auto_shard", str(auto_shard), AUTO_SHARD)
    if auto_shard == "file" and epoch is not None and training:
        raise ConfigError(
            "auto_shard must not be 'file' where an epoch decides the order: TensorFlow does not find the files "
            "behind it. Received: auto_shard='file'. Use 'data', or give each worker a dataset of its own files and "
            "use 'off'."
        )
    examples = check_examples(data)
    if not isinstance(examples, tf.data.Dataset):  # in memory already
        dataset = tf.data.Dataset.from_tensor_slices(examples)
    else:
        dataset = cached(examples, count=auto_shard != "file") if cache else examples
    options = tf.data.Options()
    # The autotuner sleeps for ever longer between looks, and the end of an epoch waits until it wakes: for a short
    # epoch that is up to half of its time (benchmarks/plan_choices.py).
    options.autotune.enabled = prefetch == tf.data.AUTOTUNE
    options.experimental_distribute.auto_shard_policy = AUTO_SHARD[auto_shard]

    def batch(examples: tf.data.Dataset) -> tf.data.Dataset:
        return examples.batch(batch_size, drop_remainder=drop_remainder).prefetch(prefetch).with_options(options)

    if not training:
        return batch(dataset)
    size = int(dataset.cardinality())
    window = size if 0 < size < SHUFFLE_BUFFER else SHUFFLE_BUFFER

    def randomize(seed: Any) -> tf.data.Dataset:
        shuffled = dataset.shuffle(window, seed=seed)
        return augment.random_shift(shuffled, random_shift, seed=seed) if random_shift else shuffled

    if epoch is None:
        return batch(randomize(seed))

    if random_shift:  # here, because an error within a function of tf.data is no longer ours
        augment.check_images(dataset, random_shift)

    def of_epoch(seed: tf.Tensor) -> tf.data.Dataset:
        # TensorFlow mixes its global seed into that of an operation. Within a function, this sets the function's own.
        tf.random.set_seed(1)
        return randomize(seed)

    # What is outside the function lives on from epoch to epoch: the cache. Batching is outside too, because
    # tf.distribute divides batches by the size that it finds there.
    shuffled = epoch.seeds(seed).flat_map(of_epoch)
    if size != tf.data.UNKNOWN_CARDINALITY:
        shuffled = shuffled.apply(tf.data.experimental.assert_cardinality(size))
    return PerEpoch(batch(shuffled), epoch, seed, lambda drawn: batch(of_epoch(drawn)))
