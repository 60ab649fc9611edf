"""Cases of benchmarks/input_pipeline.py: random resized crops of JPEG files of several sizes, with the whole pipeline.

Keras has no random resized crop. One case compares with what its users write in TensorFlow: the file is decoded,
`tf.image.sample_distorted_bounding_box` draws a box, which is cut out and resized. The other one compares with the
nearest layers of Keras, RandomZoom and RandomTranslation, after the whole image is resized. Both sides read the same
files in a new order in every pass, and make batches of float32 from 0 to 1 without an end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from PIL import Image
from sklearn.datasets import load_sample_images

import tfopt

Case = tuple[str, Callable[[], tf.data.Dataset], Callable[[], tf.data.Dataset]]
SIZES = ((500, 375), (375, 500), (500, 333), (400, 400))  # width and height
IMAGES, SIZE, BATCH = 512, 224, 64
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)


def cases(directory: Path) -> Iterator[Case]:
    """Writes the files into a directory, and yields each case: its name, the side of tfopt and the side of Keras."""
    write_images(directory)
    paths = [str(path) for path in sorted(directory.glob("*/*.jpg"))]
    labels = [int(Path(path).parent.name == "flower") for path in paths]
    layers = keras.Sequential(
        [
            keras.layers.RandomZoom((-0.7, 0), (-0.7, 0), fill_mode="nearest"),
            keras.layers.RandomTranslation(0.2, 0.2, fill_mode="nearest"),
        ]
    )

    def ours() -> tf.data.Dataset:
        examples = tfopt.data.image_folder(directory=directory, image_size=SIZE, test_fraction=0.01)
        decided = tfopt.plan(tfopt.TrainingConfig(global_batch_size=BATCH, strategy="none"))
        config = tfopt.data.AugmentConfig(crop_scale=AREA, crop_ratio=ASPECT)
        return decided.pipeline(examples, augment=tfopt.data.Augmentation(config), repeat=True)

    def decoded(path: tf.Tensor) -> tf.Tensor:
        return tf.io.decode_jpeg(tf.io.read_file(path), channels=3)

    def shuffled() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths)).repeat()

    def box(path: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = decoded(path)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.shape(image),
            tf.zeros((1, 0, 4)),
            area_range=AREA,
            aspect_ratio_range=ASPECT,
            use_image_if_no_bounding_boxes=True,
            min_object_covered=0.0,
        )
        return tf.image.resize(tf.slice(image, begin, size), (SIZE, SIZE)) / 255, label

    def plain() -> tf.data.Dataset:
        return shuffled().map(box, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH)

    def whole(path: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.image.resize(decoded(path), (SIZE, SIZE)) / 255, label

    def zoomed() -> tf.data.Dataset:
        batches = shuffled().map(whole, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH)
        return batches.map(lambda x, y: (layers(x, training=True), y), num_parallel_calls=tf.data.AUTOTUNE)

    name = f"random resized crop, JPEG files of about 500x375 to {SIZE}"
    yield f"{name}, against a sampled box in TensorFlow", ours, plain
    yield f"{name}, against RandomZoom and RandomTranslation", ours, zoomed


def write_images(directory: Path) -> None:
    """Writes JPEGs of several sizes: crops of two photographs, at random places and sizes."""
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    generator = np.random.default_rng(0)
    for number in range(IMAGES):
        photo = photos[number % 2]
        size = SIZES[generator.integers(len(SIZES))]
        largest = min(photo.width / size[0], photo.height / size[1])
        width, height = (int(generator.uniform(0.5, 1) * largest * side) for side in size)
        left = int(generator.integers(0, photo.width - width + 1))
        top = int(generator.integers(0, photo.height - height + 1))
        file = directory / ("china", "flower")[number % 2] / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        photo.crop((left, top, left + width, top + height)).resize(size).save(file, quality=90)
