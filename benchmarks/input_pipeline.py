"""Measures tfopt's input pipeline against what Keras offers for the same work, in examples per second.

    python benchmarks/input_pipeline.py
    python benchmarks/input_pipeline.py --only "crop|placement" --rounds 5

Augmentation: both sides start from the same photos in memory, uint8, in batches of 64, and change them in a tf.data
pipeline. Keras' layers are called in `dataset.map`, as their documentation recommends. They return float32, and so does
tfopt's side here: its last step is a cast. tfopt's own pipeline gives uint8 to the training step, which casts on the
device; one case measures that. Keras' RandomCrop takes one place for the whole batch, and its RandAugment the same
operations for the whole batch. tfopt draws for each image.

Whole call: `plan.pipeline((images, labels), augment=...)` against what a user of Keras writes: arrays are sliced,
shuffled and batched, and Keras' layers are mapped over the batches. Images are uint8 or float32, and tfopt keeps their
type. Keras has no random resized crop; its nearest layers, RandomZoom and RandomTranslation, take its place.

Sources: benchmarks/input_sources.py, benchmarks/input_records.py and benchmarks/input_crops.py give the cases.

Placement: a small network is trained with the same augmentation in the pipeline (host) and in the training step
(device).

The sides take turns. Each round gives one ratio; its median and quartiles are over the rounds. Other programs on the
machine disturb single turns. The results also hold the ratio of processor time. Results go to
benchmarks/results/input_pipeline.json. With `--only`, the file keeps the other cases, if it is of the same device and
versions.
"""

from __future__ import annotations

import importlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tyro
from sklearn.datasets import load_sample_images

import tfopt
from tfopt.atomic.files import write_text
from tfopt.data.augment.augmentation import Augmentation
from tfopt.data.augment.config import AugmentConfig
from tfopt.hardware import detect
from tfopt.timing import in_turns, seconds_of

RESULTS = Path(__file__).parent / "results"
Case = tuple[str, Callable[[], tf.data.Dataset], Callable[[], tf.data.Dataset]]
SIZES, BATCH, IMAGES = (128, 224), 64, 512
PADDING = 4
TURN_S = 1.5
FIRST = 2  # batches of a turn that are read before the clock starts
MODULES = ("input_sources", "input_records", "input_crops")


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = 9
    """Number of timing rounds; the first one is not counted."""
    only: str = ""
    """Regular expression: the cases whose name it finds are measured."""
    out: Path = RESULTS / "input_pipeline.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    hardware = detect()
    results: dict[str, Any] = {
        "what": f"examples per second of the input pipeline; images in batches of {BATCH}",
        "device": f"{hardware.processor}, {hardware.logical_cores} cores",
        "gpus": [gpu.name for gpu in hardware.gpus],
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "rounds": options.rounds - 1,
        "cases": {},
    }
    keep_others(results, options)
    with tempfile.TemporaryDirectory() as directory:
        for name, ours, theirs in all_cases(Path(directory)):
            if re.search(options.only, name):
                results["cases"][name] = compare(name, {"tfopt": ours, "keras": theirs}, options.rounds)
                write(results, options.out)
    if re.search(options.only, "placement"):
        results["placement"] = placement(options.rounds)
    write(results, options.out)
    return results


def keep_others(results: dict[str, Any], options: Options) -> None:
    """Adds what the results file holds of cases that are not measured now, unless another machine measured them."""
    if not options.only or not options.out.is_file():
        return
    known = json.loads(options.out.read_text())
    differs = [name for name in ("device", "gpus", "tensorflow", "keras") if known.get(name) != results[name]]
    if differs:
        raise SystemExit(
            f"--only needs results of the same {', '.join(differs)}, to keep the other cases. Received: "
            f"{options.out}, with {', '.join(str(known.get(name)) for name in differs)}. Name another file with --out."
        )
    results |= {name: known[name] for name in ("cases", "placement") if name in known}


def write(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    write_text(path, json.dumps(results, indent=2) + "\n")


def all_cases(directory: Path) -> Iterator[Case]:
    for size in SIZES:
        yield from augmentation_cases(size)
    yield from whole_call_cases(SIZES[0])
    for module in MODULES:
        if (Path(__file__).parent / f"{module}.py").is_file():
            yield from importlib.import_module(module).cases(directory / module)


def augmentation_cases(size: int) -> Iterator[Case]:
    """Yields the cases of one image size: tfopt's settings, and the layers of Keras that do the same."""
    layers = keras.layers
    whole = (0, 255)
    cases: dict[str, tuple[AugmentConfig, list[Any]]] = {
        "padded crop + flip": (
            AugmentConfig(crop=PADDING, flip="horizontal"),
            [layers.ZeroPadding2D(PADDING), layers.RandomCrop(size, size), layers.RandomFlip("horizontal")],
        ),
        "flip + rotation + zoom + translation": (
            AugmentConfig(flip="horizontal", rotation_degrees=36, zoom=0.2, translation=0.1),
            [
                layers.RandomFlip("horizontal"),
                layers.RandomRotation(0.1, fill_mode="constant"),
                layers.RandomZoom(0.2, fill_mode="constant"),
                layers.RandomTranslation(0.1, 0.1, fill_mode="constant"),
            ],
        ),
        "brightness + contrast + saturation + hue": (
            AugmentConfig(brightness=0.2, contrast=0.2, saturation=0.2, hue=0.05),
            [
                layers.RandomBrightness(0.2, value_range=whole),
                layers.RandomContrast(0.2, value_range=whole),
                layers.RandomSaturation((0.4, 0.6), value_range=whole),
                layers.RandomHue(0.05, value_range=whole),
            ],
        ),
        "RandAugment, 2 operations": (
            AugmentConfig(rand_augment=2),
            [layers.RandAugment(value_range=whole, num_ops=2)],
        ),
    }
    images = photos(size)
    for name, (config, chain) in cases.items():

        def theirs(chain: list[Any] = chain) -> tf.data.Dataset:
            model = keras.Sequential(chain)
            return batches(images).map(lambda x: model(x, training=True), num_parallel_calls=tf.data.AUTOTUNE)

        yield f"{name}, {size}x{size}", lambda config=config: augmented(images, config), theirs
        if name == "padded crop + flip":
            yield f"{name}, {size}x{size}, uint8", lambda config=config: augmented(images, config, tf.uint8), theirs


def whole_call_cases(size: int) -> Iterator[Case]:
    """Yields the cases in which both sides do all that a user calls: shuffle, augment, batch."""
    layers = keras.layers
    cases: dict[str, tuple[AugmentConfig, list[Any]]] = {
        "padded crop + flip": (
            AugmentConfig(crop=PADDING, flip="horizontal"),
            [layers.ZeroPadding2D(PADDING), layers.RandomCrop(size, size), layers.RandomFlip("horizontal")],
        ),
        "random resized crop": (
            AugmentConfig(crop_scale=(0.08, 1)),
            [
                layers.RandomZoom((-0.7, 0), (-0.7, 0), fill_mode="nearest"),
                layers.RandomTranslation(0.2, 0.2, fill_mode="nearest"),
            ],
        ),
    }
    pixels = photos(size)
    labels = np.arange(len(pixels)) % 10
    decided = tfopt.plan(tfopt.TrainingConfig(global_batch_size=BATCH, strategy="none"))
    for name, (config, chain) in cases.items():
        for images in (pixels, (pixels / 255).astype("float32")):

            def ours(images: np.ndarray = images, config: AugmentConfig = config) -> tf.data.Dataset:
                return decided.pipeline((images, labels), augment=Augmentation(config), repeat=True)

            def theirs(images: np.ndarray = images, chain: list[Any] = chain) -> tf.data.Dataset:
                model = keras.Sequential(chain)
                examples = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(IMAGES).repeat().batch(BATCH)
                return examples.map(lambda x, y: (model(x, training=True), y), num_parallel_calls=tf.data.AUTOTUNE)

            yield f"whole call: {name}, {size}x{size}, {images.dtype}", ours, theirs


def augmented(images: np.ndarray, config: AugmentConfig, dtype: tf.DType = tf.float32) -> tf.data.Dataset:
    augmentation = Augmentation(config)
    seeds = tf.data.Dataset.random(seed=0, rerandomize_each_iteration=True).batch(2, drop_remainder=True)

    def change(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return tf.cast(augmentation((x, tf.zeros(BATCH)), seed)[0], dtype)

    return tf.data.Dataset.zip(batches(images), seeds).map(change, num_parallel_calls=tf.data.AUTOTUNE)


def batches(images: np.ndarray) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(images).repeat().batch(BATCH, drop_remainder=True)


def photos(size: int) -> np.ndarray:
    """Cuts images out of two photos."""
    generator = np.random.default_rng(0)
    pictures = load_sample_images().images
    found = []
    for number in range(IMAGES):
        picture = pictures[number % len(pictures)]
        top, left = (generator.integers(0, length - size) for length in picture.shape[:2])
        found.append(picture[top : top + size, left : left + size])
    return np.stack(found)


def compare(name: str, sides: dict[str, Callable[[], tf.data.Dataset]], rounds: int) -> dict[str, Any]:
    """Reads both sides in turns. Returns the examples per second of each and their ratio."""
    datasets = {side: make().prefetch(2) for side, make in sides.items()}
    counts = {side: turn_length(dataset) for side, dataset in datasets.items()}
    turns = in_turns([partial(read, dataset, counts[side]) for side, dataset in datasets.items()], rounds)
    read_in_turns = {side: np.array(each[1:]).T for side, each in zip(datasets, turns, strict=True)}
    speed = {side: examples / seconds for side, (examples, seconds, _) in read_in_turns.items()}
    processor = {side: busy / examples for side, (examples, _, busy) in read_in_turns.items()}
    result: dict[str, Any] = {side: {"examples_per_second": figures(values, 0)} for side, values in speed.items()}
    result["speed"] = figures(speed["tfopt"] / speed["keras"], 2)
    result["processor_time"] = figures(processor["keras"] / processor["tfopt"], 2)
    print(f"{name:60s} {result['speed']['median']:7.2f}x  {result['speed']['quartiles']}", flush=True)
    return result


def turn_length(dataset: tf.data.Dataset) -> int:
    """Returns the number of batches of a turn, or -1 for a whole data set that ends."""
    if int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY:
        return -1
    _, seconds, _ = read(dataset, 2)
    return max(2, round(2 * TURN_S / seconds))


def read(dataset: tf.data.Dataset, count: int) -> tuple[int, float, float]:
    """Reads batches. Returns the number of examples, the seconds and the seconds of all processors.

    Of a data set without an end, the first batches are not counted: tf.data prepares its functions for each iterator.
    """
    examples = 0
    begin, busy = time.perf_counter(), time.process_time()
    # Kept until the clock is read: tf.data's autotuner sleeps, and the end of an iterator waits until it wakes.
    iterator = iter(dataset if count < 0 else dataset.take(count + FIRST))
    if count > 0:
        for _ in range(FIRST):
            next(iterator)
        begin, busy = time.perf_counter(), time.process_time()
    for batch in iterator:
        examples += int(tf.nest.flatten(batch)[0].shape[0])
    return examples, time.perf_counter() - begin, time.process_time() - busy


def figures(values: np.ndarray, digits: int) -> dict[str, Any]:
    lower, median, upper = np.percentile(values, [25, 50, 75])
    return {
        "median": round(float(median), digits or None),
        "quartiles": [round(float(lower), digits or None), round(float(upper), digits or None)],
    }


def placement(rounds: int) -> dict[str, Any]:
    """Trains the same network with the same augmentation on the host and on the device, in turns."""
    size, steps = 128, 8
    images = photos(size)[: BATCH * steps]
    labels = np.arange(len(images)) % 10
    config = AugmentConfig(crop=PADDING, flip="horizontal", rotation_degrees=36, contrast=0.2)
    fits: dict[str, Callable[[], Any]] = {}
    for side, augment in (("none", None), ("host", None), ("device", config)):
        decided = tfopt.plan(tfopt.TrainingConfig(global_batch_size=BATCH, strategy="none"))
        inputs = keras.Input((size, size, 3))
        x = keras.layers.Rescaling(1 / 255)(inputs)
        for filters in (16, 32, 64):
            x = keras.layers.Conv2D(filters, 3, strides=2, activation="relu")(x)
        outputs = keras.layers.Dense(10, dtype="float32")(keras.layers.GlobalAveragePooling2D()(x))
        model = keras.Model(inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        tfopt.compile(model, decided, loss=loss, augment=augment)
        dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH, drop_remainder=True)
        if side == "host":
            augmentation = Augmentation(config)
            seeds = tf.data.Dataset.random(seed=0, rerandomize_each_iteration=True).batch(2, drop_remainder=True)
            zipped = tf.data.Dataset.zip(dataset, seeds)
            dataset = zipped.map(
                lambda example, seed, augmentation=augmentation: augmentation(example, seed), num_parallel_calls=2
            )
        # The end of an epoch would wait for the autotuner.
        quiet = tf.data.Options()
        quiet.autotune.enabled = False
        dataset = dataset.prefetch(2).with_options(quiet)
        fits[side] = lambda model=model, dataset=dataset: model.fit(dataset, verbose=0)
    turns = in_turns([partial(seconds_of, fit) for fit in fits.values()], rounds)
    times = {side: np.array(values[1:]) / steps for side, values in zip(fits, turns, strict=True)}
    return {
        "what": f"a training step of a small network, {BATCH} images of {size}x{size}, with crop, flip, rotation and "
        "contrast",
        "step_ms": {side: figures(values * 1e3, 1) for side, values in times.items()},
        "device_against_host": figures(times["host"] / times["device"], 2),
    }


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=2))
