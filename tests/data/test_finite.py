"""Values that are not finite: named in arrays, and found in batches as they pass."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfopt.data import Examples, arrays, convert, numpy_files, pipeline, tfrecord
from tfopt.errors import ConfigError

ROWS = 60
LABELS = np.arange(ROWS) % 3


def rows(value=None, dtype="float32"):
    x = np.random.default_rng(0).random((ROWS, 4)).astype(dtype)
    if value is not None:
        x[[17, 40], 3] = value
    return x


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float32"), (-np.inf, "float16"), (1e39, "float64")])
def test_rows_of_arrays_and_files_are_named(value, dtype, tmp_path):
    x, found = rows(value, dtype), rf"2 of {ROWS} rows that are not: the first is row 17 .* at \[3\]"
    with pytest.raises(ConfigError, match=rf"^x must hold finite .* {found}"):
        arrays(x, LABELS)
    with pytest.raises(ConfigError, match=rf"^x\['b'\] must .* {found}"):
        arrays({"a": rows(), "b": x}, LABELS)
    with pytest.raises(ConfigError, match=r"^y must .* the first is row 17"):
        arrays(rows(), x)
    kept = arrays(x, LABELS, check_finite=False)
    assert sum(int((part[:, 3] == x[17, 3]).sum() + np.isnan(part).sum()) for part in (kept.x_train, kept.x_test)) == 2
    for name, array in {"bad": x, "good": rows(), "labels": LABELS}.items():
        np.save(tmp_path / f"{name}.npy", array)
    bad, good, labels = (tmp_path / f"{name}.npy" for name in ("bad", "good", "labels"))
    for files in (
        {"x": bad, "y": labels},
        {"x": {"a": good, "b": bad}, "y": labels},
        {"x": good, "y": bad},
        {"x": good, "y": good, "x_test": good, "y_test": bad} if dtype == "float32" else {"x": bad, "y": good},
    ):
        with pytest.raises(ConfigError, match=rf"bad.npy' must hold finite .* {found}"):
            numpy_files(**files)
    assert numpy_files(x=bad, y=labels, check_finite=False).size("train") == ROWS * 0.8


def test_cells_without_a_number_are_refused():
    masked = np.ma.masked_greater(rows(), 0.9)
    for x, name in ((masked, "x"), ({"a": rows(), "b": masked}, r"x\['b'\]")):
        with pytest.raises(ConfigError, match=rf"^{name} must hold a value in every cell. .* masked cells"):
            arrays(x, LABELS)
    assert arrays(np.ma.masked_greater(rows(), 2), LABELS).size("train") == ROWS * 0.8  # nothing is masked
    with pytest.raises(ConfigError, match=r"x must hold numbers or strings. Received: dtype object"):
        arrays(rows().astype(object), LABELS)
    assert arrays(np.array(["a", b"b", "c"] * 20, object), LABELS).size("train") == ROWS * 0.8


def test_rows_of_large_files_are_looked_at_when_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("tfopt.data.files.numpy_files.LARGEST_CHECK_BYTES", 100)
    np.save(tmp_path / "x.npy", rows(np.nan))
    np.save(tmp_path / "y.npy", LABELS)
    examples = numpy_files(x=tmp_path / "x.npy", y=tmp_path / "y.npy")
    both = examples.train.concatenate(examples.test)
    with pytest.raises(tf.errors.OpError, match=r"x.npy' must hold finite .* the first is row (17|40) .* with nan"):
        list(both)


def test_batches_are_looked_at_as_they_pass(tmp_path):
    weights = np.ones(ROWS, np.float32)
    weights[[5, 6]] = np.inf
    for part, example in {
        "inputs": ({"a": rows(), "b": rows(np.nan)}, LABELS),
        "targets": (rows(), rows(1e39, "float64")),
        "sample weights": (rows(), LABELS, weights),
    }.items():
        dataset = tf.data.Dataset.from_tensor_slices(example)
        examples = Examples(name="own", train=dataset, test=dataset, outputs=3)
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=rf"The {part} of .*own.* must be finite.*\[(2|{ROWS})\]"
        ):
            list(pipeline(examples, batch_size=ROWS, training=part == "targets", cache="off"))
    unchecked = Examples(name="own", train=dataset, test=dataset, outputs=3, check_finite=False)
    assert len(list(pipeline(unchecked, batch_size=ROWS, training=False, cache="off"))) == 1


def test_records_are_looked_at_as_they_pass(tmp_path):
    convert(arrays(rows(np.nan), LABELS, check_finite=False), tmp_path / "records")
    records = tfrecord(directory=tmp_path / "records")
    records = dataclasses.replace(records, test=records.test.concatenate(records.train))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be finite"):
        list(pipeline(records, batch_size=ROWS, training=False, cache="off"))


def test_a_sum_that_is_too_large_is_no_reason():
    dataset = tf.data.Dataset.from_tensor_slices((np.full((8, 2), 3e38, np.float32), np.full((8, 1), 6e4, np.float16)))
    examples = Examples(name="large", train=dataset, test=dataset, outputs=1)
    assert len(list(pipeline(examples, batch_size=4))) == 2


def test_class_numbers_have_an_output(tmp_path):
    with pytest.raises(ConfigError, match=r"y must hold class numbers from 0 to 1. Received: 20 of 60 .*: 2 in row 2"):
        arrays(rows(), LABELS, outputs=2)
    with pytest.raises(ConfigError, match=r"from 0 to 1"):
        arrays(rows(), LABELS, class_names=("a", "b"))
    for name, array in {"x": rows(), "y": LABELS, "other": LABELS + 1}.items():
        np.save(tmp_path / f"{name}.npy", array)
    x, y, other = (tmp_path / f"{name}.npy" for name in ("x", "y", "other"))
    with pytest.raises(ConfigError, match=r"other.npy' must hold class numbers from 0 to 2"):
        numpy_files(x=x, y=y, x_test=x, y_test=other)
    with pytest.raises(ConfigError, match=r"y.npy' must hold class numbers from 0 to 1"):
        numpy_files(x=x, y=y, outputs=2)
    assert arrays(rows(), LABELS, outputs=5).outputs == 5
