"""`convert` and `tfrecord`: what comes back is what was written, bit for bit, and a killed conversion goes on."""

import json
import os
import signal
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings

from tfopt.data import Examples, Scaled, Stored, convert, digits, tfrecord
from tfopt.data.records.encoding import RAW, READ_AS, flatten
from tfopt.data.records.schema import SCHEMA, read_schema
from tfopt.errors import ConfigError, ExportError

DTYPES = sorted({*RAW, *READ_AS} - {tf.bool}, key=lambda dtype: dtype.name)


def numbers(count=20, **others):
    """Examples whose input tells which record it is."""
    x = np.arange(count, dtype="float32").reshape(count, 1)
    dataset = tf.data.Dataset.from_tensor_slices((x, np.arange(count)))
    return Examples(name="numbers", train=dataset, test=dataset.take(3), outputs=count, **others)


def some_digits():
    return digits(image_size=8).limit(120)


def flat(dataset):
    return [[np.asarray(each) for each in tensors] for tensors in dataset.map(flatten).as_numpy_iterator()]


def assert_same(dataset, expected):
    first, second = flat(dataset), flat(expected)
    assert len(first) == len(second)
    for ours, theirs in zip(first, second, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.dtype == other.dtype
            assert mine.shape == other.shape
            assert mine.tolist() == other.tolist() if mine.dtype == object else mine.tobytes() == other.tobytes()


def files_of(directory):
    return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir())}


@st.composite
def structures(draw, depth=2):
    """A tensor with a first axis of three examples, or a dict or tuple of such."""
    if depth and draw(st.booleans()):
        children = draw(st.lists(structures(depth=depth - 1), min_size=1, max_size=3))
        return dict(zip("abc", children, strict=False)) if draw(st.booleans()) else tuple(children)
    kind = draw(st.sampled_from(["dense", "string", "bool", "ragged", "sparse"]))
    shape = (3, *draw(st.lists(st.integers(0, 3), max_size=2)))
    content = draw(st.binary(min_size=3 * 64, max_size=3 * 64))
    raw = np.frombuffer(content, np.uint8)
    if kind == "string":
        return tf.reshape(tf.constant([content[:i] for i in range(int(np.prod(shape)))], tf.string), shape)
    if kind == "bool":
        return np.resize(raw, shape) > 100
    if kind == "ragged":
        return tf.RaggedTensor.from_row_lengths(
            tf.RaggedTensor.from_row_lengths(raw[:6].astype("int16"), [1, 2, 0, 3]), [2, 0, 2]
        )
    if kind == "sparse":
        return tf.sparse.from_dense(np.resize(raw % 3, (3, 4)).astype("int64"))
    dtype = draw(st.sampled_from(DTYPES))
    return tf.bitcast(np.resize(raw, (*shape, dtype.size)) if dtype.size > 1 else np.resize(raw, shape), dtype)


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path):
    raw = np.arange(3 * 64, dtype="uint8")
    ragged = tf.RaggedTensor.from_row_lengths(raw[:6].astype("int16"), [1, 2, 0, 3])
    inputs = {
        "dense": tuple(tf.bitcast(raw.reshape(3, -1, dtype.size), dtype) for dtype in DTYPES if dtype.size > 1),
        "bytes": tuple(tf.bitcast(raw.reshape(3, 64), dtype) for dtype in DTYPES if dtype.size == 1),
        "string": tf.constant([b"", b"\0\xff", b"word"]),
        "ragged": tf.RaggedTensor.from_row_lengths(ragged, [2, 0, 2]),
        "sparse": tf.sparse.from_dense(raw.reshape(3, 64)[:, :4].astype("int64") % 3),
        "empty": np.zeros((3, 2, 0), "float32"),
    }
    assert_comes_back(tf.data.Dataset.from_tensor_slices((inputs, raw.reshape(3, 64) > 100)), tmp_path / "records")


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(inputs=structures(), targets=structures())
def test_any_structure_comes_back_bit_for_bit(tmp_path_factory, inputs, targets):
    assert_comes_back(tf.data.Dataset.from_tensor_slices((inputs, targets)), tmp_path_factory.mktemp("records"))


def assert_comes_back(dataset, directory):
    convert(Examples(name="any", train=dataset, test=dataset, outputs=1), directory)
    read = tfrecord(directory=directory, check="checksum")
    assert_same(read.decoded("train"), dataset)
    plain = dataset.map(lambda *each: tf.nest.map_structure(tf.identity, each))
    assert read.element_spec == plain.element_spec


def test_open_lengths_stay_open(tmp_path):
    lengths = tf.data.Dataset.range(5)
    dataset = lengths.map(lambda n: (tf.range(n), tf.fill((n, 2), "word"), tf.constant(2.0)))
    examples = Examples(name="open", train=dataset, test=dataset, outputs=1, padding=(0, "-"), ignored_target=-1)
    convert(examples, tmp_path / "a")
    read = tfrecord(directory=tmp_path / "a")
    assert read.element_spec == dataset.element_spec
    assert_same(read.decoded("train"), dataset)
    assert (read.padding, read.ignored_target) == ((0, "-"), -1)


def test_everything_about_the_examples_is_in_the_schema(tmp_path):
    examples = numbers(class_names=tuple("abc"), bytes_per_target=np.float32(1.5), notes=("One file was empty.",))
    report = convert(examples, tmp_path / "a", shards=4)
    read = tfrecord(directory=tmp_path / "a")
    for name in ("name", "outputs", "class_names", "bytes_per_target", "notes", "validation"):
        assert getattr(read, name) == getattr(examples, name)
    assert (read.size("train"), read.size("test")) == (20, 3)
    assert report.examples == {"train": 20, "test": 3}
    assert report.shards == {"train": 4, "test": 3}
    assert report.bytes == sum(path.stat().st_size for path in (tmp_path / "a").glob("*.tfrecord"))
    assert "train 20 in 4" in str(report)
    assert json.loads(report.to_json())["kept"] == 0


def test_all_examples_come_once_always_in_the_same_order(tmp_path):
    convert(numbers(70), tmp_path / "a", shards=7)
    orders = [tfrecord(directory=tmp_path / "a").y_train.tolist() for _ in range(2)]
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(70))
    assert tfrecord(directory=tmp_path / "a", files_at_a_time=1).y_train.tolist() == list(range(70))


def test_the_decode_function_of_the_source_is_not_needed(tmp_path):
    examples = numbers(decode=lambda x, y: (x * 2 + tf.cast(y, tf.float32), y))
    convert(examples, tmp_path / "a")
    assert_same(tfrecord(directory=tmp_path / "a").decoded("train"), examples.decoded("train"))


@pytest.mark.slow
def test_small_records_stay_small(tmp_path):
    """A source may say that its uint8 records are stored instead of its float32 examples."""
    x, y = np.arange(2000, dtype="uint8").reshape(20, 100), np.arange(20)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))

    def source(stored):
        return Examples(
            name="pixels",
            train=dataset,
            test=dataset,
            outputs=20,
            decode=lambda x, y: (tf.cast(x, tf.float32) / 255, y),
            stored=stored,
        )

    stored = Stored(read=lambda x, y: ("", x, y), inputs=Scaled(divisor=255))
    small, large = (convert(source(each), tmp_path / str(i)).bytes for i, each in enumerate((stored, None)))
    assert large > 2.5 * small
    for i in range(2):
        assert_same(tfrecord(directory=tmp_path / str(i)).decoded("test"), source(stored).decoded("test"))
    # Other shards of the same files: the examples are still small.
    convert(tfrecord(directory=tmp_path / "0"), tmp_path / "again", shards=2)
    assert_same(
        tfrecord(directory=tmp_path / "again", files_at_a_time=1).decoded("test"), dataset.map(source(stored).decode)
    )


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_the_same_examples_give_the_same_files(tmp_path, compression):
    for name in "ab":
        convert(some_digits(), tmp_path / name, shards=3, compression=compression)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    read = tfrecord(directory=tmp_path / "a", files_at_a_time=1, check="checksum")
    assert_same(read.decoded("train"), some_digits().decoded("train"))


def test_a_second_call_writes_nothing(tmp_path):
    convert(numbers(), tmp_path / "a", shards=2)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("*.tfrecord")}
    assert convert(numbers(), tmp_path / "a", shards=2).kept == 4
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("*.tfrecord")} == before


def test_a_damaged_or_missing_file_is_written_again(tmp_path):
    convert(numbers(), tmp_path / "a", shards=3)
    before = files_of(tmp_path / "a")
    (tmp_path / "a/train-00001-of-00003.tfrecord").write_bytes(b"damaged")
    (tmp_path / "a/test-00000-of-00003.tfrecord").unlink()
    assert convert(numbers(), tmp_path / "a", shards=3).kept == 4
    assert files_of(tmp_path / "a") == before


@pytest.mark.parametrize(
    "other", [numbers(21), numbers(class_names=("a",)), numbers(decode=lambda x, y: (tf.cast(x, tf.float64), y))]
)
def test_another_source_is_refused(tmp_path, other):
    convert(numbers(), tmp_path / "a", shards=2)
    before = files_of(tmp_path / "a")
    with pytest.raises(ConfigError, match="must be the one that the files were written from"):
        convert(other, tmp_path / "a", shards=2)
    assert files_of(tmp_path / "a") == before
    convert(other, tmp_path / "a", shards=2, overwrite=True)
    assert_same(tfrecord(directory=tmp_path / "a", files_at_a_time=1).decoded("train"), other.decoded("train"))


def test_a_source_with_other_records_is_refused(tmp_path):
    convert(numbers(), tmp_path / "a", shards=2)
    changed = numbers()
    object.__setattr__(changed, "train", changed.train.map(lambda x, y: (tf.where(y == 15, x + 1, x), y)))
    with pytest.raises(ConfigError, match=r"train-00001-of-00002.tfrecord was written from other records"):
        convert(changed, tmp_path / "a", shards=2)


def test_other_files_in_the_directory_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"holds notes.txt"):
            convert(numbers(), tmp_path, overwrite=overwrite)
    assert files_of(tmp_path) == {"notes.txt": b"mine"}


def test_a_part_without_an_end_or_with_unknown_size(tmp_path):
    def parts(dataset):
        return Examples(name="parts", train=dataset, test=numbers().test, outputs=1)

    with pytest.raises(ConfigError, match="must have an end"):
        convert(parts(numbers().train.repeat()), tmp_path / "a")
    assert convert(parts(numbers().train.filter(lambda x, y: y < 7)), tmp_path / "b").examples["train"] == 7
    lying = numbers().train.take(5).apply(tf.data.experimental.assert_cardinality(9))
    with pytest.raises(ConfigError, match="record 5 of the train part"):
        convert(parts(lying), tmp_path / "c")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"shards": 0}, "shards=0"), ({"shards": 2.5}, "shards=2.5"), ({"compression": "ZIP"}, "compression='ZIP'")],
)
def test_wrong_settings(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        convert(numbers(), tmp_path / "a", **options)


def test_what_cannot_be_written_is_refused(tmp_path):
    strange = tf.data.Dataset.from_tensors((tf.constant(1, tf.dtypes.experimental.int4), 1))
    with pytest.raises(ConfigError, match="inputs of dtype int4"):
        convert(Examples(name="strange", train=strange, test=strange, outputs=1), tmp_path / "a")
    nested = tf.data.Dataset.range(1).map(lambda x: (tf.data.Dataset.range(x), x))
    with pytest.raises(ConfigError, match="inputs of type DatasetSpec"):
        convert(Examples(name="nested", train=nested, test=nested, outputs=1), tmp_path / "a")
    with pytest.raises(ConfigError, match="must be text in UTF-8"):
        convert(numbers(), os.fsdecode(bytes(tmp_path / "b") + b"\xff"))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_finished_files(tmp_path):
    """A limit on the size of files stands for the full disk."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(ExportError, match=r"train-00000-of-00001.tfrecord"):
            convert(some_digits(), tmp_path / "a", shards=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not (tmp_path / "a").exists()  # it was empty
    convert(some_digits(), tmp_path / "a", shards=1)
    assert tfrecord(directory=tmp_path / "a", check="checksum").size("train") == 120


def test_progress_counts_to_the_end(tmp_path):
    seen = []
    convert(numbers(), tmp_path / "a", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, 23) for i in range(23)]
    convert(numbers(), tmp_path / "a", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (23, 23)


SLOW = """
import sys, time
import tensorflow as tf
from tfopt.data import convert, digits

def wait(done, total):
    if done in (500, 1200):
        print(done, flush=True)
        time.sleep(60)

convert(digits(image_size=8), sys.argv[1], shards=5, progress=wait if len(sys.argv) > 2 else None)
"""


@pytest.mark.slow
def test_a_killed_conversion_goes_on_and_gives_the_same_files(tmp_path, fresh_python):
    convert(digits(image_size=8), tmp_path / "whole", shards=5)
    with fresh_python.running("-c", SLOW, tmp_path / "killed", "wait") as process:
        assert process.stdout.readline() == "500\n"
        time.sleep(0.2)
    left = {path.name for path in (tmp_path / "killed").iterdir()}
    assert "train-00000-of-00005.tfrecord" in left
    assert "unfinished.json" in left
    assert any(name.startswith(".train-00001-of-00005.tfrecord.tfopt-") for name in left)
    with pytest.raises(ConfigError, match="not finished"):
        tfrecord(directory=tmp_path / "killed")
    assert convert(digits(image_size=8), tmp_path / "killed", shards=5).kept == 1
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def test_shards_have_the_usual_size_and_differ_by_one_record_at_most(tmp_path, monkeypatch):
    def counts(name):
        return [shard.records for shard in read_schema(tmp_path / name / SCHEMA).parts["train"]]

    convert(numbers(), tmp_path / "one")
    assert counts("one") == [20]
    convert(numbers(), tmp_path / "three", shards=3)
    assert sorted(counts("three")) == [6, 7, 7]
    monkeypatch.setattr("tfopt.data.records.convert.SHARD_BYTES", 200)
    convert(numbers(), tmp_path / "small")
    bytes_of_shards = [path.stat().st_size for path in (tmp_path / "small").glob("train-*")]
    assert 3 < len(bytes_of_shards) < 20
    assert max(bytes_of_shards) < 400
