"""Every source through the pipeline: each example once per epoch, and the order a function of seed and epoch."""

import io
import tarfile
from collections import Counter

import numpy as np
import pandas
import pytest
import tensorflow as tf
from PIL import Image

from tfopt.data import (
    Examples,
    csv,
    huggingface,
    image_folder,
    imdb,
    numpy_files,
    parquet,
    pipeline,
    text,
    text_classes,
)
from tfopt.data.epoch_order import EpochCounter


def of_images(directory):
    generator = np.random.default_rng(0)
    for number in range(40):
        folder = directory / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.{('png', 'jpg')[number % 2]}")
    return image_folder(directory=directory, image_size=8)


def of_arrays(directory):
    np.save(directory / "x.npy", np.random.default_rng(0).random((300, 4), dtype=np.float32))
    np.save(directory / "y.npy", np.arange(300) % 3)
    return numpy_files(x={"one": directory / "x.npy", "two": directory / "x.npy"}, y=directory / "y.npy")


def of_csv(directory):
    pandas.DataFrame({"a": np.arange(100), "b": np.arange(100) / 2}).to_csv(directory / "t.csv", index=False)
    return csv(path=directory / "t.csv", target="b", inputs=["a", "b"], window=5, horizon=2)


def of_parquet(directory):
    pandas.DataFrame({"a": np.arange(50), "b": ["x", "y"] * 25}).to_parquet(directory / "t.parquet")
    return parquet(path=directory, target="b")


def of_text(directory):
    return text(pattern="json/*.py", length=64, test_fraction=0.2)


def of_documents(directory):
    for number in range(30):
        (directory / f"{number}.txt").write_text(f"{number} " * (number + 1))
    return text(directory=directory, length=50, pack=False)


def of_text_classes(directory):
    return text_classes(pattern="[ej]*/*.py", length=2048)


def of_reviews(directory):
    with tarfile.open(directory / "aclImdb_v1.tar.gz", "w:gz") as archive:
        for number in range(80):
            content = " ".join(f"word{each}" for each in range(number % 40 + 1)).encode()
            info = tarfile.TarInfo(
                f"aclImdb/{('train', 'test')[number % 2]}/{('neg', 'pos')[number // 40]}/{number}.txt"
            )
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return imdb(path=directory / "aclImdb_v1.tar.gz")


def of_hub(directory):
    import datasets

    rows = {"text": [f"text {number}" for number in range(150)], "label": [number % 3 for number in range(150)]}
    datasets.Dataset.from_dict(rows).save_to_disk(directory / "saved")
    return huggingface(name=directory / "saved", length=16)


SOURCES_BY_NAME = {
    function.__name__: function
    for function in (
        of_images, of_arrays, of_csv, of_parquet, of_text, of_documents, of_text_classes, of_reviews, of_hub
    )
}  # fmt: skip


def unpadded(batches, examples: Examples):
    """Returns each example of batches as bytes, without what fills a batch."""
    fill = None if examples.padding is None else examples.padding[0]
    found = []
    for inputs, targets in batches:
        parts = tf.nest.flatten(inputs)
        for row in range(len(targets)):
            each = [part[row].numpy() for part in parts]
            found.append(tuple((part if fill is None else part[part != fill]).tobytes() for part in each))
    return found


# One of image files, of rows, of packed text and of text by class: the others make their records alike.
FAST = ("of_images", "of_csv", "of_text", "of_text_classes")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SOURCES_BY_NAME]
)
def test_a_restored_pipeline_goes_on_where_it_stopped(name, tmp_path):
    examples = SOURCES_BY_NAME[name](tmp_path)
    counter = EpochCounter()
    batches = pipeline(examples, batch_size=8, cache="off", seed=5, epoch=counter)
    epochs = []
    for epoch in range(2):
        counter.assign(epoch)
        epochs.append(unpadded(batches, examples))
    assert Counter(epochs[0]) == Counter(epochs[1])
    assert len(epochs[0]) == examples.size("train")
    assert epochs[0] != epochs[1]
    again = EpochCounter()
    again.assign(1)
    restored = pipeline(SOURCES_BY_NAME[name](tmp_path), batch_size=8, cache="off", seed=5, epoch=again)
    assert unpadded(restored.skip(2), examples) == epochs[1][16:]
