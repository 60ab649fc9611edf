"""Cases for benchmarks/input_pipeline.py: JPEGs from TFRecord files against Keras' image_dataset_from_directory.

The photos are crops of the two real photographs that scikit-learn holds. Both sides shuffle the same JPEGs, decode,
resize to the same size and batch. Keras returns pixels from 0 to 255 as float32, and tfopt as uint8.

    files      the records are the JPEGs of the folder, decoded by the fast way
    exact      the same, decoded as Keras does
    float32    as files, but float32 in [0, 1], as image_folder returns it
    jpeg       the records are resized JPEGs of quality 95
    pixels     the records are the resized pixels; the fast way decoded them, once, while converting

Most of the time goes into the entropy decoding of the JPEGs, which no setting of the decoder avoids. Leaving out
frequencies saves time where the photo is at least twice the size. Storing the pixels saves all of it.
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

PHOTOS, CLASSES, BATCH, QUALITY = 1536, 4, 32, 92
SHUFFLE_BUFFER = 512
KINDS = (("JPEG 500x375 to 224", (375, 500), 224), ("JPEG 256x256 to 128", (256, 256), 128))
Case = tuple[str, Callable[[], tf.data.Dataset], Callable[[], tf.data.Dataset]]


def cases(directory: Path) -> Iterator[Case]:
    """Yields (name, make_ours, make_keras): functions that return data sets of batches."""
    for name, shape, size in KINDS:
        folder = directory / name.replace(" ", "_")
        photos = folder / "photos"
        if not photos.is_dir():
            _write_photos(photos / "train", shape, PHOTOS)
            _write_photos(photos / "test", shape, CLASSES)
        source = tfopt.data.image_folder(directory=photos, image_size=size)
        for images in ("files", "jpeg", "pixels"):
            tfopt.data.convert(source, folder / images, shards=4, images=images)
        keras_side = partial(_keras, photos / "train", size)
        yield f"{name}, files", partial(_ours, folder / "files", dtype="uint8"), keras_side
        yield f"{name}, exact", partial(_ours, folder / "files", dtype="uint8", exact=True), keras_side
        yield f"{name}, float32", partial(_ours, folder / "files"), keras_side
        yield f"{name}, jpeg", partial(_ours, folder / "jpeg", dtype="uint8"), keras_side
        yield f"{name}, pixels", partial(_ours, folder / "pixels", dtype="uint8"), keras_side


def _ours(directory: Path, **options) -> tf.data.Dataset:
    examples = tfopt.data.tfrecord(directory=directory, **options)
    return tfopt.data.pipeline(examples, batch_size=BATCH, cache="off", shuffle_buffer=SHUFFLE_BUFFER)


def _keras(directory: Path, size: int) -> tf.data.Dataset:
    return keras.utils.image_dataset_from_directory(
        directory, image_size=(size, size), batch_size=BATCH, seed=0, verbose=False
    )


def _write_photos(directory: Path, shape: tuple[int, int], count: int) -> None:
    random = np.random.default_rng(0)
    # Mirrored, so that crops can be larger than half of a photo and still differ.
    whole = [np.concatenate([image, image[::-1]], 0) for image in _images()]
    whole = [np.concatenate([image, image[:, ::-1]], 1) for image in whole]
    for number in range(count):
        image = whole[random.integers(len(whole))]
        top, left = (random.integers(side - length) for side, length in zip(image.shape, shape, strict=False))
        path = directory / str(number % CLASSES) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[top : top + shape[0], left : left + shape[1]]).save(path, quality=QUALITY)


def _images() -> list[np.ndarray]:
    return list(load_sample_images().images)
