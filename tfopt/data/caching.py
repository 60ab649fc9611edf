"""Where examples are kept between epochs: decoded in memory, as records in memory, decoded on disk, or nowhere.

A cache on disk is one directory for each part of a data set, whole or not at all. tf.data's own `cache(filename)`
writes during the first epoch. A killed training leaves a lock file and half a cache behind, and the next training stops
at them. Here the examples are written before the training, in a temporary directory that gets its name when it is
whole:

    CACHE_DIR/NAME-0123456789abcdef/
        manifest.json    the number of examples, and the files
        examples/        what tf.data's `save` writes

The number in the name is TensorFlow's fingerprint of the data set: of its operations, its functions and the tensors
that it holds, such as the names of its files. The first examples are part of it. If a source has changed in all this,
its old cache is removed, unless a process that reads it still runs. A change inside a later file is not seen: remove
the directory then. Of a Python function in the source (`tf.numpy_function`) TensorFlow knows a number alone, which
another function may have in another process. All its examples are then part of the number in the name, so they are read
once in each process.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import tensorflow as tf

from tfopt.atomic.directories import MARK, staged_directory
from tfopt.atomic.files import hold
from tfopt.data.examples import Examples, Split
from tfopt.data.repeatable import calls_python, changes_every_epoch
from tfopt.data.sizes import SAMPLE, SHARE, Size, available_memory_bytes, cached, is_in_memory, size_of
from tfopt.errors import ConfigError, ExportError, unknown_name, warn
from tfopt.report.formatting import memory_size

CacheMode = Literal["auto", "memory", "disk", "off"]
CHANGES = "its functions draw random numbers, which a cache would repeat in every epoch"
CACHE_MODES: tuple[CacheMode, ...] = ("auto", "memory", "disk", "off")
Place = Literal["memory", "records in memory", "disk", "off"]
EXAMPLES = "examples"
FORMAT = 1
# Larger data sets are shuffled within a window of this number of examples. Records before decoding are smaller.
SHUFFLE_BUFFER = 10_000
SHUFFLE_BUFFER_OF_RECORDS = 100_000
# A window of large examples is smaller. The limit is no share of the free memory: the order must not depend on it.
SHUFFLE_BYTES = 2**29
# The caches of each `Examples`. Later trainings with the same examples use them again.
_KEPT: WeakKeyDictionary[Examples, dict[tuple[Split, CacheMode, str | None, bool], Kept]] = WeakKeyDictionary()
# The open manifests of the caches on disk that this process reads, each with a lock until the process ends.
_READ: dict[Path, int] = {}


@dataclass(frozen=True, kw_only=True)
class CacheChoice:
    """The place of the cache.

    Attributes:
        place: "memory" and "disk" hold decoded examples. "records in memory" holds records, which are decoded again in
            every epoch. "off" holds nothing.
        reason: The reason for the place.
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
        return _unknown(size, mode)
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
    assert size.total is not None
    assert size.each is not None
    limit = int(SHARE * available_memory_bytes())
    free = f"{memory_size(limit)} may be used ({SHARE:.0%} of the free memory)"
    needed = size.total + int(beside * size.each)
    sizes = f"the decoded examples take {memory_size(needed)}, and {free}"
    if needed <= limit:
        return CacheChoice(place="memory", reason=sizes)
    if decode is not None and not is_in_memory(records):
        stored = size_of(records, sampled=True)
        assert stored.total is not None
        assert stored.each is not None
        kept = stored.total + int(beside * stored.each)
        if kept <= limit:
            reason = f"{sizes}; before decoding they take {memory_size(kept)}"
            return CacheChoice(place="records in memory", reason=reason)
    if cache_dir is None:
        return CacheChoice(place="off", reason=f"{sizes}; cache_dir names no directory for a cache on disk")
    room = _room_on_disk(size, cache_dir, must=False)
    if room is None:
        return CacheChoice(place="off", reason=f"{sizes}; {cache_dir} has no room for them")
    return CacheChoice(place="disk", reason=f"{sizes}; {room}")


def _unknown(size: Size, mode: CacheMode) -> CacheChoice:
    why = "the data has no end" if size.endless else "the number of examples is unknown before they are read"
    if mode == "disk":
        raise ConfigError(
            f"cache='disk' needs examples of known number, so that a full disk is noticed before the training. "
            f"Received: cache='disk', but {why}. Use dataset.take(n) or "
            "tf.data.experimental.assert_cardinality(n), or set cache='off'."
        )
    return CacheChoice(place="off", reason=why)


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """A data set with its cache.

    Attributes:
        dataset: The data set behind the cache.
        decode: Function that makes examples of its elements; None if they are examples.
        choice: The place of the cache, and the reason.
        records: The records of a source before the cache; None if the data set is no source's.
        decodes: Whether the records of the source are decoded.
    """

    dataset: tf.data.Dataset
    decode: Callable[..., Any] | None
    choice: CacheChoice
    records: tf.data.Dataset | None = None
    decodes: bool = False

    @functools.cached_property
    def window(self) -> int:
        """Number of elements among which the shuffle chooses, if nobody sets it.

        The size of the records decides, also if decoded examples are in memory: the order must not depend on the cache.
        Only examples that are read from disk need room of their own.
        """
        size = size_of(self.dataset) if self.records is None else size_of(self.records, sampled=True)
        each = size.each
        if self.records is not None and self.choice.place == "disk":
            each = size_of(self.dataset, sampled=True).each
        most = SHUFFLE_BUFFER_OF_RECORDS if self.decodes else SHUFFLE_BUFFER
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
    key = (split, mode, cache_dir, count)
    if key not in known:
        records, name = examples.records(split), re.sub(r"[^\w .-]", "_", f"{examples.name}-{split}")
        # The training and the validation part are in memory at the same time.
        other = examples.size("validation" if split == "train" else "train") or 0
        choice = choose_cache(records, examples.decode, mode=mode, cache_dir=cache_dir, name=name, beside=other)
        dataset, decode, choice = _keep(records, examples.decode, choice, cache_dir, name, count)
        decodes = examples.decode is not None
        known[key] = Kept(dataset=dataset, decode=decode, choice=choice, records=records, decodes=decodes)
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
    dataset, _, choice = _keep(dataset, None, choice, cache_dir, "examples", count)
    return Kept(dataset=dataset, decode=None, choice=choice)


def _keep(
    records: tf.data.Dataset,
    decode: Callable[..., Any] | None,
    choice: CacheChoice,
    cache_dir: str | None,
    name: str,
    count: bool,
) -> tuple[tf.data.Dataset, Callable[..., Any] | None, CacheChoice]:
    """Returns the data set behind its cache, the function that makes examples of its elements, and the place taken."""
    if choice.place == "off":
        return records, decode, choice
    if choice.place == "records in memory":
        return records.cache(), decode, choice
    if choice.place == "disk":
        return kept_on_disk(records, decode, str(cache_dir), name), None, choice
    examples = records
    if decode is not None:
        examples = records.map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    kept = cached(examples, count=count)
    if kept is examples:  # without a cache, the shuffle must hold records: examples are larger
        return records, decode, CacheChoice(place="off", reason="memory has no room for them")
    return kept, None, choice


def kept_on_disk(
    records: tf.data.Dataset, decode: Callable[..., Any] | None, cache_dir: str, name: str
) -> tf.data.Dataset:
    """Returns a data set that reads decoded examples from disk. Writes them first if they are not there.

    Args:
        records: Data set of records.
        decode: Function from a record to an example; None if records are examples.
        cache_dir: Directory of the caches.
        name: Name of the part, for example "digits-train".
    Raises:
        ConfigError: The directory cannot be written, or the disk becomes full.
    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     numbers = kept_on_disk(tf.data.Dataset.range(4), tf.square, directory, "numbers")
        ...     [int(number) for number in numbers]
        [0, 1, 4, 9]
    """
    place = _place(records, decode, cache_dir, name)
    while not _lock(place):
        examples = records if decode is None else records.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
        for stale in place.parent.glob(f"{name}-*"):
            if stale != place:
                _remove_unread(stale)
        try:
            with staged_directory(place) as work:
                examples.save(str(work / EXAMPLES))
                _write_manifest(work)
        except (ExportError, tf.errors.ResourceExhaustedError, tf.errors.PermissionDeniedError) as error:
            raise ConfigError(
                f"cache_dir must be writable and have room. Received: cache_dir={cache_dir!r} ({error}). "
                "Name another directory, or set cache='off'."
            ) from error
    return tf.data.Dataset.load(str(place / EXAMPLES))


def is_complete(records: tf.data.Dataset, decode: Callable[..., Any] | None, cache_dir: str, name: str) -> bool:
    """Returns whether a directory holds the whole cache of these examples."""
    if not any(Path(cache_dir).glob(f"{name}-*")):
        return False
    return _is_whole(_place(records, decode, cache_dir, name))


def free_bytes(cache_dir: str) -> int:
    """Returns the room on the disk of a directory, which need not exist.

    Example:
        >>> free_bytes("/no/such/directory") > 0
        True
    """
    path = Path(cache_dir).absolute()
    return shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free


def _place(records: tf.data.Dataset, decode: Callable[..., Any] | None, cache_dir: str, name: str) -> Path:
    examples = records if decode is None else records.map(decode)
    variant = tf.data.experimental.to_variant(examples)
    digest = hashlib.sha256(f"{FORMAT} {tf.__version__} {examples.element_spec}".encode())
    digest.update(str(int(tf.raw_ops.DatasetFingerprint(input_dataset=variant))).encode())
    for example in examples if calls_python(examples) else examples.take(SAMPLE):
        for tensor in tf.nest.flatten(example, expand_composites=True):
            digest.update(tf.io.serialize_tensor(tensor).numpy())
    return Path(cache_dir) / f"{name}-{digest.hexdigest()[:16]}"


def _is_whole(place: Path) -> bool:
    try:
        listed = json.loads((place / MARK).read_text())["files"]
    except (OSError, ValueError, KeyError, RecursionError):
        return False
    return all((place / file).is_file() and (place / file).stat().st_size == size for file, size in listed.items())


def _lock(place: Path) -> bool:
    """Keeps other processes from removing a cache while this one lives. Returns whether the cache is whole."""
    with suppress(OSError):  # there is none, or the file system has no locks
        descriptor = os.open(place / MARK, os.O_RDONLY)
        earlier, _READ[place] = _READ.get(place), descriptor
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a process that removes it
        if earlier is not None:
            os.close(earlier)
    return _is_whole(place)


def _remove_unread(place: Path) -> None:
    """Removes a whole cache that no process reads."""
    with suppress(OSError), (place / MARK).open("r+b") as manifest:  # NFS locks only what may be written
        if hold(manifest.fileno(), place / MARK) and _is_whole(place):
            shutil.rmtree(place, ignore_errors=True)


def _write_manifest(work: Path) -> None:
    files = {
        path.relative_to(work).as_posix(): path.stat().st_size for path in sorted(work.rglob("*")) if path.is_file()
    }
    (work / MARK).write_text(json.dumps({"tfopt": FORMAT, "files": files}, indent=2))
