"""The tf.data pipeline that makes batches of examples: arrays in memory, or any data set of examples."""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from tfopt.data.accepted_examples import check_examples
from tfopt.data.augment.random_shift import check_images
from tfopt.data.augment.random_shift import random_shift as shift_randomly
from tfopt.data.epoch_order import EpochCounter, PerEpoch
from tfopt.data.memory import cached
from tfopt.errors import ConfigError, unknown_name

# A larger data set is shuffled within a window of this number of examples.
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
    """Caches, shuffles, batches and prefetches examples.

    Args:
        data: Single examples, not batches: a tf.data.Dataset of (input, label), or a tuple of arrays. Several inputs
            are a tuple or a dict of arrays, not a list.
        batch_size: Examples per batch. With a distribution strategy, the sum over all replicas.
        training: Whether to shuffle the examples in every epoch. The last batch may be smaller in both cases.
        cache: Whether to keep the examples of a data set in memory, so that they are read and decoded once. If they
            take over 80% of the free memory, a warning is given and they are not kept. If their size is unknown (no
            cardinality, or open shapes), the same limit ends the reading with an error, unless `auto_shard` is "file".
        random_shift: Largest shift of training images, in pixels; see tfopt.data.augment.
        seed: Seed of the shuffle and the shifts.
        prefetch: Batches to prepare before the training step needs them. With tf.data.AUTOTUNE, tf.data decides.
        epoch: Counter whose number decides, together with the seed alone, the order and the shifts, so that training
            can be resumed within an epoch. Without a counter, or while it is at -1, each iterator has new ones. They
            are then the same in two runs that make the same number of iterators.
        drop_remainder: Whether to leave out a smaller last batch, so that all batches have one shape.
        auto_shard: How the workers of a multi-worker strategy share the data. "data": each reads all examples and keeps
            its part of every batch. "file": each reads its own files. "auto": by files if there are any, otherwise as
            "data". "off": each trains on all examples. With one worker it has no effect.
    Raises:
        ConfigError: `auto_shard` is unknown, or is "file" with an `epoch`; the inputs to shift are not images; `data`
            is a list, a generator, a keras.utils.PyDataset or batched.
    Warns:
        TfoptWarning: The examples are too large to keep in memory, or may be batches.
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
            "auto_shard must not be 'file' when an epoch counter decides the order: TensorFlow does not find the files "
            "behind it. Received: auto_shard='file'. Use 'data', or give each worker a data set of its own files and "
            "use 'off'."
        )
    examples = check_examples(data)
    if not isinstance(examples, tf.data.Dataset):  # in memory already
        dataset = tf.data.Dataset.from_tensor_slices(examples)
    else:
        dataset = cached(examples, count=auto_shard != "file") if cache else examples
    options = tf.data.Options()
    # The autotuner sleeps longer and longer between its checks, and the end of an epoch waits until it wakes. For a
    # short epoch that is up to half of the time (benchmarks/plan_choices.py).
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
        return shift_randomly(shuffled, random_shift, seed=seed) if random_shift else shuffled

    if epoch is None:
        return batch(randomize(seed))

    if random_shift:  # here: tf.data would replace an error from inside its function
        check_images(dataset, random_shift)

    def of_epoch(seed: tf.Tensor) -> tf.data.Dataset:
        # TensorFlow mixes its global seed into the seed of an operation. Here it sets the seed of this function only.
        tf.random.set_seed(1)
        return randomize(seed)

    # The cache is outside the function, so that it stays from epoch to epoch. Batching is outside too, because
    # tf.distribute looks there for the batch size that it divides.
    shuffled = epoch.seeds(seed).flat_map(of_epoch)
    if size != tf.data.UNKNOWN_CARDINALITY:
        shuffled = shuffled.apply(tf.data.experimental.assert_cardinality(size))
    return PerEpoch(batch(shuffled), epoch, seed, lambda drawn: batch(of_epoch(drawn)))
