"""Data set hubs: small data in their real formats, written by their own writers and read by their own code."""

import sys

import datasets
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets
from PIL import Image

from tfopt.data import huggingface, tfds
from tfopt.errors import ConfigError

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.integers(0, 256, (50, 12, 10, 3), dtype=np.uint8)


class TinyPhotos(tensorflow_datasets.core.GeneratorBasedBuilder):
    """Fifty images, each with its number."""

    VERSION = tensorflow_datasets.core.Version("1.0.0")

    def _info(self):
        features = {
            "image": tensorflow_datasets.features.Image(shape=(12, 10, 3)),
            "label": tensorflow_datasets.features.ClassLabel(names=["a", "b", "c"]),
            "caption": tensorflow_datasets.features.Text(),
            "box": tensorflow_datasets.features.Tensor(shape=(4,), dtype=np.float32),
            "words": tensorflow_datasets.features.Sequence(np.int32),
        }
        return tensorflow_datasets.core.DatasetInfo(
            builder=self,
            features=tensorflow_datasets.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager):
        parts = {"train": range(40), "test": range(40, 50), "extra": range(45, 50)}
        return {name: self._generate_examples(numbers) for name, numbers in parts.items()}

    def _generate_examples(self, numbers):
        for number in numbers:
            yield (
                number,
                {
                    "image": IMAGES[number],
                    "label": number % 3,
                    "caption": f"image {number}",
                    "box": np.full(4, number, np.float32),
                    "words": [1] * (number % 4),
                },
            )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tfds")
    builder = TinyPhotos(data_dir=str(directory))
    builder.download_and_prepare(
        download_config=tensorflow_datasets.download.DownloadConfig(compute_stats="skip", try_download_gcs=False)
    )
    return directory, builder.data_dir


def numbers_of(images):
    order = {image.tobytes(): number for number, image in enumerate(IMAGES)}
    return [order[image.tobytes()] for image in np.round(np.asarray(images) * 255).astype(np.uint8)]


@pytest.mark.slow
def test_tfds_reads_what_tfds_wrote(prepared):
    examples = tfds(name="tiny_photos", data_dir=prepared[0])
    assert (examples.outputs, examples.class_names, examples.input_shape) == (3, ("a", "b", "c"), (12, 10, 3))
    assert (examples.size("train"), examples.size("test"), examples.validation) == (40, 10, None)
    parts = {part: examples.arrays(part) for part in ("train", "test")}
    for part, expected in (("train", range(40)), ("test", range(40, 50))):
        images, labels = parts[part]
        assert sorted(numbers_of(images)) == list(expected)
        np.testing.assert_array_equal(np.array(numbers_of(images)) % 3, labels)
    assert examples.train.element_spec[0].dtype == tf.string  # encoded until after the shuffle
    np.testing.assert_array_equal(tfds(name=prepared[1]).x_train, parts["train"][0])  # by its directory


def test_another_split_of_tfds_is_for_testing(prepared):
    examples = tfds(name=prepared[1], test_split="extra")
    assert (examples.size("train"), sorted(numbers_of(examples.x_test))) == (40, list(range(45, 50)))
    for name in ("train", "tset"):
        with pytest.raises(ConfigError, match=rf"test_split must be .* Received: test_split='{name}', .*'extra'"):
            tfds(name=prepared[1], test_split=name)


def test_other_features_and_shares_of_tfds(prepared):
    texts = tfds(name=prepared[1], inputs="caption", targets="box", length=9, validation_fraction=0.25)
    assert [texts.size(part) for part in ("train", "validation", "test")] == [30, 10, 10]
    text, box = next(texts.decoded("train").as_numpy_iterator())
    assert bytes(text.astype(np.uint8).tolist()).rstrip(b"\0").decode() == f"image {int(box[0])}"
    assert (texts.outputs, box.shape) == (4, (4,))
    assert tfds(name=prepared[1], image_size=(6, 5)).input_shape == (6, 5, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"inputs": "words"}, "Features must be images, text, classes or numbers"),
        ({"targets": "boxes"}, "its features are 'box', 'caption'"),
        ({"inputs": "label"}, "inputs must name images"),
        ({"targets": "image"}, "targets must name classes or numbers"),
        ({"validation_fraction": 0.9}, "validation_fraction must be"),
    ],
)
def test_features_that_do_not_fit_are_refused(arguments, words, prepared):
    with pytest.raises(ConfigError, match=words):
        tfds(name=prepared[1], **arguments)


def test_tfds_that_cannot_be_read_is_named(prepared, tmp_path):
    with pytest.raises(ConfigError, match="name must be a data set that is prepared, with download=False"):
        tfds(name="tiny_photos", data_dir=tmp_path, download=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"name must be a data set that TFDS can read. Received: .*empty"):
        tfds(name=tmp_path / "empty")


@pytest.fixture
def table():
    return datasets.Dataset.from_dict(
        {
            "text": [f"text {number}" for number in range(40)],
            "label": [number % 4 for number in range(40)],
            "kind": [("rose", "iris")[number % 2] for number in range(40)],
            "numbers": [[float(number), 1.0] for number in range(40)],
        }
    )


def test_huggingface_reads_saved_data(table, tmp_path):
    table.cast_column("label", datasets.ClassLabel(names=["a", "b", "c", "d"])).save_to_disk(tmp_path / "saved")
    examples = huggingface(name=tmp_path / "saved", length=8, validation_fraction=0.1)
    assert [examples.size(part) for part in ("train", "validation", "test")] == [28, 4, 8]
    assert (examples.outputs, examples.class_names) == (4, ("a", "b", "c", "d"))
    seen = []
    for part in ("train", "validation", "test"):
        for text, label in zip(*examples.arrays(part), strict=True):
            number = int(bytes(text.astype(np.uint8).tolist()).rstrip(b"\0").decode().removeprefix("text "))
            assert label == number % 4
            seen.append(number)
        assert sorted(seen) != seen
    assert sorted(seen) == list(range(40))


def test_huggingface_reads_parquet_files(table, tmp_path):
    table.to_parquet(tmp_path / "train.parquet")
    table.select(range(10)).to_parquet(tmp_path / "test.parquet")
    files = {part: str(tmp_path / f"{part}.parquet") for part in ("train", "test")}
    arguments = {"name": "parquet", "data_files": files}
    values = huggingface(**arguments, inputs="numbers", targets="kind")
    assert (values.size("train"), values.size("test"), values.class_names) == (40, 10, ("iris", "rose"))
    x, y = values.arrays("train")
    assert (x.shape, x.dtype) == ((40, 2), np.float32)
    np.testing.assert_array_equal(y, 1 - x[:, 0] % 2)
    assert huggingface(**arguments, inputs="text").outputs == 4


def test_images_of_huggingface(tmp_path):
    for number in range(20):
        Image.fromarray(IMAGES[number]).save(tmp_path / f"{number}.png")
    files = [str(tmp_path / f"{number}.png") for number in range(20)]
    rows = datasets.Dataset.from_dict({"image": files, "label": [number % 2 for number in range(20)]})
    rows = rows.cast_column("image", datasets.Image())
    rows.save_to_disk(tmp_path / "saved")
    examples = huggingface(name=tmp_path / "saved", image_size=(12, 10))
    images, labels = examples.arrays("train")
    np.testing.assert_array_equal(np.array(numbers_of(images)) % 2, labels)
    with pytest.raises(ConfigError, match="image_size must be given"):
        huggingface(name=tmp_path / "saved")


def test_huggingface_data_that_cannot_be_read_is_named(table, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"Received: name='no/such_set' .* save_to_disk"):
        huggingface(name="no/such_set")
    table.save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"name must be a data set .*saved"):
        huggingface(name=tmp_path / "saved")
    table.save_to_disk(tmp_path / "again")
    with pytest.raises(ConfigError, match="its features are 'text'"):
        huggingface(name=tmp_path / "again", inputs="image")


@pytest.mark.parametrize(
    ("source", "package", "extra"), [(tfds, "tensorflow_datasets", "tfds"), (huggingface, "datasets", "huggingface")]
)
def test_without_the_package_the_error_says_what_to_install(source, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # Python then refuses to import it
    with pytest.raises(ConfigError, match=rf"pip install 'tfopt\[{extra}\]'"):
        source(name="any")


@pytest.mark.parametrize("column", ["text", "label"])
def test_a_missing_value_is_refused(column, tmp_path):
    rows = {"text": ["good", "bad"] * 10, "label": ["a", "b"] * 10}
    rows[column][3] = None
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "rows")
    with pytest.raises(ConfigError, match=rf"must have a value. Received: column '{column}' with 1 rows"):
        huggingface(name=tmp_path / "rows", length=8)


def test_a_class_number_without_a_class_is_told(tmp_path):
    """Hubs give -1 to the examples of a test part whose classes are secret."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    known = datasets.Dataset.from_dict({"text": ["a film"] * 20, "label": [0, 1] * 10}, features=features)
    secret = datasets.Dataset.from_dict({"text": ["a film"] * 4, "label": [-1] * 4}, features=features)
    datasets.DatasetDict({"train": known, "test": secret}).save_to_disk(tmp_path / "films")
    examples = huggingface(name=tmp_path / "films", length=8)
    assert set(examples.y_train) == {0, 1}
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"class numbers in .*label.* must be from 0 to 1.*-1"):
        list(examples.decoded("test"))


def test_huggingface_reads_numbers_of_64_bits_and_bool_labels(tmp_path):
    rows = {"x": np.arange(40) / 8, "n": np.arange(40) + 2**40, "kind": [number % 2 == 1 for number in range(40)]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path)
    for name in ("x", "n"):
        examples = huggingface(name=tmp_path, inputs=name, targets="kind")
        x, y = (np.concatenate(parts) for parts in zip(examples.arrays("train"), examples.arrays("test"), strict=True))
        np.testing.assert_array_equal(np.sort(x), rows[name])
        assert (examples.outputs, y.sum(), len(y)) == (2, 20, 40)
