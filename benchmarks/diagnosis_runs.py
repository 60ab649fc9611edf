"""Training runs with one planted cause of slowness each, the same runs without it, and runs with none.

Each is plain Keras. `PLANTED` maps the name of the cause to a function that trains; its argument tells whether the
cause is mended. `HEALTHY` has runs without a planted cause. A function returns the number of examples of an epoch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

AUTOTUNE = tf.data.AUTOTUNE
CLASSES = 10
DISK_US = 100


def images(count: int, size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    return numbers.integers(0, 255, (count, size, size, 3), dtype=np.uint8), numbers.integers(0, CLASSES, count)


def rows(count: int, width: int = 64) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    return numbers.random((count, width), dtype=np.float32), numbers.integers(0, CLASSES, count)


def compiled(model: keras.Model, **options: Any) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(options.pop("optimizer", "adam"), loss, **{"jit_compile": False, **options})
    return model


def mlp(width: int = 64, inputs: int = 64, depth: int = 2, **options: Any) -> keras.Model:
    hidden = [layers.Dense(width, "relu") for _ in range(depth)]
    return compiled(keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(CLASSES)]), **options)


def cnn(**options: Any) -> keras.Model:
    body = [layers.Conv2D(16, 3, strides=2, activation="relu"), layers.Conv2D(32, 3, strides=2, activation="relu")]
    parts = [keras.Input((32, 32, 3)), layers.Rescaling(1 / 255), *body, layers.GlobalAveragePooling2D()]
    return compiled(keras.Sequential([*parts, layers.Dense(CLASSES)]), **options)


@functools.cache
def jpegs(count: int = 1024) -> tuple[np.ndarray, np.ndarray]:
    x, y = images(count, 24)
    smooth = tf.cast(tf.image.resize(x, (144, 144)), tf.uint8)
    return np.array([tf.io.encode_jpeg(each).numpy() for each in smooth]), y


def decode(text: Any, label: Any) -> Any:
    return tf.image.resize(tf.io.decode_jpeg(text, channels=3), (32, 32)), label


def slow_map(mended: bool) -> int:
    def centre(image: np.ndarray) -> np.ndarray:
        rows = [row.astype(np.float32) / 255 for row in image]
        return np.stack(rows) - np.float32(0.5)

    def slowly(image: Any, label: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(centre, [image], tf.float32), (32, 32, 3)), label

    def fast(batch: Any, labels: Any) -> Any:
        return tf.cast(batch, tf.float32) / 255 - 0.5, labels

    examples = tf.data.Dataset.from_tensor_slices(images(2048)).shuffle(256)
    batches = examples.batch(64).map(fast, AUTOTUNE) if mended else examples.map(slowly).batch(64)
    cnn().fit(batches.prefetch(AUTOTUNE), epochs=6, verbose=0)
    return 2048


def small_batch(mended: bool) -> int:
    x, y = rows(1024)
    mlp(256).fit(x, y, batch_size=32 if mended else 4, epochs=4, verbose=0)
    return 1024


def float64(mended: bool) -> int:
    kind = tf.float32 if mended else tf.float64

    def normalize(image: Any, label: Any) -> Any:
        """Takes the mean of the surroundings from each pixel, over several sizes."""
        value = tf.cast(image, kind) / 255
        window = tf.ones((5, 5, 3, 1), kind) / 25
        for _ in range(3):
            value -= 0.5 * tf.nn.depthwise_conv2d(value, window, (1, 1, 1, 1), "SAME")
        return value, label

    batches = tf.data.Dataset.from_tensor_slices(images(2048)).batch(64).shuffle(8)
    cnn().fit(batches.map(normalize, AUTOTUNE).prefetch(AUTOTUNE), epochs=6, verbose=0)
    return 2048


def retraces(mended: bool) -> int:
    lengths = np.random.default_rng(0).permutation(np.arange(16, 48))
    numbers = np.random.default_rng(1)

    def batches() -> Iterator[Any]:
        for length in lengths:
            for _ in range(4):
                yield numbers.random((32, 48 if mended else length, 16), dtype=np.float32), numbers.integers(0, 10, 32)

    spec = (tf.TensorSpec((32, None, 16)), tf.TensorSpec((32,), tf.int64))
    data = tf.data.Dataset.from_tensor_slices(list(range(1))).flat_map(
        lambda _: tf.data.Dataset.from_generator(batches, output_signature=spec)
    )
    body = [layers.Conv1D(32, 3, padding="same"), layers.GlobalMaxPooling1D(), layers.Dense(CLASSES)]
    model = compiled(keras.Sequential([keras.Input((None, 16)), *body]), jit_compile=True)
    model.fit(data.prefetch(4), epochs=1, verbose=0)
    return 32 * 128


def python_generator(mended: bool) -> int:
    x, y = images(2048)

    def contrast(image: np.ndarray) -> np.ndarray:
        dark, middle, bright = np.percentile(image, (5, 50, 95), axis=(0, 1))
        return ((image.astype("float32") - middle) / (bright - dark + 1)).transpose(1, 0, 2)

    def batches() -> Iterator[Any]:
        while True:
            for start in range(0, len(x), 64):
                yield np.stack([contrast(each) for each in x[start : start + 64]]), y[start : start + 64]

    if mended:
        whole = np.stack([contrast(each) for each in x]).astype("float32")
        cnn().fit(whole, y, batch_size=64, epochs=6, verbose=0)
    else:
        cnn().fit(batches(), steps_per_epoch=32, epochs=6, verbose=0)
    return 2048


def host_augmentation(mended: bool) -> int:
    def augment(image: Any, label: Any) -> Any:
        image = tf.image.random_flip_left_right(tf.cast(image, tf.float32) / 255)
        return tf.image.random_hue(tf.image.random_saturation(image, 0.5, 1.5), 0.2), label

    data = tf.data.Dataset.from_tensor_slices(images(2048))
    if not mended:
        data = data.map(augment, AUTOTUNE)
    cnn(steps_per_execution=8).fit(data.batch(64).prefetch(AUTOTUNE), epochs=6, verbose=0)
    return 2048


def no_cache(mended: bool) -> int:
    examples = tf.data.Dataset.from_tensor_slices(jpegs()).map(decode, AUTOTUNE)
    if mended:
        examples = examples.cache()
    cnn().fit(examples.shuffle(512).batch(64).prefetch(AUTOTUNE), epochs=6, verbose=0)
    return 1024


def short_steps(mended: bool) -> int:
    x, y = rows(4096)
    mlp(32, steps_per_execution=16 if mended else 1).fit(x, y, batch_size=32, epochs=4, verbose=0)
    return 4096


def host_metric(mended: bool) -> int:
    def ranked(truth: np.ndarray, scores: np.ndarray) -> np.ndarray:
        pairs = zip(scores, truth.ravel(), strict=True)
        places = [sorted(range(len(row)), key=lambda place: -row[place]).index(int(label)) for row, label in pairs]
        return np.float32(np.mean([1 / (1 + place) for place in places]))

    def mean_reciprocal_rank(truth: Any, scores: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(ranked, [truth, scores], tf.float32), ())

    x, y = rows(16384)
    metric = "sparse_categorical_accuracy" if mended else mean_reciprocal_rank
    mlp(metrics=[metric]).fit(x, y, batch_size=1024, epochs=6, verbose=0)
    return 16384


def blocking_callback(mended: bool) -> int:
    x, y = rows(4096)

    class Watch(keras.callbacks.Callback):
        def look(self) -> None:
            self.model.predict_on_batch(x[:512])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not mended:
                self.look()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if mended:
                self.look()

    mlp(256).fit(x, y, batch_size=128, epochs=6, verbose=0, callbacks=[Watch()])
    return 4096


def misaligned_widths(mended: bool) -> int:
    x, y = rows(4096)
    mlp(1024 if mended else 1021, steps_per_execution=8).fit(x, y, batch_size=128, epochs=3, verbose=0)
    return 4096


def from_disk(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    """Returns examples, each of which comes after the delay of a disk."""
    examples = tf.data.Dataset.from_tensor_slices((x, y))
    types, shapes = zip(*((spec.dtype, spec.shape) for spec in examples.element_spec), strict=True)
    delayed = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(examples), sleep_microseconds=DISK_US,
        output_types=types, output_shapes=shapes,
    )  # fmt: skip
    return tf.data.experimental.from_variant(delayed, examples.element_spec)


def shuffle_buffer(mended: bool) -> int:
    """Each fit reads other files, as those of a data set that is too large to keep. A batch comes within a step."""
    body = [layers.Rescaling(1 / 255), layers.Reshape((32, 96)), layers.LSTM(128), layers.Dense(CLASSES)]
    model = compiled(keras.Sequential([keras.Input((32, 32, 3)), *body]))
    for _ in range(7):
        examples = from_disk(*images(1024))
        model.fit(examples.shuffle(64 if mended else 1024).batch(64).prefetch(AUTOTUNE), verbose=0)
    return 1024


def eager(mended: bool) -> int:
    x, y = rows(2048)
    mlp(64, run_eagerly=not mended).fit(x, y, batch_size=64, epochs=4, verbose=0)
    return 2048


def host_copies(mended: bool) -> int:
    class Norms(keras.callbacks.Callback):
        def look(self) -> None:
            self.norm = sum(float(each.sum()) for each in self.model.get_weights())

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not mended:
                self.look()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if mended:
                self.look()

    x, y = rows(2048)
    mlp(1024, depth=4, optimizer="sgd").fit(x, y, batch_size=32, epochs=5, verbose=0, callbacks=[Norms()])
    return 2048


class SlowSecond(layers.Layer):
    """Sleeps on the second replica."""

    def call(self, inputs: Any) -> Any:
        replica = tf.distribute.get_replica_context()
        if replica is None or not isinstance(replica.replica_id_in_sync_group, int | tf.Tensor):
            return inputs

        def pause(number: np.ndarray) -> np.ndarray:
            if number == 1:
                time.sleep(0.03)
            return np.float32(0)

        zero = tf.numpy_function(pause, [replica.replica_id_in_sync_group], tf.float32)
        return inputs + tf.ensure_shape(zero, ())


def slow_replica(mended: bool) -> int:
    (cpu,) = tf.config.list_physical_devices("CPU")
    if tf.config.get_logical_device_configuration(cpu) is None:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    x, y = rows(2048)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        slow = [] if mended else [SlowSecond()]
        body = [keras.Input((64,)), *slow, layers.Dense(256, "relu"), layers.Dense(CLASSES)]
        model = compiled(keras.Sequential(body))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64).prefetch(2)
    model.fit(data, epochs=4, verbose=0)
    return 2048


def recompilation(mended: bool) -> int:
    x, y = rows(4096)
    model = mlp(64)
    for _ in range(5):
        if not mended:
            compiled(model)
        model.fit(x, y, batch_size=64, verbose=0)
    return 4096


def healthy_cnn() -> int:
    data = tf.data.Dataset.from_tensor_slices(jpegs()).map(decode, AUTOTUNE).cache().shuffle(512)
    cnn(steps_per_execution=8).fit(data.batch(64).prefetch(AUTOTUNE), epochs=6, verbose=0)
    return 1024


def healthy_mlp() -> int:
    x, y = rows(16384)
    mlp(512, depth=3, steps_per_execution=16).fit(x, y, batch_size=128, epochs=3, verbose=0)
    return 16384


def healthy_text() -> int:
    x, y = np.random.default_rng(0).integers(0, 1000, (2048, 32)), rows(2048)[1]
    body = [layers.Embedding(1000, 64), layers.Bidirectional(layers.LSTM(64)), layers.Dense(CLASSES)]
    model = compiled(keras.Sequential([keras.Input((32,), dtype="int32"), *body]), steps_per_execution=8)
    model.fit(x, y, batch_size=64, epochs=3, verbose=0)
    return 2048


def healthy_files() -> int:
    """The map does the same in every epoch, but the step takes so long that a cache would save nothing of it."""
    x, y = images(4096)
    body = [layers.Conv2D(32, 3, activation="relu"), layers.Conv2D(64, 3, strides=2, activation="relu")]
    parts = [keras.Input((32, 32, 3)), layers.Rescaling(1 / 255), *body, layers.GlobalAveragePooling2D()]
    model = compiled(keras.Sequential([*parts, layers.Dense(CLASSES)]), steps_per_execution=8)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1024).batch(64)
    data = data.map(lambda image, label: (tf.image.flip_left_right(image), label), AUTOTUNE).prefetch(AUTOTUNE)
    model.fit(data, epochs=4, verbose=0)
    return 4096


PLANTED: dict[str, Callable[[bool], int]] = {
    each.__name__: each
    for each in (
        slow_map, small_batch, float64, retraces, python_generator, host_augmentation, no_cache, short_steps,
        host_metric, blocking_callback, misaligned_widths, shuffle_buffer, eager, host_copies, slow_replica,
        recompilation,
    )
}  # fmt: skip
HEALTHY: dict[str, Callable[[], int]] = {
    each.__name__: each for each in (healthy_cnn, healthy_mlp, healthy_text, healthy_files)
}
# The processor has no tensor cores, and augments as fast on the "device" as on the host.
NEEDS_GPU = ("misaligned_widths", "host_augmentation")
