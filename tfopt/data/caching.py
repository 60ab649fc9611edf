"""Where examples are kept between epochs: decoded in memory, as records in memory, decoded on disk, or nowhere."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import tensorflow as tf

from tfopt.data.disk_cache import cached_on_disk, free_bytes, is_complete
from tfopt.data.examples import Examples, Split
from tfopt.data.repeatable import changes_every_epoch
from tfopt.data.sizes import BYTES_PER_TENSOR, SHARE, Size, available_memory_bytes, content_of, is_in_memory, size_of
from tfopt.errors import ConfigError, unknown_name, warn
from tfopt.report.formatting import memory_size

CacheMode = Literal["auto", "memory", "disk", "off"]
CHANGES = "its functions draw random numbers, which a cache would repeat in every epoch"
CACHE_MODES: tuple[CacheMode, ...] = ("auto", "memory", "disk", "off")
Place = Literal["memory", "records in memory", "disk", "off"]
# Larger data sets are shuffled within a window of this number of examples. Records before decoding are smaller.
SHUFFLE_BUFFER = 10_000
SHUFFLE_BUFFER_OF_RECORDS = 100_000
# A window of large examples is smaller. The limit is no share of the free memory: the order must not depend on it.
SHUFFLE_BYTES = 2**29
# The caches of each `Examples`. Later trainings with the same examples use them again.
_CACHES: WeakKeyDictionary[Examples, dict[tuple[Split, CacheMode, str | None, bool, bool], CachedData]] = (
    WeakKeyDictionary()
)


@dataclass(frozen=True, kw_only=True)
class CacheChoice:
    """The place of the cache, and the reason for it.

    "memory" and "disk" hold decoded examples. "records in memory" holds records, which are decoded again in every
    epoch. "off" holds nothing.
    """

    place: Place
    reason: str


def choose_cache(
    records: tf.data.Dataset,
    decode: Callable[..., Any] | None = None,
    *,
    mode: CacheMode = "auto",
    cache_dir: str | None = None,
    name: str = "examples",
    beside: int = 0,
) -> CacheChoice:
    """Decides where the examples of one part are kept between epochs.

    "auto" takes the first of these places with room: decoded examples in memory, records in memory, decoded examples on
    disk in `cache_dir`. If none has room, or if the number of examples is unknown, nothing is kept.

    Args:
        records: Records of the part.
        decode: Function from a record to an example; None if records are examples.
        mode: "auto", or the place that is asked for.
        cache_dir: Directory for caches on disk.
        name: Name of the part, which begins the name of its cache on disk.
        beside: Number of further examples that another part keeps in memory at the same time.
    Raises:
        ConfigError: `mode` is unknown; or is "disk" without `cache_dir`, with data without an end, or without room.
    Example:
        >>> choose_cache(tf.data.Dataset.range(10).map(tf.square)).place
        'memory'
    """
    if mode not in CACHE_MODES:
        raise unknown_name("cache", str(mode), CACHE_MODES)
    if mode == "off":
        return CacheChoice(place="off", reason="as asked")
    if mode == "auto" and changes_every_epoch(records if decode is None else records.map(decode)):
        return CacheChoice(place="off", reason=CHANGES)
    if mode == "disk" and cache_dir is None:
        raise ConfigError("cache_dir must be given with cache='disk'. Received: cache_dir=None. Name a directory.")
    if cache_dir is not None and is_complete(records, decode, cache_dir, name):
        return CacheChoice(place="disk", reason=f"{cache_dir} holds the decoded examples already")
    if mode == "auto" and decode is None and is_in_memory(records):
        return CacheChoice(place="off", reason="the examples are in memory already")
    if mode == "memory":
        return CacheChoice(place="memory", reason="as asked")
    size = size_of(records, decode, sampled=True)
    if size.total is None:
        why = "the data has no end" if size.endless else "the number of examples is unknown before they are read"
        if mode == "disk":
            raise ConfigError(
                f"cache='disk' needs examples of known number, so that a full disk is noticed before the training. "
                f"Received: cache='disk', but {why}. Use dataset.take(n) or "
                "tf.data.experimental.assert_cardinality(n), or set cache='off'."
            )
        return CacheChoice(place="off", reason=why)
    if mode == "disk":
        return CacheChoice(place="disk", reason=_room_on_disk(size, str(cache_dir), must=True) or "as asked")
    return _by_size(records, decode, size, cache_dir, beside)


def _by_size(
    records: tf.data.Dataset,
    decode: Callable[..., Any] | None,
    size: Size,
    cache_dir: str | None,
    beside: int,
) -> CacheChoice:
    limit = int(SHARE * available_memory_bytes())
    free = f"{memory_size(limit)} may be used ({SHARE:.0%} of the free memory)"
    needed = size.with_more(beside)
    sizes = f"the decoded examples take {memory_size(needed)}, and {free}"
    if needed <= limit:
        return CacheChoice(place="memory", reason=sizes)
    if decode is not None and not is_in_memory(records):
        as_records = size_of(records, sampled=True).with_more(beside)
        if as_records <= limit:
            reason = f"{sizes}; before decoding they take {memory_size(as_records)}"
            return CacheChoice(place="records in memory", reason=reason)
    if cache_dir is None:
        return CacheChoice(place="off", reason=f"{sizes}; cache_dir names no directory for a cache on disk")
    room = _room_on_disk(size, cache_dir, must=False)
    if room is None:
        return CacheChoice(place="off", reason=f"{sizes}; {cache_dir} has no room for them")
    return CacheChoice(place="disk", reason=f"{sizes}; {room}")


def _room_on_disk(size: Size, cache_dir: str, *, must: bool) -> str | None:
    """Returns in words how much room the disk has; None, or an error if it `must` have it, if it has too little."""
    needed = int((size.count or 0) * (size.content or 0))
    limit = int(SHARE * free_bytes(cache_dir))
    if needed <= limit:
        return f"{cache_dir} has room: {memory_size(needed)} of {memory_size(limit)}"
    if must:
        raise ConfigError(
            f"cache_dir must have room for the decoded examples. Received: cache_dir={cache_dir!r}, where "
            f"{memory_size(limit)} may be used ({SHARE:.0%} of the free room), for {memory_size(needed)}. "
            "Name another directory, or set cache='off'."
        )
    return None


@dataclass(frozen=True, eq=False)
class CachedData:
    """A data set with its cache, which is made, or written to disk, when `dataset` is first asked for."""

    records: tf.data.Dataset
    decode_records: Callable[..., Any] | None
    choice: CacheChoice
    cache_dir: str | None
    name: str
    may_count: bool
    of_source: bool

    @functools.cached_property
    def dataset(self) -> tf.data.Dataset:
        """The data set behind the cache."""
        records, place = self.records, self.choice.place
        if place == "disk":
            return cached_on_disk(records, self.decode_records, str(self.cache_dir), self.name)
        if place == "memory":
            return _in_memory(_decoded(records, self.decode_records), may_count=self.may_count)
        return records.cache() if place == "records in memory" else records

    @property
    def decode(self) -> Callable[..., Any] | None:
        """Function that makes examples of the elements of `dataset`; None if they are examples."""
        return None if self.choice.place in ("memory", "disk") else self.decode_records

    @functools.cached_property
    def window(self) -> int:
        """Number of elements among which the shuffle chooses, if nobody sets it.

        The size of the records decides, also if decoded examples are in memory: the order must not depend on the cache.
        Only examples that are read from disk need room of their own.
        """
        size = size_of(self.records, sampled=self.of_source)
        each = size.each
        if self.of_source and self.choice.place == "disk":
            each = size_of(self.records, self.decode_records, sampled=True).each
        most = SHUFFLE_BUFFER if self.decode_records is None else SHUFFLE_BUFFER_OF_RECORDS
        if each is not None:
            most = min(most, max(1, int(SHUFFLE_BYTES / max(each, 1))))
        return min(size.count, most) if size.count else most


def cache_mode(cache: CacheMode | bool) -> CacheMode:
    """Returns the name of a cache setting, which may be a bool.

    Example:
        >>> cache_mode(True), cache_mode(False)
        ('auto', 'off')
    """
    if isinstance(cache, bool):
        return "auto" if cache else "off"
    return cache


def cache_examples(
    examples: Examples,
    split: Split,
    *,
    mode: CacheMode = "auto",
    cache_dir: str | None = None,
    may_count: bool = True,
    boxes: bool = False,
) -> CachedData:
    """Returns the records of a part, or its decoded examples, with the cache that suits their size.

    The same part of the same examples has one cache, which all pipelines share.

    Args:
        mode: "auto", or the place that is asked for.
        cache_dir: Directory for caches on disk.
        may_count: Whether bytes of unknown number may be counted while they are read. TensorFlow does not find the
            files of a data set behind the counting, so it cannot divide them among workers.
        boxes: Whether each epoch decodes another part of each image. "auto" then keeps no decoded examples.
    """
    known = _CACHES.setdefault(examples, {})
    boxes = boxes and mode == "auto"
    key = (split, mode, cache_dir, may_count, boxes)
    if key not in known:
        records, name = examples.records(split), re.sub(r"[^\w .-]", "_", f"{examples.name}-{split}")
        # The training and the validation part are in memory at the same time.
        other = examples.size("validation" if split == "train" else "train") or 0
        if boxes:
            kept = choose_cache(records, name=name, beside=other).place == "memory"
            reason = f"each epoch decodes other boxes, so {'only the records are' if kept else 'nothing is'} kept"
            choice = CacheChoice(place="records in memory" if kept else "off", reason=reason)
        else:
            choice = choose_cache(records, examples.decode, mode=mode, cache_dir=cache_dir, name=name, beside=other)
            choice = _with_room(choice, records, examples.decode)
        known[key] = CachedData(records, examples.decode, choice, cache_dir, name, may_count, of_source=True)
    return known[key]


def cache_dataset(
    dataset: tf.data.Dataset, *, mode: CacheMode = "auto", cache_dir: str | None = None, may_count: bool = True
) -> CachedData:
    """Returns a data set of examples with a cache. Warns if "auto" finds no room, because its caller expects one."""
    if mode == "auto" and changes_every_epoch(dataset):
        warn(
            f"The examples are not kept in memory: {CHANGES}. They are read again in every epoch. To keep what comes "
            "before, cache it: dataset.cache().map(...). Set cache=False to do so without this warning."
        )
        choice = CacheChoice(place="off", reason=CHANGES)
    elif mode == "auto" and cache_dir is None:
        choice = CacheChoice(place="memory", reason="the usual place")
    else:
        choice = choose_cache(dataset, mode=mode, cache_dir=cache_dir)
    choice = _with_room(choice, dataset, None)
    return CachedData(dataset, None, choice, cache_dir, "examples", may_count, of_source=False)


def _decoded(records: tf.data.Dataset, decode: Callable[..., Any] | None) -> tf.data.Dataset:
    if decode is None:
        return records
    return records.map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _with_room(choice: CacheChoice, records: tf.data.Dataset, decode: Callable[..., Any] | None) -> CacheChoice:
    """Returns the choice, or "off", with a warning, if examples of known size do not fit in memory."""
    if choice.place != "memory":
        return choice
    size, limit = size_of(records, decode), int(SHARE * available_memory_bytes())
    if size.endless:
        reason = "the data set is infinite"
    elif size.total is not None and size.total > limit:
        sizes = f"they take {memory_size(size.total)}, and {memory_size(limit)} may be used"
        reason = f"{sizes} ({SHARE:.0%} of the free memory)"
    else:
        return choice
    warn(
        f"The examples are not kept in memory: {reason}. They are read again in every epoch. Set cache=False to do so "
        "without this warning, or cache them in a file: dataset.cache(filename)."
    )
    return CacheChoice(place="off", reason="memory has no room for them")


def _in_memory(examples: tf.data.Dataset, *, may_count: bool) -> tf.data.Dataset:
    """Returns a data set with a cache in memory. Bytes of unknown number are counted while they are read."""
    if may_count and size_of(examples).total is None:
        examples = _limited(examples, int(SHARE * available_memory_bytes()))
    return examples.cache()


def _limited(dataset: tf.data.Dataset, limit: int) -> tf.data.Dataset:
    """Counts the bytes of the examples, and fails at the example that exceeds the limit."""
    if any(
        isinstance(spec, tf.RaggedTensorSpec) and not spec.ragged_rank for spec in tf.nest.flatten(dataset.element_spec)
    ):
        # A row of a ragged tensor is a plain tensor, and `scan` would forget that the rows differ in length. A batch of
        # one row is a ragged tensor, which it keeps.
        rows, counted = dataset.cardinality(), _limited(dataset.batch(1), limit).unbatch()
        known = rows != tf.data.UNKNOWN_CARDINALITY
        return counted.apply(tf.data.experimental.assert_cardinality(rows)) if known else counted
    words = (
        f"The examples must fit in memory with cache=True. Received: more than {memory_size(limit)}, {SHARE:.0%} of "
        "the free memory. Set cache=False."
    )

    @tf.autograph.experimental.do_not_convert
    def add(total: tf.Tensor, example: Any) -> tuple[tf.Tensor, Any]:
        tensors = tf.nest.flatten(example, expand_composites=True)
        total += tf.add_n([content_of(tensor) for tensor in tensors]) + BYTES_PER_TENSOR * len(tensors)
        with tf.control_dependencies([tf.debugging.Assert(total <= limit, [words])]):
            return tf.identity(total), example

    return dataset.scan(tf.constant(0, tf.int64), add)
