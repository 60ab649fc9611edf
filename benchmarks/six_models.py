"""Six kinds of models that users have, each with learnable data and its compile settings.

The models are small: a training takes seconds. They have no dropout and no batch normalization, so that trainings can
be compared. Models with embeddings train with SGD, because SGD gives the same embedding update in tfopt and in Keras;
see docs/training.md. The others train with Adam. Its epsilon is larger than the default. With the default, a gradient
that is zero except for rounding moves its weight by a full step, up or down at random.

The U-Net and the siamese model have smooth activations. With ReLU, a sum that is zero except for rounding decides
whether a gradient passes. Two runs of plain Keras then differ by 5e-3 or 7e-4 if their initial weights differ by 1e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers

Examples = tuple[Any, ...]
WORDS, LONGEST = 300, 12


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of model.

    Attributes:
        title: The name in the table.
        build: Creates the model, with the same weights each time.
        examples: Creates (inputs, labels) or (inputs, labels, sample weights) for a number of examples, from a seed.
        settings: Arguments of `compile`, created again each time.
        scores: `metric` of `tfopt.verify`.
    """

    title: str
    build: Callable[[], keras.Model]
    examples: Callable[[int, int], Examples]
    settings: Callable[[], dict[str, Any]]
    scores: Any = field(default="accuracy")


@keras.saving.register_keras_serializable("tfopt_benchmarks")
class Positions(layers.Layer):
    """Adds a trained vector to each position of a sequence of any length up to LONGEST."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.supports_masking = True

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(LONGEST, shape[-1]), initializer="random_normal", name="table")

    def call(self, x: Any) -> Any:
        return x + self.table[: keras.ops.shape(x)[1]]


def transformer() -> keras.Model:
    """Two blocks on tokens of an open length, with the mask of the padding."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    h = Positions()(layers.Embedding(WORDS, 64, mask_zero=True)(tokens))
    for _ in range(2):
        normed = layers.LayerNormalization()(h)
        h = layers.Add()([h, layers.MultiHeadAttention(4, 16)(normed, normed)])
        normed = layers.LayerNormalization()(h)
        h = layers.Add()([h, layers.Dense(64)(layers.Dense(128, activation="gelu")(normed))])
    h = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(h))
    return keras.Model(tokens, layers.Dense(3, dtype="float32", name="topic")(h))


def bilstm() -> keras.Model:
    """Two bidirectional LSTM layers that skip the padding."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    h = layers.Embedding(WORDS, 64, "glorot_normal", mask_zero=True)(tokens)
    h = layers.Bidirectional(layers.LSTM(16, return_sequences=True))(h)
    h = layers.Bidirectional(layers.LSTM(16))(h)
    return keras.Model(tokens, layers.Dense(3, dtype="float32", name="topic")(h))


def unet() -> keras.Model:
    """Two levels with a skip connection; one logit for each pixel."""
    image = keras.Input((16, 16, 1), name="image")
    fine = layers.Conv2D(16, 3, padding="same", activation="gelu")(image)
    coarse = layers.Conv2D(32, 3, padding="same", activation="gelu")(layers.MaxPooling2D()(fine))
    up = layers.Conv2DTranspose(16, 2, strides=2, activation="gelu")(coarse)
    h = layers.Conv2D(16, 3, padding="same", activation="gelu")(layers.Concatenate()([up, fine]))
    return keras.Model(image, layers.Conv2D(1, 1, dtype="float32", name="mask")(h))


def two_by_two() -> keras.Model:
    """Two inputs by name, an image and a table row; two outputs by name, a class and a number."""
    inputs = {"image": keras.Input((12, 12, 1), name="image"), "row": keras.Input((6,), name="row")}
    h = layers.Conv2D(16, 3, activation="relu")(inputs["image"])
    h = layers.GlobalAveragePooling2D()(layers.Conv2D(32, 3, activation="relu")(h))
    h = layers.Concatenate()([h, layers.Dense(32, activation="relu")(inputs["row"])])
    h = layers.Dense(32, activation="relu")(h)
    kind, price = layers.Dense(3, dtype="float32", name="kind")(h), layers.Dense(1, dtype="float32", name="price")(h)
    return keras.Model(inputs, {"kind": kind, "price": price})


@keras.saving.register_keras_serializable("tfopt_benchmarks")
class Penalized(keras.Model):
    """Dense layers, with a penalty on the output of the first one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.hidden = layers.Dense(128, activation="relu")
        self.middle = layers.Dense(64, activation="relu")
        self.kind = layers.Dense(3, dtype="float32")

    def call(self, x: Any) -> Any:
        h = self.hidden(x)
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(h)))
        return self.kind(self.middle(h))


def penalized() -> keras.Model:
    model = Penalized()
    model(np.zeros((1, 20), "float32"))
    return model


def siamese() -> keras.Model:
    """One encoder, called for each of two images. A logit says whether both images show the same."""
    image = keras.Input((12, 12, 1))
    h = layers.Conv2D(16, 3, activation="gelu")(image)
    h = layers.GlobalAveragePooling2D()(layers.Conv2D(32, 3, activation="gelu")(h))
    encoder = keras.Model(image, layers.Dense(16)(h), name="encoder")
    first, second = keras.Input((12, 12, 1), name="first"), keras.Input((12, 12, 1), name="second")
    apart = layers.Subtract()([encoder(first), encoder(second)])
    h = layers.Dense(16, activation="gelu")(layers.Multiply()([apart, apart]))
    return keras.Model([first, second], layers.Dense(1, dtype="float32", name="same")(h))


def sentences(count: int, seed: int) -> Examples:
    """Sentences of 4 to LONGEST words, padded with zeros. Words of the topic are more frequent."""
    generator = np.random.default_rng(seed)
    topic = generator.integers(0, 3, count)
    words = generator.integers(1, WORDS, (count, LONGEST))
    own = 1 + topic[:, None] * (WORDS // 3) + generator.integers(0, WORDS // 10, words.shape)
    words = np.where(generator.random(words.shape) < 0.7, own, words)
    lengths = generator.integers(4, LONGEST + 1, count)
    return np.where(np.arange(LONGEST) < lengths[:, None], words, 0).astype("int32"), topic.astype("int32")


def blobs(count: int, seed: int) -> Examples:
    """Noisy images of a bright square, its mask, and pixel weights: the border of an image has less weight."""
    generator = np.random.default_rng(seed)
    corner = generator.integers(1, 9, (count, 2, 1))
    inside = (np.arange(16) >= corner) & (np.arange(16) < corner + 6)
    mask = (inside[:, 0, :, None] & inside[:, 1, None, :])[..., None].astype("float32")
    image = mask + generator.normal(scale=0.5, size=mask.shape)
    weight = np.full((count, 16, 16), 0.25, "float32")
    weight[:, 2:-2, 2:-2] = 1 + generator.random((count, 1, 1))
    return image.astype("float32"), mask, weight


def pictures(count: int, seed: int, kinds: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Stripes, chequers or blanks, with noise."""
    generator = np.random.default_rng(seed)
    kinds = generator.integers(0, 3, count) if kinds is None else kinds
    row, column = np.indices((12, 12))
    patterns = np.stack([row % 2, (row + column) % 2, 0.5 + 0 * row])
    image = patterns[kinds] + generator.normal(scale=0.3, size=(count, 12, 12))
    return image[..., None].astype("float32"), kinds.astype("int32")


def pictures_with_rows(count: int, seed: int) -> Examples:
    image, kind = pictures(count, seed)
    row = np.random.default_rng(seed + 1).normal(size=(count, 6)).astype("float32")
    price = (row[:, :1] - row[:, 1:2] + kind[:, None]).astype("float32")
    return {"image": image, "row": row}, {"kind": kind, "price": price}


def pairs(count: int, seed: int) -> Examples:
    generator = np.random.default_rng(seed)
    first = generator.integers(0, 3, count)
    same = generator.random(count) < 0.5
    second = np.where(same, first, (first + generator.integers(1, 3, count)) % 3)
    images = tuple(pictures(count, seed + index, kinds)[0] for index, kinds in enumerate((first, second), start=1))
    return images, same[:, None].astype("float32")


def rows(count: int, seed: int) -> Examples:
    generator = np.random.default_rng(seed)
    kind = generator.integers(0, 3, count)
    return (generator.normal(size=(count, 20)) + np.eye(3, 20)[kind] * 3).astype("float32"), kind.astype("int32")


def _classes(optimizer: Callable[[], keras.optimizers.Optimizer]) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "optimizer": optimizer(),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }


def _yes_or_no(metrics: str, epsilon: float = 1e-4) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "optimizer": adam(epsilon),
        "loss": keras.losses.BinaryCrossentropy(from_logits=True),
        metrics: [keras.metrics.BinaryAccuracy(threshold=0, name="accuracy")],
    }


def _both() -> dict[str, Any]:
    return {
        "optimizer": adam(),
        "loss": {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "price": "mse"},
        "loss_weights": {"kind": 1.0, "price": 0.5},
        "metrics": {"kind": ["accuracy"], "price": ["mae"]},
    }


def both_right(labels: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> float:
    """Returns the share of examples with the correct kind and a price error of at most 1."""
    kind = outputs["kind"].argmax(-1) == labels["kind"]
    return float((kind & (np.abs(outputs["price"] - labels["price"])[:, 0] < 1)).mean())


def sgd(rate: float) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate, momentum=0.9)


def adam(epsilon: float = 1e-4) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.005, epsilon=epsilon)


KINDS: dict[str, Kind] = {
    "transformer": Kind(
        title="text transformer, open length",
        build=transformer,
        examples=sentences,
        settings=_classes(lambda: sgd(0.02)),
    ),
    "bilstm": Kind(title="BiLSTM with masks", build=bilstm, examples=sentences, settings=_classes(lambda: sgd(0.2))),
    "unet": Kind(title="U-Net, weighted pixels", build=unet, examples=blobs, settings=_yes_or_no("weighted_metrics")),
    "two_by_two": Kind(
        title="two inputs, two outputs, dicts",
        build=two_by_two,
        examples=pictures_with_rows,
        settings=_both,
        scores=both_right,
    ),
    "penalized": Kind(title="subclassed, add_loss", build=penalized, examples=rows, settings=_classes(adam)),
    "siamese": Kind(title="siamese", build=siamese, examples=pairs, settings=_yes_or_no("metrics", 1e-6)),
}
