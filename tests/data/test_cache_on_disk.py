"""A cache on disk is there whole or not at all, and goes when its source has changed."""

import os
import resource

import pytest
import tensorflow as tf

from tfopt.data import DataConfig, Examples, decide, disk_cache, pipeline
from tfopt.data.caching import cache_examples
from tfopt.data.disk_cache import cached_on_disk, is_complete
from tfopt.errors import ConfigError


def numbers(kept):
    return [int(number) for number in kept]


def release():
    """Gives up the locks on the caches, as the end of a process does."""
    while disk_cache._READ:
        os.close(disk_cache._READ.popitem()[1])


def test_what_is_on_disk_is_not_written_again(tmp_path):
    written = set()
    for _ in range(2):
        kept = cached_on_disk(tf.data.Dataset.range(100), lambda n: n * n, str(tmp_path), "squares")
        assert numbers(kept) == [n * n for n in range(100)] == numbers(kept)
        assert len(kept) == 100
        written |= {(path, path.stat().st_mtime_ns) for path in tmp_path.rglob("manifest.json")}
    assert len(written) == 1


def test_another_source_replaces_the_cache_and_other_parts_stay(tmp_path):
    directory = str(tmp_path)
    old, new = tf.data.Dataset.range(9), tf.data.Dataset.range(10)
    cached_on_disk(old, tf.square, directory, "a-train")
    cached_on_disk(old, tf.square, directory, "a-test")
    assert is_complete(old, tf.square, directory, "a-train")
    assert not is_complete(new, tf.square, directory, "a-train")
    assert not is_complete(old, tf.negative, directory, "a-train")
    release()
    cached_on_disk(new, tf.square, directory, "a-train")
    assert is_complete(new, tf.square, directory, "a-train")
    assert not is_complete(old, tf.square, directory, "a-train")
    assert is_complete(old, tf.square, directory, "a-test")


def test_a_decision_writes_no_cache(tmp_path):
    numbers = tf.data.Dataset.range(9).map(lambda number: (number, number))
    examples = Examples(name="numbers", train=numbers, test=numbers, outputs=1)
    cache, window = decide(examples, DataConfig(cache="disk", cache_dir=str(tmp_path / "new")))
    assert (cache.value, window.value) == ("disk", "9")
    assert not any(tmp_path.iterdir())
    pipeline(examples, batch_size=4, cache="disk", cache_dir=str(tmp_path / "new"))
    assert len([*(tmp_path / "new").iterdir()]) == 1


def test_data_sets_of_ones_own_leave_each_other_the_cache(tmp_path):
    def written(count):
        dataset = tf.data.Dataset.range(count).map(tf.square)
        return pipeline(dataset, batch_size=4, training=False, cache="disk", cache_dir=str(tmp_path))

    counts = (9, 7)
    kept = [written(count) for count in counts]
    assert [sum(map(len, each)) for each in kept] == [*counts]


@pytest.mark.parametrize("name", ["cats[1]", "mnist/3.0.1"])
def test_any_name_of_a_source_names_its_cache(name, tmp_path):
    for count in (9, 10):
        records = tf.data.Dataset.range(count)
        examples = Examples(name=name, train=records, test=records, outputs=1, decode=lambda number: (number, number))
        assert len(cache_examples(examples, "train", mode="disk", cache_dir=str(tmp_path)).dataset) == count
        (cache,) = tmp_path.iterdir()  # the new one has replaced the old one
        assert disk_cache._is_whole(cache)
        release()


def test_a_damaged_cache_is_written_again(tmp_path):
    source = tf.data.Dataset.range(100)
    cached_on_disk(source, tf.square, str(tmp_path), "squares")
    (snapshot,) = tmp_path.rglob("*.snapshot")
    snapshot.write_bytes(snapshot.read_bytes()[:-10])
    assert not is_complete(source, tf.square, str(tmp_path), "squares")
    assert numbers(cached_on_disk(source, tf.square, str(tmp_path), "squares")) == [n * n for n in range(100)]


@pytest.mark.slow
def test_a_killed_writer_leaves_no_half_cache(tmp_path, fresh_python):
    code = f"""
import os, signal, sys
import tensorflow as tf
from tfopt.data.disk_cache import cached_on_disk
def stop(n):
    if n == 60 and any(os.scandir({str(tmp_path)!r})):  # while it is written, not while it is read before
        os.kill(os.getpid(), signal.SIGKILL)
    return n
slow = lambda n: tf.reshape(tf.numpy_function(stop, [n], tf.int64), [])
cached_on_disk(tf.data.Dataset.range(100).map(lambda n: n), slow, {str(tmp_path)!r}, "numbers")
"""
    assert fresh_python("-c", code).returncode == -9
    assert any(tmp_path.iterdir())
    source = tf.data.Dataset.range(100)
    assert numbers(cached_on_disk(source, tf.square, str(tmp_path), "numbers")) == [n * n for n in range(100)]
    whole = cached_on_disk(source, tf.square, str(tmp_path), "numbers")
    assert numbers(whole.take(2)) == [0, 1]


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cache_dir must be writable"):
        cached_on_disk(tf.data.Dataset.range(3), tf.square, str(tmp_path / "file" / "inside"), "numbers")


@pytest.mark.parametrize("most", [10, 5000])
def test_a_limit_on_the_size_of_files_is_told_and_nothing_is_left(tmp_path, most):
    rows = tf.data.Dataset.from_tensor_slices(tf.random.normal((400, 32)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(ConfigError, match="cache_dir must be writable and have room"):
            cached_on_disk(rows, tf.square, str(tmp_path), "rows")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(tmp_path.iterdir())


def test_an_error_of_the_examples_is_not_one_of_the_disk(tmp_path):
    with pytest.raises(tf.errors.NotFoundError):
        cached_on_disk(tf.data.Dataset.range(3), lambda n: tf.io.read_file("/nowhere"), str(tmp_path), "rows")
