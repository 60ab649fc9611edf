"""Caches of decoded examples on disk: one directory for each part of a data set, whole or not at all.

tf.data's own `cache(filename)` writes during the first epoch. A killed training leaves a lock file and half a cache
behind, and the next training stops at them. Here the examples are written before the training, in a temporary directory
that gets its name when it is whole:

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
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfopt.atomic.directories import MARK, staged_directory
from tfopt.atomic.files import check_utf8, hold, read_stored
from tfopt.data.repeatable import calls_python
from tfopt.data.sizes import SAMPLE
from tfopt.errors import ConfigError, ExportError

EXAMPLES = "examples"
FORMAT = 1
# The open manifests of the caches that this process reads, each with a lock until the process ends.
_READ: dict[Path, int] = {}


def cached_on_disk(
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
        ...     numbers = cached_on_disk(tf.data.Dataset.range(4), tf.square, directory, "numbers")
        ...     [int(number) for number in numbers]
        [0, 1, 4, 9]
    """
    check_utf8("cache_dir", cache_dir)
    place = _place(records, decode, cache_dir, name)
    while not _lock(place):
        examples = records if decode is None else records.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
        for stale in place.parent.glob(f"{name}-*"):
            if stale != place:
                _remove_unread(stale)
        try:
            with staged_directory(place) as work:
                examples.save(str(work / EXAMPLES))
                files = sorted(path for path in work.rglob("*") if path.is_file())
                sizes = {path.relative_to(work).as_posix(): path.stat().st_size for path in files}
                (work / MARK).write_text(json.dumps({"tfopt": FORMAT, "files": sizes}, indent=2))
        except (ExportError, tf.errors.OpError) as error:
            # TensorFlow has many kinds of errors of files, also "out of range" where a file is too large. They name it.
            if isinstance(error, tf.errors.OpError) and str(place.parent) not in str(error):
                raise
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
    """Returns the room on the disk of a directory, which need not exist."""
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
        listed = json.loads(read_stored(place / MARK))["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return all((place / file).is_file() and (place / file).stat().st_size == size for file, size in listed)


def _lock(place: Path) -> bool:
    """Keeps other processes from removing a cache while this one lives. Returns whether the cache is whole."""
    with suppress(OSError):  # there is none, or the file system has no locks
        descriptor = os.open(place / MARK, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait
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
