"""Cases for benchmarks/input_pipeline.py: JPEGs from TFRecord files against Keras' image_dataset_from_directory.

The photos are crops of the two real photographs that scikit-learn holds. Both sides read the same JPEGs, shuffle,
decode, resize to the same size and batch. Keras returns pixels from 0 to 255 as float32, and tfopt as uint8. The case
"float32" has tfopt return float32 in [0, 1], as image_folder does. "exact" decodes every pixel as Keras does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from PIL import Image
from sklearn.datasets import load_sample_images

import tfopt.data
from tfopt.data import EncodedImage, Examples, Stored

PHOTOS, CLASSES, BATCH, QUALITY = 512, 4, 32, 92
KINDS = (("JPEG 500x375 to 224", (375, 500), 224), ("JPEG 256x256 to 128", (256, 256), 128))
Case = tuple[str, Callable[[], tf.data.Dataset], Callable[[], tf.data.Dataset]]


def cases(directory: Path) -> Iterator[Case]:
    """Yields (name, make_ours, make_keras): functions that return data sets of batches."""
    for name, shape, size in KINDS:
        folder = directory / name.replace(" ", "_")
        if not (folder / "records").is_dir():
            _write_photos(folder / "photos", shape)
            tfopt.data.convert(_source(folder / "photos", size), folder / "records", shards=4)
        keras_side = partial(_keras, folder / "photos", size)
        yield name, partial(_ours, folder / "records", dtype="uint8"), keras_side
        yield f"{name}, float32", partial(_ours, folder / "records"), keras_side
        yield f"{name}, exact", partial(_ours, folder / "records", dtype="uint8", exact=True), keras_side


def _ours(directory: Path, **options) -> tf.data.Dataset:
    return tfopt.data.pipeline(
        tfopt.data.tfrecord(directory=directory, **options).decoded("train"), batch_size=BATCH, cache=False
    )


def _keras(directory: Path, size: int) -> tf.data.Dataset:
    return keras.utils.image_dataset_from_directory(
        directory, image_size=(size, size), batch_size=BATCH, seed=0, verbose=False
    )


def _source(directory: Path, size: int) -> Examples:
    paths = sorted(str(path) for path in directory.rglob("*.jpg"))
    classes = [int(Path(path).parent.name) for path in paths]
    records = tf.data.Dataset.from_tensor_slices((paths, classes))
    image = EncodedImage(size=(size, size))
    return Examples(
        name="photos",
        train=records,
        test=records.take(BATCH),
        outputs=CLASSES,
        decode=lambda path, label: (image(tf.io.read_file(path), path), label),
        stored=Stored(read=lambda path, label: (path, tf.io.read_file(path), label), inputs=image),
    )


def _write_photos(directory: Path, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    # Mirrored, so that crops can be larger than half of a photo and still differ.
    whole = [np.concatenate([image, image[::-1]], 0) for image in _images()]
    whole = [np.concatenate([image, image[:, ::-1]], 1) for image in whole]
    for number in range(PHOTOS):
        image = whole[random.integers(len(whole))]
        top, left = (random.integers(side - length) for side, length in zip(image.shape, shape, strict=False))
        path = directory / str(number % CLASSES) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[top : top + shape[0], left : left + shape[1]]).save(path, quality=QUALITY)


def _images() -> list[np.ndarray]:
    return list(load_sample_images().images)
