"""Models of keras.applications, and a transformer, trained on the digits, for accuracy measurements of int8.

    from trained_digits import BUILDERS, data, train

Random weights say little about the accuracy cost of quantization in a trained model, and trained ImageNet weights are
not available everywhere. These models train in minutes on a CPU. The same name and seed give the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import applications, layers
from sklearn.datasets import load_digits

SIZE, CLASSES, HELD_OUT, BATCH = 64, 10, 450, 32
OPTIONS = {"weights": None, "classes": CLASSES, "classifier_activation": None, "input_shape": (SIZE, SIZE, 3)}


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Images [n, 64, 64, 3] with values from 0 to 255, and their labels."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Builder:
    """The builder of a model, its number of epochs and its learning rate."""

    build: Callable[[], keras.Model]
    epochs: int
    learning_rate: float = 1e-3


@cache
def data() -> Digits:
    """Returns the enlarged digits of scikit-learn, with 450 digits held out."""
    digits = load_digits()
    images = digits.images.astype("float32") / 16
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], digits.target[order]
    images = tf.image.resize(images[..., None], (SIZE, SIZE)).numpy().repeat(3, -1) * 255
    return Digits(
        x_train=images[HELD_OUT:], y_train=labels[HELD_OUT:], x_test=images[:HELD_OUT], y_test=labels[:HELD_OUT]
    )


def train(name: str, seed: int = 0, directory: Path | None = None, epochs: int | None = None) -> keras.Model:
    """Returns a trained model.

    Args:
        name: One of BUILDERS.
        seed: The seed of the initial weights and of the order of the examples.
        directory: Holds the trained models as NAME_SEED.keras; a model that is already there is not trained again.
        epochs: Number of epochs, in place of the builder's own number.
    """
    file = directory and directory / f"{name}_{seed}.keras"
    if file and file.exists():
        return keras.saving.load_model(file, compile=False)
    digits, builder = data(), BUILDERS[name]
    epochs = epochs or builder.epochs
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model = builder.build()
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = 0.95  # the default 0.99 needs more steps than this training has
    steps = epochs * (len(digits.x_train) // BATCH + 1)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(builder.learning_rate, steps)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(digits.x_train, digits.y_train, batch_size=BATCH, epochs=epochs, verbose=0)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"unfinished_{file.name}")
        model.save(temporary)
        temporary.replace(file)
    return model


def convnext() -> keras.Model:
    """Builds a ConvNeXt as in keras.applications, with fewer and narrower blocks."""
    from keras.src.applications.convnext import ConvNeXt  # public Keras has only the five usual sizes

    return ConvNeXt(
        depths=[2, 2, 4, 2], projection_dims=[32, 64, 128, 256], name="convnext_small", drop_path_rate=0.1, **OPTIONS
    )


def gelu_transformer() -> keras.Model:
    """Builds a vision transformer: patches of 8x8 pixels, four blocks with GELU, normalisation before each part."""
    inputs = keras.Input((SIZE, SIZE, 3))
    x = layers.Rescaling(1 / 255)(inputs)
    x = layers.Conv2D(64, 8, strides=8)(x)
    x = layers.Reshape((64, 64))(x)
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 16)(y, y)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(64)(layers.Dense(256, activation="gelu")(y))
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Flatten()(x)), name="gelu_transformer")


BUILDERS: dict[str, Builder] = {
    "efficientnetv2b0": Builder(build=partial(applications.EfficientNetV2B0, **OPTIONS), epochs=14),
    "mobilenetv3small": Builder(build=partial(applications.MobileNetV3Small, **OPTIONS), epochs=25),
    "mobilenetv3large": Builder(build=partial(applications.MobileNetV3Large, **OPTIONS), epochs=20),
    "mobilenetv2": Builder(build=partial(applications.MobileNetV2, **OPTIONS), epochs=16),
    "resnet50v2": Builder(build=partial(applications.ResNet50V2, **OPTIONS), epochs=10),
    "densenet121": Builder(build=partial(applications.DenseNet121, **OPTIONS), epochs=10),
    "convnext": Builder(build=convnext, epochs=25),
    "gelu": Builder(build=gelu_transformer, epochs=25, learning_rate=7e-4),
}
