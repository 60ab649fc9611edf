"""Models that are trained on the digits and then made hard to quantize, with the same float outputs.

Multiply channel c of a layer's result by t[c], and divide the weights that read it by t[c]. The float outputs do not
change, because ReLU, pooling and flattening preserve a positive factor. In int8, channels with small factors have too
few steps. Trained networks also have such channels; here the spread is a parameter. quantization_accuracy.py and the
tests use these models.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import keras
import numpy as np
from keras import layers

import tfopt
from tfopt.data import Examples
from tfopt.tasks.scorer import Scorer


def transformer(input_shape: tuple[int, ...], num_classes: int, *, width: int = 32, depth: int = 2) -> keras.Model:
    """Builds a small vision transformer: patches of 8x8 pixels, normalisation before attention and before the MLP."""
    inputs = keras.Input(input_shape, name="image")
    x = layers.Conv2D(width, 8, strides=8, name="patches")(inputs)
    x = layers.Reshape((-1, width), name="tokens")(x)
    for number in range(1, depth + 1):
        y = layers.LayerNormalization(name=f"norm{number}a")(x)
        y = layers.MultiHeadAttention(4, width // 4, name=f"attention{number}")(y, y)
        x = layers.Add(name=f"add{number}a")([x, y])
        y = layers.LayerNormalization(name=f"norm{number}b")(x)
        y = layers.Dense(2 * width, activation="gelu", name=f"expand{number}")(y)
        x = layers.Add(name=f"add{number}b")([x, layers.Dense(width, name=f"contract{number}")(y)])
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.Flatten(name="flatten")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits")(x), name="transformer")


def top1_accuracy(labels: np.ndarray, outputs: np.ndarray) -> float:
    """Returns the share of examples for which the output of the right class is the largest."""
    return Scorer("categorical_accuracy", labels, {"": outputs}).value({"": outputs})


BUILDERS = {
    "mlp": (tfopt.models.mlp, {}),
    "simple_cnn": (tfopt.models.simple_cnn, {}),
    "resnet_cifar": (tfopt.models.resnet_cifar, {"depth": 8, "width": 8}),
    "transformer": (transformer, {}),
}


def trained(name: str, examples: Examples, epochs: int, shift: int = 2, seed: int = 0) -> keras.Model:
    """Builds a model and trains it. Each epoch shifts the examples by new random numbers of pixels."""
    keras.utils.set_random_seed(seed)
    builder, arguments = BUILDERS[name]
    model = builder(examples.input_shape, examples.outputs, **arguments)
    steps = epochs * -(-len(examples.x_train) // 32)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, steps)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = 0.9  # the default 0.99 needs more steps than this training has
    for epoch in range(epochs):
        model.fit(shifted(examples.x_train, shift, seed=epoch), examples.y_train, batch_size=32, verbose=0)
    return model


def shifted(images: np.ndarray, shift: int, seed: int) -> np.ndarray:
    """Returns images [n, height, width, channels], each shifted by a random number of pixels up to a limit."""
    generator = np.random.default_rng(seed)
    padded = np.pad(images, ((0, 0), (shift, shift), (shift, shift), (0, 0)))
    height, width = images.shape[1:3]
    starts = generator.integers(0, 2 * shift + 1, (len(images), 2))
    return np.stack(
        [
            image[row : row + height, column : column + width]
            for image, (row, column) in zip(padded, starts, strict=True)
        ]
    )


def copy(model: keras.Model) -> keras.Model:
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    return twin


def spread(channels: int, decades: float, seed: int) -> np.ndarray:
    """Returns factors from 10^(-decades / 2) to 10^(decades / 2), evenly spaced in their logarithm, in random order."""
    exponents = np.linspace(-decades / 2, decades / 2, channels)
    return 10 ** np.random.default_rng(seed).permutation(exponents)


def outliers(channels: int, factor: float, seed: int, count: int = 2) -> np.ndarray:
    """Returns factors of 1, except for a few large ones."""
    factors = np.ones(channels)
    factors[np.random.default_rng(seed).choice(channels, count, replace=False)] = factor
    return factors


def rescale(model: keras.Model, writer: str, readers: Sequence[str], factors: np.ndarray) -> None:
    """Multiplies the channels that a layer writes by factors, and divides those that other layers read.

    Args:
        model: The model, which is changed.
        writer: A convolution, Dense or normalisation layer.
        readers: All layers that read its result, after homogeneous layers: Convolution, Dense or MultiHeadAttention.
        factors: One for each channel.
    """
    layer = model.get_layer(writer)
    weights = [layer.gamma, layer.beta] if hasattr(layer, "gamma") else [layer.kernel, layer.bias]
    for weight in weights:
        weight.assign(weight.numpy() * factors)
    for reader in readers:
        for kernel in _kernels(model.get_layer(reader)):
            value = kernel.numpy()
            axis = 2 if value.ndim == 4 else 0
            repeated = np.tile(factors, value.shape[axis] // len(factors))
            kernel.assign(value / repeated.reshape([-1 if index == axis else 1 for index in range(value.ndim)]))


def _kernels(layer: keras.layers.Layer) -> list[keras.Variable]:
    if isinstance(layer, layers.MultiHeadAttention):
        return [projection.kernel for projection in (layer.query_dense, layer.key_dense, layer.value_dense)]
    return [layer.kernel]


def wide_channels(
    model: keras.Model, decades: float = 4.0, writers: Sequence[str] = ("conv1", "conv2", "dense1", "dense2")
) -> keras.Model:
    """Returns an equivalent simple_cnn whose channel ranges differ by this number of powers of ten."""
    hard = copy(model)
    names = ["conv1", "conv2", "dense1", "dense2", "logits"]
    for number, (writer, reader) in enumerate(itertools.pairwise(names)):
        if writer in writers:
            rescale(hard, writer, [reader], spread(hard.get_layer(writer).kernel.shape[-1], decades, seed=number))
    return hard


def wide_blocks(
    model: keras.Model, decades: float = 4.0, blocks: tuple[str, ...] = ("stage1", "stage2")
) -> keras.Model:
    """Returns an equivalent resnet_cifar of depth 8 with wide ranges inside some residual blocks."""
    hard = copy(model)
    for number, block in enumerate(blocks):
        norm = f"{block}_block1_1_norm"
        factors = spread(hard.get_layer(norm).gamma.shape[0], decades, seed=number)
        rescale(hard, norm, [f"{block}_block1_2_conv"], factors)
    return hard


def outlier_channels(
    model: keras.Model, factor: float = 100.0, norms: Sequence[str] = ("norm1a", "norm1b", "norm2a", "norm2b", "norm")
) -> keras.Model:
    """Returns an equivalent transformer with two large channels in each of these normalisations."""
    hard = copy(model)
    for number, norm in enumerate(norms):
        reader = {"a": f"attention{norm[-2]}", "b": f"expand{norm[-2]}"}.get(norm[-1], "logits")
        rescale(hard, norm, [reader], outliers(hard.get_layer(norm).gamma.shape[0], factor, seed=number))
    return hard


def hot_pixels(model: keras.Model, images: np.ndarray, value: float = 1000.0) -> tuple[keras.Model, np.ndarray]:
    """Returns an mlp that ignores the upper left pixel, and images. In one of four images this pixel is very bright.

    No digit reaches this corner, so the model has learned nothing from it.
    """
    assert not images[:, 0, 0].any()
    hard = copy(model)
    kernel = hard.get_layer("dense1").kernel
    kernel.assign(np.where(np.arange(kernel.shape[0])[:, None] == 0, 0, kernel.numpy()))
    marked = images.copy()
    marked[::4, 0, 0] = value
    return hard, marked
