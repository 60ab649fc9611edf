"""The models of int8_savedmodel.py and their inputs.

The weights are random, but they behave like trained weights: batch normalisation is calibrated on the inputs, and each
residual branch adds little to its shortcut. Otherwise, a random network of this depth amplifies any rounding error a
hundredfold, and its int8 error has no meaning. If many layers are outside of residual branches, their values are
shifted for the same reason, so that most values pass the activation. The time does not depend on the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfopt.models import tcn, text_encoder, vit
from tfopt.models.table import PUBLISHED_MODELS

DAMPING = 0.2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model of the benchmark.

    Attributes:
        what: A description for the results.
        build: Makes the Keras model, of one input and one output.
        inputs: Makes a number of examples from a seed.
        family: "convolutional" or "transformer"; some runtimes have different settings for each family.
        branch_ends: Name endings of the batch normalisations that end a residual branch.
        shift: The value that the other batch normalisations add.
    """

    what: str
    build: Callable[[], keras.Model]
    inputs: Callable[[int, int], np.ndarray]
    family: str = "convolutional"
    branch_ends: str | None = None
    shift: float = 0.0


def make(case: Case) -> keras.Model:
    """Builds the model with weights that behave like trained ones."""
    keras.backend.clear_session()  # numbers in names start again, so that the input has the same name in every run
    keras.utils.set_random_seed(0)
    model = case.build()
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            if case.branch_ends is not None and layer.name.endswith(case.branch_ends):
                layer.gamma.assign(DAMPING * layer.gamma)
            else:
                layer.beta.assign(layer.beta + case.shift)
    calibrate_batch_norm(model, case.inputs(32, 0))
    return model


def calibrate_batch_norm(model: keras.Model, examples: np.ndarray) -> None:
    """Sets each batch normalisation's moving statistics to those of the examples."""
    norms = [layer for layer in model.layers if isinstance(layer, layers.BatchNormalization)]
    if not norms:
        return
    momenta = [layer.momentum for layer in norms]
    dropouts = [layer for layer in model.layers if isinstance(layer, layers.Dropout)]
    rates = [layer.rate for layer in dropouts]
    for layer in norms:
        layer.momentum = 0.0
    for layer in dropouts:
        layer.rate = 0.0
    model(examples, training=True)
    for layer, momentum in zip(norms, momenta, strict=True):
        layer.momentum = momentum
    for layer, rate in zip(dropouts, rates, strict=True):
        layer.rate = rate


def smooth_images(count: int, seed: int = 0, size: int = 224) -> np.ndarray:
    """Returns images with different large shapes, like photographs and unlike noise."""
    coarse = np.random.default_rng(seed).random((count, 7, 7, 3), dtype=np.float32)
    return tf.image.resize(coarse, (size, size), method="bicubic").numpy()


def sentences(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 30_522, (count, 128), dtype=np.int32)


def signals(count: int, seed: int = 0) -> np.ndarray:
    """Returns signals that change slowly, like measured signals and unlike noise."""
    coarse = np.random.default_rng(seed).normal(size=(count, 64, 1, 32)).astype(np.float32)
    return tf.image.resize(coarse, (1024, 1), method="bicubic").numpy()[:, :, 0]


def tiny() -> keras.Model:
    images = keras.Input((32, 32, 3), name="image")
    x = shortcut = layers.Conv2D(16, 3, padding="same", activation="relu")(images)
    x = layers.BatchNormalization(name="last_bn")(layers.Conv2D(16, 3, padding="same", use_bias=False)(x))
    x = layers.ReLU()(layers.Add()([x, shortcut]))
    return keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)), name="tiny")


MODELS = {
    "resnet50": Case(
        what="ResNet-50, 224x224",
        build=PUBLISHED_MODELS["keras:ResNet50"].build,
        inputs=smooth_images,
        branch_ends="_3_bn",
    ),
    "mobilenetv2": Case(
        what="MobileNetV2, 224x224",
        build=PUBLISHED_MODELS["keras:MobileNetV2"].build,
        inputs=smooth_images,
        branch_ends="project_BN",
        shift=1.0,
    ),
    "efficientnetv2_b0": Case(
        what="EfficientNetV2-B0, 224x224",
        build=PUBLISHED_MODELS["keras:EfficientNetV2B0"].build,
        inputs=smooth_images,
        branch_ends="project_bn",
        shift=1.0,
    ),
    "bert_base": Case(
        what="BERT-base encoder with a classifier on the first of 128 tokens",
        build=lambda: text_encoder((128,), 1000, pad_token=None),
        inputs=sentences,
        family="transformer",
    ),
    "vit_small": Case(
        what="ViT-small, patches of 16, 224x224",
        build=lambda: vit((224, 224, 3), 1000, width=384, heads=6, pool="mean"),
        inputs=smooth_images,
        family="transformer",
    ),
    "tcn": Case(
        what="temporal convolutional network, 1024 steps",
        build=lambda: tcn((1024, 32), 10, pool="mean"),
        inputs=signals,
        branch_ends="_2_norm",
    ),
    "tiny": Case(
        what="two convolutions, 32x32, to try the benchmark itself",
        build=tiny,
        inputs=lambda count, seed: smooth_images(count, seed, size=32),
        branch_ends="last_bn",
    ),
}
