"""Decides where examples are kept between epochs, by their size against the free memory and the room on the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from tfopt.data.caching import disk
from tfopt.data.caching.memory import SHARE, available_memory_bytes
from tfopt.data.caching.repeatable import changes_every_epoch
from tfopt.data.caching.sizes import Size, in_words, is_in_memory, size_of
from tfopt.errors import ConfigError, unknown_name

CacheMode = Literal["auto", "memory", "disk", "off"]
CHANGES = "its functions draw random numbers, which a cache would repeat in every epoch"
CACHE_MODES: tuple[CacheMode, ...] = ("auto", "memory", "disk", "off")
Place = Literal["memory", "records in memory", "disk", "off"]


@dataclass(frozen=True, kw_only=True)
class CacheChoice:
    """The place of the cache.

    Attributes:
        place: "memory" and "disk" hold decoded examples. "records in memory" holds records, which are decoded again in
            every epoch. "off" holds nothing.
        reason: The reason for the place.
        is_counted: Whether the size is unknown, so that the bytes must be counted while the examples are read.
    """

    place: Place
    reason: str
    is_counted: bool = False


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
    if cache_dir is not None and disk.is_complete(records, decode, cache_dir, name):
        return CacheChoice(place="disk", reason=f"{cache_dir} holds the decoded examples already")
    if mode == "auto" and decode is None and is_in_memory(records):
        return CacheChoice(place="off", reason="the examples are in memory already")
    examples = size_of(records, decode, sampled=True)
    if mode == "memory":
        return CacheChoice(place="memory", reason="as asked", is_counted=examples.total is None)
    if examples.total is None:
        return _unknown(examples, mode)
    if mode == "disk":
        return CacheChoice(place="disk", reason=_room_on_disk(records, decode, cache_dir, must=True) or "as asked")
    return _by_size(records, decode, examples, cache_dir, beside)


def _by_size(
    records: tf.data.Dataset,
    decode: Callable[..., Any] | None,
    examples: Size,
    cache_dir: str | None,
    beside: int,
) -> CacheChoice:
    assert examples.total is not None
    assert examples.each is not None
    limit = int(SHARE * available_memory_bytes())
    free = f"{in_words(limit)} may be used ({SHARE:.0%} of the free memory)"
    needed = examples.total + int(beside * examples.each)
    if needed <= limit:
        return CacheChoice(place="memory", reason=f"the decoded examples take {in_words(needed)}, and {free}")
    too_large = f"the decoded examples take {in_words(needed)}, and {free}"
    if decode is not None and not is_in_memory(records):
        stored = size_of(records, sampled=True)
        assert stored.total is not None
        assert stored.each is not None
        kept = stored.total + int(beside * stored.each)
        if kept <= limit:
            reason = f"{too_large}; before decoding they take {in_words(kept)}"
            return CacheChoice(place="records in memory", reason=reason)
    if cache_dir is None:
        return CacheChoice(place="off", reason=f"{too_large}; cache_dir names no directory for a cache on disk")
    room = _room_on_disk(records, decode, cache_dir, must=False)
    if room is None:
        return CacheChoice(place="off", reason=f"{too_large}; {cache_dir} has no room for them")
    return CacheChoice(place="disk", reason=f"{too_large}; {room}")


def _unknown(examples: Size, mode: CacheMode) -> CacheChoice:
    why = "the data has no end" if examples.endless else "the number of examples is unknown before they are read"
    if mode == "disk":
        raise ConfigError(
            f"cache='disk' needs examples of known number, so that a full disk is noticed before the training. "
            f"Received: cache='disk', but {why}. Use dataset.take(n) or "
            "tf.data.experimental.assert_cardinality(n), or set cache='off'."
        )
    return CacheChoice(place="off", reason=why)


def _room_on_disk(
    records: tf.data.Dataset, decode: Callable[..., Any] | None, cache_dir: str | None, *, must: bool
) -> str | None:
    """Returns in words how much room the disk has; None, or an error if it `must` have it, if it has too little."""
    assert cache_dir is not None
    needed = size_of(records, decode, sampled=True, overhead=False).total or 0
    limit = int(SHARE * disk.free_bytes(cache_dir))
    if needed <= limit:
        return f"{cache_dir} has room: {in_words(needed)} of {in_words(limit)}"
    if must:
        raise ConfigError(
            f"cache_dir must have room for the decoded examples. Received: cache_dir={cache_dir!r}, where "
            f"{in_words(limit)} may be used ({SHARE:.0%} of the free room), for {in_words(needed)}. "
            "Name another directory, or set cache='off'."
        )
    return None
