"""Puts the cache into a data set, at the place that was chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from tfopt.data.caching.choice import CHANGES, CacheChoice, CacheMode, choose_cache
from tfopt.data.caching.disk import kept_on_disk
from tfopt.data.caching.memory import cached
from tfopt.data.caching.repeatable import changes_every_epoch
from tfopt.data.examples import Examples, Split
from tfopt.errors import warn

# The caches of each `Examples`. Later trainings with the same examples use them again.
_KEPT: WeakKeyDictionary[Examples, dict[tuple[Split, CacheMode, str | None], Kept]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """A data set with its cache.

    Attributes:
        dataset: The data set behind the cache.
        decode: Function that makes examples of its elements; None if they are examples.
        choice: The place of the cache, and the reason.
    """

    dataset: tf.data.Dataset
    decode: Callable[..., Any] | None
    choice: CacheChoice


def keep_examples(
    examples: Examples, split: Split, *, mode: CacheMode = "auto", cache_dir: str | None = None, count: bool = True
) -> Kept:
    """Returns the records of a part, or its decoded examples, with the cache that suits their size.

    The same part of the same examples has one cache, which all pipelines share.

    Args:
        examples: Examples of a source.
        split: The part.
        mode: "auto", or the place that is asked for.
        cache_dir: Directory for caches on disk.
        count: Whether bytes of unknown number may be counted while they are read.
    """
    known = _KEPT.setdefault(examples, {})
    key = (split, mode, cache_dir)
    if key not in known:
        records, name = examples.records(split), f"{examples.name}-{split}"
        # The training and the validation part are in memory at the same time.
        other = examples.size("validation" if split == "train" else "train") or 0
        choice = choose_cache(records, examples.decode, mode=mode, cache_dir=cache_dir, name=name, beside=other)
        known[key] = _keep(records, examples.decode, choice, cache_dir, name, count)
    return known[key]


def keep_dataset(
    dataset: tf.data.Dataset, *, mode: CacheMode = "auto", cache_dir: str | None = None, count: bool = True
) -> Kept:
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
    return _keep(dataset, None, choice, cache_dir, "examples", count)


def _keep(
    records: tf.data.Dataset,
    decode: Callable[..., Any] | None,
    choice: CacheChoice,
    cache_dir: str | None,
    name: str,
    count: bool,
) -> Kept:
    if choice.place == "off":
        return Kept(dataset=records, decode=decode, choice=choice)
    if choice.place == "records in memory":
        return Kept(dataset=records.cache(), decode=decode, choice=choice)
    if choice.place == "disk":
        assert cache_dir is not None
        return Kept(dataset=kept_on_disk(records, decode, cache_dir, name), decode=None, choice=choice)
    examples = records
    if decode is not None:
        examples = records.map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return Kept(dataset=cached(examples, count=count), decode=None, choice=choice)
