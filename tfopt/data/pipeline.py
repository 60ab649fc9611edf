"""The tf.data pipeline that makes batches of examples: of a source, of arrays in memory, or of any data set.

    records -> cache -> shuffle -> decode -> augment -> batch -> augment -> prefetch

If decoded examples are cached, they are decoded before the cache. The shuffle holds records, which are small, or the
examples that the cache holds. So the order of the examples is the same with and without a cache in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import tensorflow as tf
from annotated_types import Ge

from tfopt.data.augment.augmentation import Augmentation, check_not_taught, separate_boxes
from tfopt.data.augment.config import AugmentConfig
from tfopt.data.batching import batched, check_buckets
from tfopt.data.caching import CachedData, CacheMode, cache_dataset, cache_examples, cache_mode
from tfopt.data.config import DataConfig, cuts_boxes
from tfopt.data.epoch_order import EpochCounter, PerEpoch, on_device, seeds_of_passes, with_seeds
from tfopt.data.examples import Examples, Split
from tfopt.data.finite import finite_batch
from tfopt.data.service.client import ThroughService, check_records_can_be_sent
from tfopt.data.user_data import check_examples
from tfopt.errors import ConfigError, unknown_name
from tfopt.hardware import logical_cores
from tfopt.report import Decision
from tfopt.settings.validation import check_value

PREFETCH = 2
WORKERS_READ = "each worker reads other records in every epoch"
AUTO_SHARD = {name: tf.data.experimental.AutoShardPolicy[name.upper()] for name in ("auto", "data", "file", "off")}


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
    check_value("batch_size", batch_size, Annotated[int, Ge(1)])
    config = DataConfig(
        random_shift=random_shift,
        cache=cache,
        cache_dir=cache_dir,
        shuffle_buffer=shuffle_buffer,
        deterministic=deterministic,
        bucket_boundaries=tuple(bucket_boundaries),
        service=service,
    )
    _check(config, augment, auto_shard, epoch, training=training, repeat=repeat, device=device)
    part = split or ("train" if training else "validation")
    cuts = training and isinstance(data, Examples) and data.decodes_boxes
    box, others = separate_boxes(augment) if cuts else (None, augment)
    mode = _cache_mode(config, training=training)
    cached = _cached(data, part, mode, cache_dir, may_count=auto_shard != "file", boxes=box is not None)
    if cached.decode is None:
        box, others = None, augment
    batches = _Batches(
        dataset=cached.dataset,
        decode=cached.decode,
        window=config.shuffle_buffer if config.shuffle_buffer != "auto" else cached.window if training else 1,
        source=data if isinstance(data, Examples) else None,
        boundaries=config.bucket_boundaries,
        deterministic=deterministic,
        in_service=service is not None,
        batch_size=batch_size,
        training=training,
        augment=Augmentation(AugmentConfig(crop=random_shift)) if random_shift else others,
        box=box,
        seed=seed,
        prefetch=prefetch,
        device=device,
        drop_remainder=drop_remainder,
        auto_shard=auto_shard,
    )
    batches.check()
    count = int(cached.dataset.cardinality())
    if not training:
        return batches.in_order()
    if service is not None:
        return batches.through_service(service, epoch, count)
    if repeat and count == 0:
        raise ConfigError("repeat needs at least one example. Received: repeat=True and no examples. Check the data.")
    if repeat or count == tf.data.INFINITE_CARDINALITY:
        return batches.without_end()
    return batches.of_iterator() if epoch is None else batches.of_epoch(epoch, count)


@dataclass(frozen=True, kw_only=True)
class _Batches:
    """The batches of a data set behind its cache. `pipeline` explains the settings; each ending is a method."""

    dataset: tf.data.Dataset
    decode: Callable[..., Any] | None
    window: int  # found before any graph is traced, because it may read examples
    source: Examples | None
    boundaries: tuple[int, ...]
    deterministic: bool
    in_service: bool
    batch_size: int
    training: bool
    augment: Callable[..., Any] | None
    box: Callable[..., tf.Tensor] | None  # draws the part of each image that is decoded
    seed: int
    prefetch: int
    device: str | None
    drop_remainder: bool
    auto_shard: str

    def check(self) -> None:
        """Raises ConfigError if the buckets or the augmentation do not fit the examples."""
        decoded = self._decoded(self.dataset)
        check_buckets(decoded.element_spec, self.boundaries, self._padding)
        if self.training and isinstance(self.augment, Augmentation):
            self.augment.check(decoded.batch(1).element_spec)  # tf.data would replace an error from its function
        elif self.training and self.augment is not None:
            check_not_taught(decoded.element_spec)

    def in_order(self) -> tf.data.Dataset:
        """Returns the examples in their order, as an evaluation needs them."""
        return on_device(self._batch(self._decoded(self.dataset)), self.device)

    def of_iterator(self) -> tf.data.Dataset:
        """Returns examples in a new order for each iterator."""
        return on_device(self._batch(self._randomized(self.seed)), self.device)

    def of_epoch(self, epoch: EpochCounter, count: int) -> tf.data.Dataset:
        """Returns examples in the order of the epoch that a counter names."""
        # The cache is outside the function, so that it stays from epoch to epoch. Batching is outside too, because
        # tf.distribute looks there for the batch size that it divides.
        shuffled = epoch.seeds(self.seed).flat_map(self._seeded)
        if count != tf.data.UNKNOWN_CARDINALITY:
            shuffled = shuffled.apply(tf.data.experimental.assert_cardinality(count))
        batches = self._batch(shuffled)
        return PerEpoch(batches, epoch, self.seed, lambda drawn: self._batch(self._seeded(drawn)), self.device)

    def without_end(self) -> tf.data.Dataset:
        """Returns examples again and again, each pass in a new order."""
        endless = seeds_of_passes(self.seed).flat_map(self._seeded)
        endless = endless.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        return on_device(self._batch(endless), self.device)

    def through_service(self, address: str, epoch: EpochCounter | None, count: int) -> tf.data.Dataset:
        """Returns the batches that a tf.data service prepares."""
        check_records_can_be_sent(self.dataset)
        joins = not self.boundaries and self._padding is None
        return ThroughService(
            lambda drawn: self._batch(self._randomized(drawn)),
            address,
            seed=self.seed,
            counter=epoch,
            batch_size=self.batch_size if joins else None,
            count=count if count >= 0 and not self.drop_remainder else None,
            prefetch=self.prefetch,
        )

    def _randomized(self, seed: Any) -> tf.data.Dataset:
        """Returns the examples shuffled and decoded, each with a seed of its own if they are augmented."""
        records = self.dataset.shuffle(self.window, seed=seed)
        if self.box is not None:
            return self._mapped(with_seeds(records, seed, in_service=self.in_service), self._decoded_box)
        examples = self._decoded(records)
        if self.augment is not None:
            examples = with_seeds(examples, seed, in_service=self.in_service)
        return examples if self._per_example is None else self._mapped(examples, self._per_example)

    def _decoded_box(self, record: Any, seed: tf.Tensor) -> Any:
        """Returns the example of the box that its seed draws, and the seed."""
        assert self.decode is not None
        assert self.box is not None
        parts = record if isinstance(record, tuple) else (record,)
        return self.decode(*parts, box=partial(self.box, seed)), seed

    def _seeded(self, seed: tf.Tensor) -> tf.data.Dataset:
        # TensorFlow mixes its global seed into the seed of an operation. Here it sets the seed of this function only.
        tf.random.set_seed(1)
        return self._randomized(seed)

    def _batch(self, examples: tf.data.Dataset) -> tf.data.Dataset:
        augment = self.augment if self.training and self._per_example is None else None
        batches = batched(
            examples,
            self.batch_size,
            drop_remainder=self.drop_remainder,
            padding=self._padding,
            boundaries=self.boundaries,
            seeded=augment is not None,
        )
        if not self.training and isinstance(self.augment, Augmentation) and self.augment.needs_one_hot:
            one_hot = self.augment.one_hot
            batches = self._mapped(batches, lambda *example: one_hot(example))
        if augment is not None:
            # Each example has brought a seed along. The first one is the seed of the batch.
            batches = self._mapped(batches, lambda example, seeds: augment(example, seeds[0]))
        if self.source is not None and self.source.check_finite:
            batches = self._mapped(batches, finite_batch(self.source.name))
        options = tf.data.Options()
        # The autotuner sleeps longer and longer between its checks, and the end of an epoch waits until it wakes. For a
        # short epoch that is up to half of the time (benchmarks/plan_choices.py).
        options.autotune.enabled = self.prefetch == tf.data.AUTOTUNE
        options.experimental_distribute.auto_shard_policy = AUTO_SHARD[self.auto_shard]
        options.deterministic = self.deterministic
        return batches.prefetch(self.prefetch).with_options(options)

    def _decoded(self, examples: tf.data.Dataset) -> tf.data.Dataset:
        return examples if self.decode is None else self._mapped(examples, self.decode)

    def _mapped(self, examples: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
        return examples.map(function, num_parallel_calls=logical_cores(), deterministic=self.deterministic)

    @property
    def _padding(self) -> Any:
        return None if self.source is None else self.source.padding

    @property
    def _per_example(self) -> Callable[..., Any] | None:
        return getattr(self.augment, "per_example", None) if self.training else None


def decide(examples: Examples, config: DataConfig | None = None, *, split: Split = "train") -> tuple[Decision, ...]:
    """Returns the settings of the pipeline for a part of examples, with the reasons.

    The pipelines of the same examples follow these decisions. No cache is made or written. If shapes do not determine
    the size of the examples, the first of them are read and decoded.

    Args:
        examples: Examples of a source.
        config: Settings; None means DataConfig().
        split: The part.
    Example:
        >>> from tfopt.data.sources import SOURCES
        >>> for decision in decide(SOURCES["digits"]()):
        ...     print(decision.setting, decision.value, "because", decision.reason)
        cache off because the examples are in memory already
        shuffle_buffer 1437 because all training examples
    """
    config = config or DataConfig()
    mode = _cache_mode(config, training=split == "train")
    boxes = split == "train" and cuts_boxes(config, examples)
    cached = cache_examples(examples, split, mode=mode, cache_dir=config.cache_dir, boxes=boxes)
    decisions: list[Decision] = []

    def add(setting: str, value: object, reason: str) -> None:
        decisions.append(Decision(setting=setting, value=str(value), reason=reason))

    add("cache", cached.choice.place, cached.choice.reason if mode == cache_mode(config.cache) else WORKERS_READ)
    size = examples.size("train")
    if split == "train" and config.shuffle_buffer != "auto":
        add("shuffle_buffer", config.shuffle_buffer, "as asked")
    elif split == "train" and size is not None and cached.window >= size:
        add("shuffle_buffer", cached.window, "all training examples")
    elif split == "train":
        total = "an unknown number" if size is None else f"{size:,}"
        reason = f"of {total} of training examples; more would take long to fill, or much memory"
        add("shuffle_buffer", cached.window, reason)
    if not config.deterministic:
        reason = "as asked; the order differs from run to run, so a resumed epoch has other examples"
        add("deterministic", False, reason)
    if config.bucket_boundaries:
        reason = f"as asked; {len(config.bucket_boundaries) + 1} buckets, each batch from one of them"
        add("bucket_boundaries", ", ".join(map(str, config.bucket_boundaries)), reason)
    if config.service is not None:
        reason = "as asked; its workers prepare the batches, in an order that differs from run to run"
        add("service", config.service, reason)
    return tuple(decisions)


def _cache_mode(config: DataConfig, *, training: bool) -> CacheMode:
    return "off" if config.service is not None and training else cache_mode(config.cache)


def _cached(
    data: Any, split: Split, mode: CacheMode, cache_dir: str | None, *, may_count: bool, boxes: bool
) -> CachedData:
    """Returns the records of a source, or a data set of examples, with the cache that is asked for."""
    if isinstance(data, Examples):
        return cache_examples(data, split, mode=mode, cache_dir=cache_dir, may_count=may_count, boxes=boxes)
    data = check_examples(data)
    if isinstance(data, tf.data.Dataset):
        return cache_dataset(data, mode=mode, cache_dir=cache_dir, may_count=may_count)
    return cache_dataset(tf.data.Dataset.from_tensor_slices(data), mode="off")  # they are in memory already


def _check(
    config: DataConfig,
    augment: Any,
    auto_shard: str,
    epoch: EpochCounter | None,
    *,
    training: bool,
    repeat: bool,
    device: str | None,
) -> None:
    """Raises ConfigError for settings that contradict each other."""
    if augment is not None and not callable(augment):
        given = "AugmentConfig(...)" if isinstance(augment, AugmentConfig) else repr(augment)
        raise ConfigError(
            "augment must be a function (example, seed) -> example, such as an Augmentation. Received: "
            f"augment={given}. Pass tfopt.data.Augmentation(tfopt.data.AugmentConfig(crop=4), outputs=10)."
        )
    if auto_shard not in AUTO_SHARD:
        raise unknown_name("auto_shard", str(auto_shard), AUTO_SHARD)
    if auto_shard == "file" and epoch is not None and training:
        raise ConfigError(
            "auto_shard must not be 'file' when an epoch counter decides the order: TensorFlow does not find the files "
            "behind it. Received: auto_shard='file'. Use 'data', or give each worker a data set of its own files and "
            "use 'off'."
        )
    known = [] if device is None else [each.name.removeprefix("/device:") for each in tf.config.list_logical_devices()]
    if device is not None and device.rpartition("/")[2].removeprefix("device:") not in known:
        raise ConfigError(
            f"device must be a device of this machine. Received: device={device!r}. TensorFlow sees {', '.join(known)}."
        )
    if config.random_shift and augment is not None:
        raise ConfigError(
            "random_shift must be 0 with an augmentation, which has the setting crop for it. Received: "
            f"random_shift={config.random_shift}. Set AugmentConfig(crop={config.random_shift})."
        )
    if config.service is None or not training:
        return
    refused = ""
    if config.cache in ("memory", "disk"):
        refused = f"cache={config.cache!r}, but {WORKERS_READ}. Set cache='off'"
    elif repeat:
        refused = "repeat=True, but its workers share the records of one epoch. Leave steps_per_epoch out"
    elif device is not None:
        refused = f"device={device!r}, but its batches come from other processes. Leave device out"
    if refused:
        raise ConfigError(f"A tf.data service cannot follow every setting. Received: {refused}.")
