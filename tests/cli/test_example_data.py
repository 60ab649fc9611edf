"""Example data in files: what is read, and what is said of files that cannot be."""

import os
import signal

import numpy as np
import pytest

from tfopt.cli.example_data import find_example_data
from tfopt.data import cifar10, convert, csv, digits, imdb, mnist, numpy_files, parquet, tfrecord, tfrecord_files
from tfopt.errors import ConfigError
from tfopt.graph import freeze
from tfopt.quantization import QuantizationConfig, quantize
from tfopt.recipe import Recipe


def test_arrays_come_back(tmp_path):
    x, y = np.arange(6.0).reshape(3, 2), np.arange(3)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "xy.npz", x=x, y=y)
    np.testing.assert_array_equal(find_example_data(str(tmp_path / "x.npy")).part("train"), x)
    for part, expected in zip(find_example_data(str(tmp_path / "xy.npz")).part("train"), (x, y), strict=True):
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "packed.npz"])
@pytest.mark.parametrize("share", [0, 0.05, 0.5, 0.99])
def test_files_cut_short_are_refused(name, share, tmp_path):
    """As a full disk or a copy that broke off leaves them."""
    x = np.random.default_rng(0).random((100, 8))
    save = {"x.npy": np.save, "x.npz": np.savez, "packed.npz": np.savez_compressed}[name]
    save(tmp_path / name, x) if save is np.save else save(tmp_path / name, x=x)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(ConfigError, match=rf"must be a readable NumPy file. Received: '.*{name}' .*Write it again"):
        find_example_data(str(tmp_path / name)).part("train")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_changed_byte_is_noticed(save, tmp_path):
    save(tmp_path / "x.npz", x=np.random.default_rng(0).random((100, 8)))
    content = bytearray((tmp_path / "x.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(ConfigError, match="must be a readable NumPy file"):
        find_example_data(str(tmp_path / "x.npz")).part("train")


def test_a_recipe_gives_its_examples_and_the_score_of_its_task(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'task = "segmentation"\n[data]\nsource = "synthetic"\narguments = {examples = 100, input_shape = [4]}\n'
    )
    found = find_example_data(str(tmp_path / "mine.toml"))
    assert next(iter(found.part("test")))[0].shape == (20, 4)
    assert found.metric(None, None).name == "mean_iou"
    assert found.metric("accuracy", None) == "accuracy"
    assert found.metric(None, "regression").name == "mean_absolute_error"
    with pytest.raises(ConfigError, match="metric and task must not be given together"):
        found.metric("accuracy", "regression")
    with pytest.raises(ConfigError, match=r"Unknown task 'segmentasion'.*Did you mean 'segmentation'"):
        found.metric(None, "segmentasion")


def test_without_a_task_the_accuracy_is_meant(tmp_path):
    np.savez(tmp_path / "xy.npz", x=np.zeros((3, 2)), y=np.zeros(3))
    found = find_example_data(str(tmp_path / "xy.npz"))
    assert found.metric(None, None) == "accuracy"
    assert found.metric(None, "language_model").name == "bits_per_byte"
    with pytest.raises(ConfigError, match=r"a recipe .*digits_cnn.* or a source .*synthetic"):
        find_example_data("nothing")


READERS = {
    "x.npy": find_example_data,
    "x.npz": find_example_data,
    "rows.npy": lambda path: numpy_files(x=path, y=path),
    "a.csv": lambda path: csv(path=path, target="y"),
    "a.parquet": lambda path: parquet(path=path, target="y"),
    "a.toml": Recipe.from_toml,
    "a.keras": freeze,
    "trained.keras": lambda path: quantize(path, QuantizationConfig(training=True), calibration_data=np.zeros((8, 4))),
    "mnist.npz": lambda path: mnist(path=path),
    "cifar-10-python.tar.gz": lambda path: cifar10(path=path),
    "imdb.npz": lambda path: imdb(path=path),
    "part.tfrecord": lambda path: tfrecord_files(train=path, test=path, decode=lambda record: (record, 0), outputs=1),
}


@pytest.fixture
def no_waiting():
    """Ends a test that waits for a writer."""

    def end(*_):
        raise TimeoutError("it waits for a writer")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("name", READERS)
def test_a_pipe_in_place_of_a_file_is_refused_at_once(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=r"Received"):
        READERS[name](str(tmp_path / name))


@pytest.mark.usefixtures("no_waiting")
def test_a_pipe_in_place_of_a_shard_is_refused_at_once(tmp_path):
    convert(digits(image_size=8), tmp_path / "records")
    shard = tmp_path / "records" / "test-00000-of-00001.tfrecord"
    shard.unlink()
    os.mkfifo(shard)
    for check in ("size", "checksum", "off"):
        with pytest.raises(ConfigError, match=r"test-00000-of-00001.tfrecord', a pipe"):
            tfrecord(directory=tmp_path / "records", check=check)
