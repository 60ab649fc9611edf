"""The tf.data pipeline that makes batches of examples: of a source, of arrays in memory, or of any data set.

    records -> cache -> shuffle -> decode -> augment -> batch -> augment -> prefetch

If decoded examples are cached, they are decoded before the cache. The shuffle holds records, which are small, or the
examples that the cache holds. So the order of the examples is the same with and without a cache in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import tensorflow as tf
from annotated_types import Ge

from tfopt.data.accepted_examples import check_examples
from tfopt.data.augment.augmentation import Augmentation
from tfopt.data.augment.config import AugmentConfig
from tfopt.data.buckets import batched, check_buckets
from tfopt.data.caching.choice import CacheChoice, CacheMode
from tfopt.data.caching.kept import Kept, keep_dataset, keep_examples
from tfopt.data.caching.sizes import size_of
from tfopt.data.epoch_order import EpochCounter, PerEpoch, on_device, seeds_of_passes
from tfopt.data.examples import Examples, Split
from tfopt.data.files.finite import finite_batch
from tfopt.data.service.client import ThroughService, check_records_can_be_sent
from tfopt.errors import ConfigError, unknown_name
from tfopt.hardware import logical_cores
from tfopt.settings.validation import check_value

# Larger data sets are shuffled within a window of this number of examples. Records before decoding are smaller.
SHUFFLE_BUFFER = 10_000
SHUFFLE_BUFFER_OF_RECORDS = 100_000
# A window of large examples is smaller. The limit is no share of the free memory: the order must not depend on it.
SHUFFLE_BYTES = 2**29
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
    split: Split | None = None,
    cache: CacheMode | bool = True,
    cache_dir: str | None = None,
    shuffle_buffer: Literal["auto"] | int = "auto",
    deterministic: bool = True,
    random_shift: int = 0,
    augment: Callable[..., Any] | None = None,
    bucket_boundaries: Sequence[int] = (),
    seed: int = 0,
    prefetch: int = PREFETCH,
    device: str | None = None,
    epoch: EpochCounter | None = None,
    repeat: bool = False,
    service: str | None = None,
    drop_remainder: bool = False,
    auto_shard: Literal["auto", "data", "file", "off"] = "auto",
) -> tf.data.Dataset:
    """Caches, shuffles, decodes, augments, batches and prefetches examples.

    Args:
        data: `tfopt.data.Examples`; or single examples, not batches: a tf.data.Dataset of (input, label), or a tuple of
            arrays. Several inputs are a tuple or a dict of arrays, not a list.
        batch_size: Examples per batch. With a distribution strategy, the sum over all replicas.
        training: Whether to shuffle the examples in every epoch, and to augment them. The last batch may be smaller in
            both cases.
        split: Part of `Examples`: "train", "validation" or "test". None means "train" for training, else "validation".
        cache: Where to keep examples, so that they are read once. "memory" keeps them decoded, "disk" decoded in
            `cache_dir`, "off" (or False) nowhere. "auto" (or True) chooses by their size. Examples of a data set that
            take over 80% of the free memory are not kept, with a warning. If their size is unknown (no cardinality, or
            open shapes), the same limit ends the reading with an error, unless `auto_shard` is "file".
        cache_dir: Directory for caches on disk.
        shuffle_buffer: Number of records or examples among which the shuffle chooses. "auto" takes all of them, but at
            most 10,000 examples or 100,000 records, and 512 MiB.
        deterministic: Whether decoded examples keep the order of the shuffle. If not, an example that takes long to
            decode does not hold up the others, and no two runs have the same order.
        random_shift: Largest shift of training images, in pixels: a short form of AugmentConfig(crop=...).
        augment: Function (example, seed) -> example that changes batches of training examples at random. The seed is a
            tensor [2]. If the function has an attribute `per_example` that is not None, that function gets single
            examples before batching.
        bucket_boundaries: Lengths. The examples of a batch have lengths between two of them, so little is padded.
        seed: Seed of the shuffle and the augmentation.
        prefetch: Batches to prepare before the training step needs them. With tf.data.AUTOTUNE, tf.data decides.
        device: Device to copy batches to in advance, for example "GPU:0". Not for tf.distribute.
        epoch: Counter whose number decides, together with the seed alone, the order and the augmentation, so that
            training can be resumed within an epoch. Without a counter, or while it is at -1, each iterator has new
            ones. They are then the same in two runs that make the same number of iterators.
        repeat: Whether to repeat training examples without end, each pass in a new order, for `fit` with
            steps_per_epoch. The order then depends on the seed alone. Data without an end is always so.
        service: Address of a tf.data service that prepares the training batches, for example "grpc://localhost:5050".
            It has an order of its own in every run, and no cache.
        drop_remainder: Whether to leave out a smaller last batch, so that all batches have one shape.
        auto_shard: How the workers of a multi-worker strategy share the data. "data": each reads all examples and keeps
            its part of every batch. "file": each reads its own files. "auto": by files if there are any, otherwise as
            "data". "off": each trains on all examples. With one worker it has no effect.
    Raises:
        ConfigError: `auto_shard` is unknown, or is "file" with an `epoch`; the inputs to shift are not images; `data`
            is a list, a generator, a keras.utils.PyDataset or batched; the cache is on disk, which has no room; there
            are buckets, but the examples have one length.
    Warns:
        TfoptWarning: The examples are too large to keep in memory, or may be batches.
    Example:
        >>> import numpy as np
        >>> batches = pipeline((np.zeros((10, 4)), np.zeros(10)), batch_size=4)
        >>> [x.shape[0] for x, y in batches]
        [4, 4, 2]
    """
    _check(auto_shard, epoch, training)
    check_value("batch_size", batch_size, Annotated[int, Ge(1)])
    _check_device(device)
    _check_augment(augment)
    if random_shift:
        augment = _random_shift(random_shift, augment)
    mode = cache_mode(cache)
    if service is not None and training:
        mode = _check_service(mode, repeat=repeat, device=device)
    part = split or ("train" if training else "validation")
    count = auto_shard != "file"
    if isinstance(data, Examples):
        kept, padding = keep_examples(data, part, mode=mode, cache_dir=cache_dir, count=count), data.padding
    else:
        kept, padding = _keep_data(check_examples(data), mode, cache_dir, count), None
    dataset, decode = kept.dataset, kept.decode
    decoded = dataset if decode is None else dataset.map(decode)
    check_buckets(decoded.element_spec, bucket_boundaries, padding)
    if training and isinstance(augment, Augmentation):
        augment.check(decoded.batch(1).element_spec)  # here: tf.data would replace an error from inside its function
    options = tf.data.Options()
    # The autotuner sleeps longer and longer between its checks, and the end of an epoch waits until it wakes. For a
    # short epoch that is up to half of the time (benchmarks/plan_choices.py).
    options.autotune.enabled = prefetch == tf.data.AUTOTUNE
    options.experimental_distribute.auto_shard_policy = AUTO_SHARD[auto_shard]
    options.deterministic = deterministic
    per_example = getattr(augment, "per_example", None) if training else None
    on_batches = augment if training and per_example is None else None

    def mapped(examples: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
        return examples.map(function, num_parallel_calls=logical_cores(), deterministic=deterministic)

    def batch(examples: tf.data.Dataset) -> tf.data.Dataset:
        batches = batched(
            examples,
            batch_size,
            drop_remainder=drop_remainder,
            padding=padding,
            boundaries=bucket_boundaries,
            seeded=on_batches is not None,
        )
        if not training and isinstance(augment, Augmentation) and augment.needs_one_hot:
            batches = mapped(batches, lambda *example: augment.one_hot(example))
        if on_batches is not None:
            # Each example has brought a seed along. The first one is the seed of the batch.
            batches = mapped(batches, lambda example, seeds: on_batches(example, seeds[0]))
        if isinstance(data, Examples) and data.check_finite:
            batches = mapped(batches, finite_batch(data.name))
        return batches.prefetch(prefetch).with_options(options)

    if not training:
        return on_device(batch(dataset if decode is None else mapped(dataset, decode)), device)
    size = int(dataset.cardinality())
    window = shuffle_window(data, part, kept) if shuffle_buffer == "auto" else shuffle_buffer

    def randomize(seed: Any) -> tf.data.Dataset:
        examples = dataset.shuffle(window, seed=seed)
        if decode is not None:
            examples = mapped(examples, decode)
        if augment is not None:
            examples = _with_seeds(examples, seed, in_service=service is not None)
        return examples if per_example is None else mapped(examples, per_example)

    def of_epoch(seed: tf.Tensor) -> tf.data.Dataset:
        # TensorFlow mixes its global seed into the seed of an operation. Here it sets the seed of this function only.
        tf.random.set_seed(1)
        return randomize(seed)

    if service is not None:
        check_records_can_be_sent(dataset)
        return ThroughService(
            lambda drawn: batch(randomize(drawn)),
            service,
            seed=seed,
            counter=epoch,
            batch_size=None if bucket_boundaries or padding is not None else batch_size,
            count=size if size >= 0 and not drop_remainder else None,
            prefetch=prefetch,
        )
    if repeat and size == 0:
        raise ConfigError("repeat needs at least one example. Received: repeat=True and no examples. Check the data.")
    if repeat or size == tf.data.INFINITE_CARDINALITY:
        endless = seeds_of_passes(seed).flat_map(of_epoch)
        endless = endless.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        return on_device(batch(endless), device)
    if epoch is None:
        return on_device(batch(randomize(seed)), device)
    # The cache is outside the function, so that it stays from epoch to epoch. Batching is outside too, because
    # tf.distribute looks there for the batch size that it divides.
    shuffled = epoch.seeds(seed).flat_map(of_epoch)
    if size != tf.data.UNKNOWN_CARDINALITY:
        shuffled = shuffled.apply(tf.data.experimental.assert_cardinality(size))
    return PerEpoch(batch(shuffled), epoch, seed, lambda drawn: batch(of_epoch(drawn)), device)


def shuffle_window(data: Any, split: Split, kept: Kept) -> int:
    """Returns the number of elements among which the shuffle chooses, if nobody sets it.

    The size of the records decides, also if decoded examples are in memory: the order must not depend on the cache.
    Only examples that are read from disk need room of their own.
    """
    is_source = isinstance(data, Examples)
    size = size_of(data.records(split), sampled=True) if is_source else size_of(kept.dataset)
    most = SHUFFLE_BUFFER_OF_RECORDS if is_source and data.decode is not None else SHUFFLE_BUFFER
    each = size.each
    if is_source and kept.choice.place == "disk":
        each = size_of(kept.dataset, sampled=True).each
    if each is not None:
        most = min(most, max(1, int(SHUFFLE_BYTES / max(each, 1))))
    return min(size.count, most) if size.count else most


def cache_mode(cache: CacheMode | bool) -> CacheMode:
    """Returns the name of a cache setting, for which a bool may stand.

    Example:
        >>> cache_mode(True), cache_mode(False)
        ('auto', 'off')
    """
    if isinstance(cache, bool):
        return "auto" if cache else "off"
    return cache


def _random_shift(pixels: int, augment: Callable[..., Any] | None) -> Augmentation:
    if augment is not None:
        raise ConfigError(
            "random_shift must be 0 with an augmentation, which has the setting crop for it. Received: "
            f"random_shift={pixels}. Set AugmentConfig(crop={pixels})."
        )
    return Augmentation(AugmentConfig(crop=pixels))


def _keep_data(data: Any, mode: CacheMode, cache_dir: str | None, count: bool) -> Kept:
    if isinstance(data, tf.data.Dataset):
        return keep_dataset(data, mode=mode, cache_dir=cache_dir, count=count)
    return Kept(
        dataset=tf.data.Dataset.from_tensor_slices(data),
        decode=None,
        choice=CacheChoice(place="off", reason="the examples are in memory already"),
    )


def _with_seeds(examples: tf.data.Dataset, seed: Any, *, in_service: bool) -> tf.data.Dataset:
    """Returns pairs of an example and a seed [2] of its own."""
    if not in_service:
        seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).batch(2, drop_remainder=True)
        return tf.data.Dataset.zip(examples, seeds)
    # A service divides every source among its workers, and random numbers cannot be divided. Each worker counts.
    start = tf.cast(seed, tf.int64)

    def count(number: tf.Tensor, *example: Any) -> Any:
        return number + 1, (example[0] if len(example) == 1 else example, tf.stack([start, number]))

    return examples.scan(tf.constant(0, tf.int64), count)


def _check_service(mode: CacheMode, *, repeat: bool, device: str | None) -> CacheMode:
    """Returns the cache mode for a tf.data service, or raises ConfigError for settings that it cannot follow."""
    refused = {
        f"cache={mode!r}": (
            mode in ("memory", "disk"),
            "each worker reads other records in every epoch. Set cache='off'",
        ),
        "repeat=True": (repeat, "its workers share the records of one epoch. Leave steps_per_epoch out"),
        f"device={device!r}": (device is not None, "its batches come from other processes. Leave device out"),
    }
    for received, (is_refused, reason) in refused.items():
        if is_refused:
            raise ConfigError(f"A tf.data service cannot follow every setting. Received: {received}, but {reason}.")
    return "off"


def _check(auto_shard: str, epoch: EpochCounter | None, training: bool) -> None:
    if auto_shard not in AUTO_SHARD:
        raise unknown_name("auto_shard", str(auto_shard), AUTO_SHARD)
    if auto_shard == "file" and epoch is not None and training:
        raise ConfigError(
            "auto_shard must not be 'file' when an epoch counter decides the order: TensorFlow does not find the files "
            "behind it. Received: auto_shard='file'. Use 'data', or give each worker a data set of its own files and "
            "use 'off'."
        )


def _check_augment(augment: Any) -> None:
    if augment is not None and not callable(augment):
        given = "AugmentConfig(...)" if isinstance(augment, AugmentConfig) else repr(augment)
        raise ConfigError(
            "augment must be a function (example, seed) -> example, such as an Augmentation. Received: "
            f"augment={given}. Pass tfopt.data.Augmentation(tfopt.data.AugmentConfig(crop=4), outputs=10)."
        )


def _check_device(device: str | None) -> None:
    known = [] if device is None else [each.name.removeprefix("/device:") for each in tf.config.list_logical_devices()]
    if device is not None and device.rpartition("/")[2].removeprefix("device:") not in known:
        raise ConfigError(
            f"device must be a device of this machine. Received: device={device!r}. TensorFlow sees {', '.join(known)}."
        )
