"""A cache is chosen by size against the free memory and the room on the disk, and never where it would not fit."""

import types

import psutil
import pytest
import tensorflow as tf

from tfopt.compat.tensorflow import inputs_of
from tfopt.data import Examples, caching, pipeline
from tfopt.data.caching import cache_examples, choose_cache
from tfopt.errors import ConfigError, TfoptWarning


def decode(content):
    return tf.zeros([100], tf.float32) + tf.cast(tf.strings.length(content), tf.float32), 0


def records(count=50):
    """Records of 10 bytes, each an example of 404 bytes, and 200 for each tensor."""
    return tf.data.Dataset.range(count).map(lambda number: tf.strings.as_string(number, width=10, fill="0"))


@pytest.fixture
def free(monkeypatch):
    def set_free(memory, room=0):
        monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=memory))
        monkeypatch.setattr(caching, "free_bytes", lambda cache_dir: room)

    return set_free


@pytest.mark.parametrize(
    ("memory", "room", "place"),
    [
        (60_000, 0, "memory"),
        (20_000, 30_000, "records in memory"),
        (5_000, 30_000, "disk"),
        (5_000, 20_000, "off"),
    ],
)
def test_auto_takes_the_first_place_with_room(free, memory, room, place, tmp_path):
    free(memory, room)
    choice = choose_cache(records(), decode, cache_dir=str(tmp_path))
    assert choice.place == place
    assert "the decoded examples take 39.3 KiB" in choice.reason
    assert f"{0.8 * memory / 1024:.1f} KiB may be used" in choice.reason


def test_both_parts_of_a_training_must_fit_together(free):
    free(60_000)
    assert choose_cache(records(), decode, beside=20).place == "records in memory"


def test_nothing_is_kept_of_examples_in_memory_and_of_unknown_number():
    in_memory = tf.data.Dataset.from_tensor_slices(([1, 2], [3, 4])).take(1)
    assert choose_cache(in_memory).reason == "the examples are in memory already"
    unknown = choose_cache(records().filter(lambda content: True), decode)
    assert (unknown.place, unknown.reason) == ("off", "the number of examples is unknown before they are read")
    assert choose_cache(records().repeat(), decode).reason == "the data has no end"


def test_a_place_that_is_asked_for_is_taken_or_refused(free, tmp_path):
    free(60_000, 20_000)
    assert choose_cache(records(), decode, mode="off").place == "off"
    with pytest.raises(ConfigError, match=r"cache_dir must be given with cache='disk'"):
        choose_cache(records(), decode, mode="disk")
    with pytest.raises(ConfigError, match=r"must have room .* 15.6 KiB may be used .* for 19.7 KiB"):
        choose_cache(records(), decode, mode="disk", cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs examples of known number"):
        choose_cache(records().repeat(), decode, mode="disk", cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"Unknown cache 'ram'"):
        choose_cache(records(), decode, mode="ram")


def test_examples_without_room_in_memory_are_shuffled_as_records(free):
    free(5_000)
    examples = Examples(name="strings", train=records(), test=records(1), outputs=1, decode=decode)
    with pytest.warns(TfoptWarning, match="not kept in memory"):
        kept = cache_examples(examples, "train", mode="memory")
    assert (kept.choice.place, kept.dataset.element_spec.dtype, kept.decode) == ("off", tf.string, decode)


def test_a_cache_that_counts_is_none_for_files_that_workers_share():
    strings = records().filter(lambda content: True)
    examples = Examples(name="strings", train=strings, test=strings, outputs=1)
    counting, plain = (cache_examples(examples, "train", mode="memory", may_count=count) for count in (True, False))
    assert [type(inputs_of(kept.dataset)[0]).__name__ for kept in (counting, plain)] == [
        "_ScanDataset",
        "_FilterDataset",
    ]


def test_the_pipelines_of_the_same_examples_share_a_cache():
    decoded = []

    def count(number):
        return tf.numpy_function(lambda n: decoded.append(int(n)) or n, [number], tf.int64), number

    numbers = tf.data.Dataset.range(20).map(lambda number: number)
    examples = Examples(
        name="numbers",
        train=numbers,
        test=numbers.take(1),
        outputs=1,
        decode=lambda n: (tf.reshape(n, []), count(n)[0]),
    )
    for _ in range(2):
        batches = pipeline(examples, batch_size=4, cache="memory")
        for _ in range(2):
            assert len(list(batches)) == 5
    assert len(decoded) <= 20 + 32  # the sample for its size, and once for the cache
