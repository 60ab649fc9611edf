"""Cases of benchmarks/input_pipeline.py: the sources of tfopt against what Keras offers for the same files.

    python benchmarks/input_sources.py

Each case is a name and two functions that return a finite data set of batches, ready for fit. Both sides read the same
files, shuffle the training part and make batches of the same size. The script itself compares them, side by side.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from PIL import Image
from sklearn.datasets import load_sample_images

import tfopt
from tfopt.timing import in_turns

Case = tuple[str, Callable[[], tf.data.Dataset], Callable[[], tf.data.Dataset]]
IMAGES, IMAGE_SIZE, IMAGE_BATCH = 600, 128, 32
TEXTS, TEXT_LENGTH, TEXT_BATCH = 2000, 256, 64
ROWS, ROW_SHAPE, ROW_BATCH = 20_000, (32, 32, 3), 128
STEPS, COLUMNS, WINDOW, WINDOW_BATCH = 40_000, 8, 48, 128
TEST_FRACTION = 0.2


def cases(directory: Path) -> Iterator[Case]:
    """Writes the files into a directory, and yields each case: its name, the side of tfopt and the side of Keras."""
    yield from image_cases(directory / "images")
    yield from text_cases(directory / "texts")
    yield from array_cases(directory / "arrays")
    yield from window_cases(directory / "series")


def image_cases(directory: Path) -> Iterator[Case]:
    write_images(directory)

    def ours(exact: bool) -> tf.data.Dataset:
        examples = tfopt.data.image_folder(
            directory=directory, image_size=IMAGE_SIZE, test_fraction=TEST_FRACTION, exact=exact
        )
        return batched(examples, IMAGE_BATCH)

    def theirs() -> tf.data.Dataset:
        return keras.utils.image_dataset_from_directory(
            directory,
            image_size=(IMAGE_SIZE, IMAGE_SIZE),
            batch_size=IMAGE_BATCH,
            validation_split=TEST_FRACTION,
            subset="training",
            seed=0,
            verbose=False,
        )

    yield f"image_folder, JPEG 300x400 to {IMAGE_SIZE}", lambda: ours(False), theirs
    yield f"image_folder, JPEG 300x400 to {IMAGE_SIZE}, exact=True", lambda: ours(True), theirs


def text_cases(directory: Path) -> Iterator[Case]:
    for number in range(TEXTS):
        file = directory / ("even", "odd")[number % 2] / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((f"The file number {number} holds some words. " * 10)[:TEXT_LENGTH])

    def ours() -> tf.data.Dataset:
        examples = tfopt.data.text_classes(directory=directory, length=TEXT_LENGTH, test_fraction=TEST_FRACTION)
        return batched(examples, TEXT_BATCH)

    def theirs() -> tf.data.Dataset:
        texts = keras.utils.text_dataset_from_directory(
            directory, batch_size=TEXT_BATCH, validation_split=TEST_FRACTION, subset="training", seed=0, verbose=False
        )
        tokens = keras.layers.TextVectorization(
            standardize=None, split="character", output_sequence_length=TEXT_LENGTH, max_tokens=256
        )
        tokens.adapt(texts.take(4).map(lambda text, label: text))
        return texts.map(lambda text, label: (tokens(text), label), num_parallel_calls=tf.data.AUTOTUNE)

    yield f"text_classes, {TEXT_LENGTH} characters", ours, theirs


def array_cases(directory: Path) -> Iterator[Case]:
    directory.mkdir(parents=True)
    generator = np.random.default_rng(0)
    np.save(directory / "x.npy", generator.integers(0, 256, (ROWS, *ROW_SHAPE), dtype=np.uint8))
    np.save(directory / "y.npy", np.arange(ROWS) % 10)

    def ours() -> tf.data.Dataset:
        examples = tfopt.data.numpy_files(x=directory / "x.npy", y=directory / "y.npy", test_fraction=TEST_FRACTION)
        return batched(examples, ROW_BATCH)

    def ours_in_memory() -> tf.data.Dataset:
        # As the pipeline keeps examples that fit in memory.
        examples = tfopt.data.numpy_files(x=directory / "x.npy", y=directory / "y.npy", test_fraction=TEST_FRACTION)
        return tfopt.data.pipeline(examples, batch_size=ROW_BATCH)

    def theirs_from_file() -> tf.data.Dataset:
        x, y = np.load(directory / "x.npy", mmap_mode="r"), np.load(directory / "y.npy")
        chosen = np.random.default_rng(0).permutation(ROWS)[: int(ROWS * (1 - TEST_FRACTION))]

        def rows() -> Iterator[tuple[np.ndarray, np.int64]]:
            for number in chosen:
                yield x[number], y[number]

        signature = (tf.TensorSpec(ROW_SHAPE, tf.uint8), tf.TensorSpec((), tf.int64))
        return tf.data.Dataset.from_generator(rows, output_signature=signature).batch(ROW_BATCH).prefetch(2)

    def theirs_in_memory() -> tf.data.Dataset:
        count = int(ROWS * (1 - TEST_FRACTION))
        x, y = np.load(directory / "x.npy")[:count], np.load(directory / "y.npy")[:count]
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(count, seed=0).batch(ROW_BATCH).prefetch(2)

    yield "numpy, rows of 3 KB from the file, against a generator over a memory map", ours, theirs_from_file
    yield "numpy, rows of 3 KB kept in memory, against arrays in memory", ours_in_memory, theirs_in_memory


def window_cases(directory: Path) -> Iterator[Case]:
    directory.mkdir(parents=True)
    values = np.random.default_rng(0).random((STEPS, COLUMNS), dtype=np.float32)
    names = [f"c{number}" for number in range(COLUMNS)]
    lines = [",".join(names), *(",".join(map(str, row)) for row in values.tolist())]
    (directory / "series.csv").write_text("\n".join(lines))

    def ours() -> tf.data.Dataset:
        examples = tfopt.data.csv(
            path=directory / "series.csv", target="c0", inputs=names, window=WINDOW, test_fraction=TEST_FRACTION
        )
        return batched(examples, WINDOW_BATCH)

    def theirs() -> tf.data.Dataset:
        train = values[: int(STEPS * (1 - TEST_FRACTION))]
        return keras.utils.timeseries_dataset_from_array(
            train[:-WINDOW], train[WINDOW:, :1], WINDOW, batch_size=WINDOW_BATCH, shuffle=True, seed=0
        )

    yield f"csv, windows of {WINDOW} rows", ours, theirs


def batched(examples: tfopt.data.Examples, batch_size: int) -> tf.data.Dataset:
    return tfopt.data.pipeline(examples, batch_size=batch_size, cache=False)


def write_images(directory: Path) -> None:
    """Writes JPEGs of 300x400 pixels: crops of two photographs, at random places and sizes."""
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    generator = np.random.default_rng(0)
    for number in range(IMAGES):
        photo = photos[number % 2]
        height = int(generator.integers(120, photo.height))
        width = height * 4 // 3
        left = int(generator.integers(0, photo.width - width + 1))
        top = int(generator.integers(0, photo.height - height + 1))
        file = directory / ("china", "flower")[number % 2] / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        photo.crop((left, top, left + width, top + height)).resize((400, 300)).save(file, quality=90)


def examples_per_second(dataset: tf.data.Dataset) -> float:
    start, examples = time.perf_counter(), 0
    for batch in dataset:
        examples += int(tf.nest.flatten(batch)[0].shape[0])
    return examples / (time.perf_counter() - start)


def main(rounds: int = 5) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name, make_ours, make_keras in cases(Path(directory)):
            sides = [partial(examples_per_second, dataset) for dataset in (make_ours(), make_keras())]
            speeds = in_turns(sides, rounds + 1)
            ours, theirs = (float(np.median(each[1:])) for each in speeds)  # the first pass starts the threads
            print(f"{name}: {ours:,.0f} against {theirs:,.0f} examples/s, {ours / theirs:.2f}x")


if __name__ == "__main__":
    main()
