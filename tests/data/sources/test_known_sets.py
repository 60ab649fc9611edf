"""Known data sets from their original archives: small data in the real formats, read by the real code."""

import gzip
import io
import os
import pickle
import struct
import tarfile

import numpy as np
import pytest

from tfopt.data import cifar10, cifar100, fashion_mnist, imdb, mnist
from tfopt.errors import ConfigError

GENERATOR = np.random.default_rng(0)
GREY = GENERATOR.integers(0, 256, (60, 28, 28), dtype=np.uint8)
COLOUR = GENERATOR.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
LABELS = (np.arange(60) % 10).astype(np.uint8)


def idx(values):
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape) + values.tobytes()


@pytest.fixture
def idx_folder(tmp_path):
    for name, values in (
        ("train-images-idx3-ubyte", GREY[:40]),
        ("train-labels-idx1-ubyte", LABELS[:40]),
        ("t10k-images-idx3-ubyte", GREY[40:]),
        ("t10k-labels-idx1-ubyte", LABELS[40:]),
    ):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
    return tmp_path


def assert_same_examples(examples, part, images, labels):
    """The part holds each image once, with its label, in another order."""
    x, y = examples.arrays(part)
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    order = {image.tobytes(): number for number, image in enumerate(images)}
    numbers = [order[image.tobytes()] for image in np.round(x * 255).astype(np.uint8)]
    assert sorted(numbers) == list(range(len(images)))
    assert numbers != sorted(numbers)
    np.testing.assert_array_equal(y, labels[numbers])


@pytest.mark.parametrize("source", [mnist, fashion_mnist])
def test_the_four_files_of_mnist(source, idx_folder):
    examples = source(path=idx_folder)
    assert_same_examples(examples, "train", GREY[:40, ..., None], LABELS[:40])
    assert_same_examples(examples, "test", GREY[40:, ..., None], LABELS[40:])
    assert (examples.outputs, len(examples.class_names), examples.validation) == (10, 10, None)
    packed = idx_folder / "train-images-idx3-ubyte.gz"
    (idx_folder / "train-images-idx3-ubyte").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    parted = source(path=idx_folder, validation_fraction=0.25)
    assert (parted.size("train"), parted.size("validation")) == (30, 10)


def test_the_file_of_keras(tmp_path):
    np.savez(tmp_path / "mnist.npz", x_train=GREY[:40], y_train=LABELS[:40], x_test=GREY[40:], y_test=LABELS[40:])
    assert_same_examples(mnist(path=tmp_path / "mnist.npz"), "train", GREY[:40, ..., None], LABELS[:40])
    content = bytearray((tmp_path / "mnist.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "mnist.npz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"path must be Keras' mnist.npz, whole and unchanged"):
        mnist(path=tmp_path / "mnist.npz")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda packed: packed[: len(packed) // 2], "end-of-stream"),
        (lambda packed: packed[:-9] + bytes([packed[-9] ^ 1]) + packed[-8:], "Received"),
        (lambda packed: b"", "begins with"),
        (lambda packed: gzip.compress(idx(GREY[:40])[:-5]), "its shape is (40, 28, 28)"),
        (lambda packed: gzip.compress(idx(LABELS)), "begins with 00000801"),
        (lambda packed: gzip.compress(idx(GREY[:39])), "39 examples and 40 labels"),
    ],
)
def test_damaged_idx_files_are_named(damage, words, idx_folder):
    file = idx_folder / "train-images-idx3-ubyte.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError) as caught:
        mnist(path=idx_folder)
    assert words in str(caught.value)
    assert "39" in words or str(file) in str(caught.value)
    file.unlink()
    with pytest.raises(ConfigError, match=r"path must be a folder of train-images-idx3-ubyte.gz"):
        mnist(path=idx_folder)


def rows(images):
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def write_tar(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def cifar10_members(kind):
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    members = {}
    for number, name in enumerate(names):
        images, labels = COLOUR[number * 10 : number * 10 + 10], LABELS[number * 10 : number * 10 + 10]
        if kind == "binary":
            members[f"cifar-10-batches-bin/{name}.bin"] = np.column_stack([labels, rows(images)]).tobytes()
        else:
            content = {b"data": rows(images), b"labels": labels.tolist()}
            members[f"cifar-10-batches-py/{name}"] = pickle.dumps(content, protocol=2)
    return members


@pytest.mark.parametrize("kind", ["python", "binary", "folder"])
def test_the_archives_of_cifar10(kind, tmp_path):
    path = write_tar(tmp_path / f"cifar-10-{kind}.tar.gz", cifar10_members(kind))
    if kind == "folder":
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path, filter="data")
        path = tmp_path / "cifar-10-batches-py"
    examples = cifar10(path=path)
    assert_same_examples(examples, "train", COLOUR[:50], LABELS[:50])
    assert_same_examples(examples, "test", COLOUR[50:], LABELS[50:])
    assert examples.class_names[3] == "cat"


@pytest.mark.parametrize("kind", ["python", "binary"])
def test_the_archives_of_cifar100(kind, tmp_path):
    members = {}
    for name, part in (("train", slice(0, 40)), ("test", slice(40, 60))):
        fine, coarse = LABELS[part] * 7, LABELS[part]
        if kind == "binary":
            content = np.column_stack([coarse, fine, rows(COLOUR[part])]).astype(np.uint8)
            members[f"cifar-100-binary/{name}.bin"] = content.tobytes()
        else:
            content = {b"data": rows(COLOUR[part]), b"fine_labels": fine.tolist(), b"coarse_labels": coarse.tolist()}
            members[f"cifar-100-python/{name}"] = pickle.dumps(content, protocol=2)
    examples = cifar100(path=write_tar(tmp_path / "cifar-100.tar.gz", members))
    assert_same_examples(examples, "train", COLOUR[:40], LABELS[:40] * 7)
    assert examples.outputs == 100


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/pickled_code_was_run",)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("data_batch_2", pickle.dumps(Evil()), "only NumPy arrays are read"),
        ("data_batch_2", pickle.dumps({b"data": rows(COLOUR[:10])}), "holds no data and labels"),
        ("data_batch_2", pickle.dumps({b"data": rows(COLOUR[:10])[:, 1:], b"labels": [0] * 10}), "shape (10, 3071)"),
        ("data_batch_2", pickle.dumps({b"data": rows(COLOUR[:10]), b"labels": [0] * 9}), "50 examples and 49 labels"),
        ("data_batch_2", pickle.dumps({b"data": rows(COLOUR[:10]), b"labels": [10] * 10}), "0 to 10"),
        ("data_batch_2", b"", "Ran out of input"),
        ("data_batch_9", b"", "it holds no data_batch_2"),
    ],
)
def test_damaged_batches_of_cifar_are_named(name, content, words, tmp_path):
    members = cifar10_members("python")
    del members["cifar-10-batches-py/data_batch_2"]
    path = write_tar(tmp_path / "cifar-10-python.tar.gz", {**members, f"cifar-10-batches-py/{name}": content})
    with pytest.raises(ConfigError) as caught:
        cifar10(path=path)
    assert words in str(caught.value)
    assert not os.path.exists("/tmp/pickled_code_was_run")  # noqa: PTH110


def test_an_archive_cut_short_is_named(tmp_path):
    path = write_tar(tmp_path / "cifar-10-python.tar.gz", cifar10_members("python"))
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(ConfigError, match=r"path must be cifar-10-python.tar.gz, .* whole and unchanged"):
        cifar10(path=path)


REVIEWS = {
    "train/pos": ["A good film, a good day.<br /><br />Good!", "good and fine"],
    "train/neg": ["A bad film", "It's bad, bad"],
    "test/pos": ["a fine film"],
    "test/neg": ["an awful film"],
}


@pytest.fixture
def reviews(tmp_path):
    members = {
        f"aclImdb/{part}/{n}_7.txt": text.encode() for part, texts in REVIEWS.items() for n, text in enumerate(texts)
    }
    members["aclImdb/train/unsup/0_0.txt"] = b"not counted"
    return write_tar(tmp_path / "aclImdb_v1.tar.gz", members)


def test_reviews_are_numbered_by_the_frequency_of_their_words(reviews, tmp_path):
    examples = imdb(path=reviews)
    assert (examples.padding, examples.outputs, examples.input_shape) == ((0, 0), 2, (None,))
    # How often in the training part: good 4, a 3, bad 3, film 2, then and, day, fine, it's; numbers begin at 4.
    words = {"good": 4, "a": 5, "bad": 6, "film": 7, "and": 8, "day": 9, "fine": 10, "it's": 11}
    found = {(tuple(map(int, review)), int(label)) for review, label in examples.decoded("train")}
    assert ((1, *(words[each] for each in ("a", "good", "film", "a", "good", "day", "good"))), 1) in found
    assert ((1, words["it's"], words["bad"], words["bad"]), 0) in found
    assert [list(map(int, review)) for review, label in examples.decoded("test") if label == 0] == [[1, 12, 12, 7]]
    few = imdb(path=reviews, num_words=6, length=3)
    assert {tuple(map(int, review)) for review, _ in few.decoded("train")} == {
        (1, 5, 4),
        (1, 4, 2),
        (1, 5, 2),
        (1, 2, 2),
    }
    with tarfile.open(reviews) as archive:
        archive.extractall(tmp_path, filter="data")
    again = imdb(path=tmp_path / "aclImdb")
    assert {(tuple(map(int, review)), int(label)) for review, label in again.decoded("train")} == found


def test_the_reviews_of_keras(tmp_path):
    x = np.array([[1, 2, 3], [4, 5], [6], [7, 8]], dtype=object)
    np.savez(tmp_path / "imdb.npz", x_train=x, y_train=np.array([0, 1, 0, 1]), x_test=x, y_test=np.array([1, 0, 1, 0]))
    examples = imdb(path=tmp_path / "imdb.npz")
    found = {(tuple(map(int, review)), int(label)) for review, label in examples.decoded("train")}
    assert found == {((1, 4, 5, 6), 0), ((1, 7, 8), 1), ((1, 9), 0), ((1, 10, 11), 1)}
    np.savez(tmp_path / "evil.npz", x_train=np.array([Evil()]), y_train=x, x_test=x, y_test=x)
    with pytest.raises(ConfigError, match="only NumPy arrays are read"):
        imdb(path=tmp_path / "evil.npz")
    np.savez(tmp_path / "part.npz", x_train=x)
    with pytest.raises(ConfigError, match="y_train"):
        imdb(path=tmp_path / "part.npz")


def test_missing_reviews_are_named(tmp_path):
    empty = write_tar(tmp_path / "aclImdb_v1.tar.gz", {"aclImdb/train/pos/0_7.txt": b"good"})
    with pytest.raises(ConfigError, match="it holds no reviews in train/neg, test/neg, test/pos"):
        imdb(path=empty)


@pytest.mark.parametrize("source", [mnist, fashion_mnist, cifar10, cifar100, imdb])
def test_without_a_network_the_error_names_the_archive(source, monkeypatch, tmp_path):
    """The proxy refuses every connection, as a machine without a network does."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(ConfigError, match=rf"{source.__name__} needs its data: .* Fetch .*\.gz.* path="):
        source()
