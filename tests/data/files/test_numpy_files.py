"""Arrays in .npy files: the rows are read from the file, each once, and damaged files are named."""

import numpy as np
import pytest
import tensorflow as tf

from tfopt.data import arrays, numpy_files
from tfopt.errors import ConfigError


@pytest.fixture
def files(tmp_path):
    generator = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", generator.random((300, 4, 2), dtype=np.float32))
    np.save(tmp_path / "y.npy", np.arange(300) % 3)
    return {"x": tmp_path / "x.npy", "y": tmp_path / "y.npy"}


def test_every_row_comes_once_with_its_target(files):
    examples = numpy_files(**files, validation_fraction=0.1)
    x, y = np.load(files["x"]), np.load(files["y"])
    order = {row.tobytes(): number for number, row in enumerate(x)}
    seen = []
    for part, size in (("train", 210), ("validation", 30), ("test", 60)):
        assert examples.size(part) == size
        inputs, targets = examples.arrays(part)
        numbers = [order[row.tobytes()] for row in inputs]
        np.testing.assert_array_equal(y[numbers], targets)
        assert np.bincount(targets).tolist() == [size // 3] * 3
        assert numbers != sorted(numbers)
        seen += numbers
    assert sorted(seen) == list(range(300))
    assert (examples.outputs, examples.input_shape) == (3, (4, 2))
    np.testing.assert_array_equal(examples.x_train, numpy_files(**files, validation_fraction=0.1).x_train)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float16", "float64", "bool"])
def test_types_stay_but_float64(dtype, tmp_path):
    x = (np.arange(60).reshape(20, 3) % 2).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.zeros((20, 5)))
    examples = numpy_files(x=tmp_path / "x.npy", y=tmp_path / "y.npy", test_fraction=0.5)
    assert examples.x_train.dtype == ("float32" if dtype == "float64" else dtype)
    assert (examples.y_train.dtype, examples.outputs) == ("float32", 5)


def test_files_of_a_test_part_and_several_inputs(files, tmp_path):
    np.save(tmp_path / "z.npy", np.arange(300.0))
    x = {"a": files["x"], "b": tmp_path / "z.npy"}
    examples = numpy_files(x=x, y=files["y"], x_test=x, y_test=files["y"])
    assert examples.input_shape == {"a": (4, 2), "b": ()}
    assert (examples.size("train"), examples.size("test")) == (300, 300)
    with pytest.raises(ConfigError, match="must be given together"):
        numpy_files(**files, x_test=files["x"])
    with pytest.raises(ConfigError, match="rows of one shape and type"):
        numpy_files(**files, x_test=tmp_path / "z.npy", y_test=files["y"])


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array(["a", "b"] * 150), "dtype <U1"),
        (np.array([object()] * 300), "Python objects in dtype"),
        (np.zeros((300, 3), ">f4"), "native byte order"),
        (np.asfortranarray(np.zeros((300, 3))), "Fortran order"),
        (np.float32(3), "shape ()"),
        (np.zeros((300, 0)), r"shape (300, 0)"),
        (np.zeros((299, 3)), "299 in "),
    ],
)
def test_arrays_that_hold_no_rows_of_numbers_are_refused(array, words, files):
    np.save(files["x"], array, allow_pickle=True)
    with pytest.raises(ConfigError) as caught:
        numpy_files(**files)
    assert words in str(caught.value)
    assert str(files["x"]) in str(caught.value)


@pytest.mark.parametrize("share", [0, 0.005, 0.5, 0.99])
def test_files_cut_short_are_refused(share, files):
    content = files["x"].read_bytes()
    files["x"].write_bytes(content[: int(share * len(content))])
    with pytest.raises(ConfigError, match=r"must be whole .npy files of numbers. Received: .*x.npy"):
        numpy_files(**files)


@pytest.mark.parametrize("place", [8, 10, 20, 30, 60])
def test_files_with_a_damaged_header_are_refused(place, files):
    content = bytearray(files["x"].read_bytes())
    content[place] ^= 4  # of place 8, the length of the header: all numbers would move by one
    files["x"].write_bytes(content)
    with pytest.raises(ConfigError, match=r"Received: .*x.npy"):
        numpy_files(**files)


def test_bytes_behind_the_array_are_refused(files):
    with files["x"].open("ab") as file:  # a second array in the same file
        np.save(file, np.zeros((300, 4, 2), np.float32))
    with pytest.raises(ConfigError, match=r"x.npy' with 9,728 more bytes: .* Save each array in a file of its own"):
        numpy_files(**files)


def test_a_missing_file_and_another_kind_are_refused(files, tmp_path):
    with pytest.raises(ConfigError, match=r"must exist. Received: .*gone.npy"):
        numpy_files(x=tmp_path / "gone.npy", y=files["y"])
    np.savez(tmp_path / "x.npz", x=np.zeros((300, 2)))
    with pytest.raises(ConfigError, match=r"a .npz file"):
        numpy_files(x=tmp_path / "x.npz", y=files["y"])
    np.save(tmp_path / "negative.npy", np.full(300, -1))
    with pytest.raises(ConfigError, match="Class numbers must be at least 0"):
        numpy_files(x=files["x"], y=tmp_path / "negative.npy")


def test_a_file_that_becomes_shorter_is_an_error_that_names_it(files):
    examples = numpy_files(**files)
    content = files["x"].read_bytes()
    files["x"].write_bytes(content[: len(content) // 2])
    with pytest.raises(tf.errors.UnknownError, match=r"x.npy' ends within row \d+: the file has become shorter"):
        examples.arrays("train")


def test_a_column_of_classes_and_masks_have_as_many_outputs_as_in_memory(files, tmp_path):
    np.save(tmp_path / "c.npy", np.load(files["y"])[:, None])
    column, masks = np.load(files["y"])[:, None], np.arange(300 * 35).reshape(300, 7, 5) % 4
    for y, outputs in ((column, 3), (masks, 4)):
        np.save(tmp_path / "y.npy", y)
        examples = numpy_files(**files)
        assert examples.outputs == arrays(np.zeros(300), y).outputs == outputs
        assert examples.y_train.shape[1:] == y.shape[1:]
    assert np.bincount(numpy_files(x=files["x"], y=files["x"].with_name("c.npy")).y_test[:, 0]).tolist() == [20] * 3


@pytest.mark.parametrize("dtype", ["longdouble", "datetime64[D]", "i4,f4"])
def test_types_that_tensorflow_does_not_have_are_refused(dtype, files):
    values = np.zeros(300, dtype)
    np.save(files["x"], values)
    with pytest.raises(ConfigError, match="must hold rows of numbers"):
        numpy_files(**files)
    with pytest.raises(ConfigError, match="x must hold numbers or strings"):
        arrays(values, np.arange(300) % 3)
