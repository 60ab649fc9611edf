"""Every layer of Keras against the plain TensorFlow operations that its mathematics needs, in export and training.

    python benchmarks/layer_sweep.py [--layers Conv2D LSTM ...]

forward   a layer alone: tfopt's float32 artifact, `model.export`, and a SavedModel of the plain operations, loaded side
          by side and called in turns with the same batch
training  its output and the gradients by its weights and inputs, in a compiled function as tfopt's step traces it, as
          Keras' step traces it, and by plain operations, in turns
          Networks of keras.applications, one of each module, have no plain counterpart: their export is timed against
          Keras' own

A layer that takes over 1.2 times as long as its plain operations needs a reason in layers_page.py. Layers that compute
nothing at inference, or only look things up, are left out (docs/layers.md). Results go to
benchmarks/results/layer_sweep.json. The run takes some half an hour on two cores.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tyro
from keras import layers

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect
from tfopt.timing import call_seconds, in_turns
from tfopt.training.step.step import without_islands

RESULTS = Path(__file__).parent / "results"
BATCH = 8
SIDES = ("plain", "keras", "tfopt")


@dataclass(frozen=True)
class Case:
    make: Callable[[], Any]
    shape: tuple[int, ...]
    plain: Callable[..., Any]  # of the layer and its inputs
    inputs: int = 1
    classes: int = 0  # inputs are class numbers below it
    trains: bool = True
    spread: bool = False  # inputs are arguments of their own


def nd(op: str, rank: int) -> Any:
    return getattr(tf.nn, op.format(rank))


def convolution(rank: int, **more: Any) -> Case:
    size = {1: (1024, 64), 2: (56, 56, 64), 3: (16, 28, 28, 16)}[rank]
    make = partial(getattr(layers, f"Conv{rank}D"), size[-1], 3, padding="same", **more)
    return Case(
        make,
        size,
        lambda layer, x: tf.nn.bias_add(
            tf.nn.convolution(x, layer.kernel, padding="SAME", dilations=more.get("dilation_rate")), layer.bias
        ),
    )


def transposed(rank: int) -> Case:
    size = {1: (512, 64), 2: (28, 28, 64), 3: (8, 14, 14, 16)}[rank]

    def plain(layer: Any, x: Any) -> Any:
        shape = [BATCH, *(2 * each for each in size[:-1]), size[-1]]
        return tf.nn.bias_add(tf.nn.conv_transpose(x, layer.kernel, shape, 2, "SAME"), layer.bias)

    return Case(partial(getattr(layers, f"Conv{rank}DTranspose"), size[-1], 3, 2, padding="same"), size, plain)


def pooling(name: str, rank: int) -> Case:
    size = {1: (1024, 128), 2: (56, 56, 128), 3: (16, 28, 28, 32)}[rank]
    kind = "MAX" if name.startswith("Max") else "AVG"
    return Case(
        partial(getattr(layers, f"{name}Pooling{rank}D"), 2),
        size,
        lambda layer, x: tf.nn.pool(x, [2] * rank, kind, [2] * rank),
    )


def overall(name: str, rank: int) -> Case:
    """Pools over all places."""
    size = {1: (1024, 128), 2: (56, 56, 128), 3: (16, 28, 28, 32)}[rank]
    reduce = tf.reduce_max if "Max" in name else tf.reduce_mean
    make = partial(getattr(layers, f"{name}Pooling{rank}D"), *((1,) if name.startswith("Adaptive") else ()))
    if name.startswith("Adaptive"):
        return Case(make, size, lambda layer, x: reduce(x, list(range(1, rank + 1)), keepdims=True))
    return Case(make, size, lambda layer, x: reduce(x, list(range(1, rank + 1))))


def adaptive(name: str, rank: int) -> Case:
    """Pools to half of the places, so that all windows are equal."""
    size = {1: (1024, 64), 2: (56, 56, 64), 3: (16, 28, 28, 16)}[rank]
    half = tuple(each // 2 for each in size[:-1])
    kind = "MAX" if name.endswith("Max") else "AVG"
    make = partial(getattr(layers, f"{name}Pooling{rank}D"), half if rank > 1 else half[0])
    return Case(make, size, lambda layer, x: tf.nn.pool(x, [2] * rank, kind, [2] * rank))


IMAGE, ROWS, SEQUENCE = (56, 56, 64), (4096,), (128, 256)


def elementwise(make: Callable[[], Any], plain: Callable[..., Any], shape: tuple[int, ...] = IMAGE) -> Case:
    return Case(make, shape, lambda layer, x: plain(x))


def merging(make: Callable[[], Any], plain: Callable[..., Any]) -> Case:
    return Case(make, IMAGE, lambda layer, *x: plain(*x), inputs=2)


def attention(layer: Any, query: Any, value: Any) -> Any:
    return tf.matmul(tf.nn.softmax(tf.matmul(query, value, transpose_b=True)), value)


def additive(layer: Any, query: Any, value: Any) -> Any:
    scores = tf.reduce_sum(layer.scale * tf.tanh(query[:, :, None] + value[:, None]), -1)
    return tf.matmul(tf.nn.softmax(scores), value)


def heads(layer: Any, query: Any, value: Any) -> Any:
    """Attention with 4 heads of 64, by products of matrices."""

    kernels, biases = layer.weights[::2], layer.weights[1::2]  # of query, key, value and output

    def projected(place: int, x: Any) -> Any:
        product = tf.matmul(tf.reshape(x, [-1, SEQUENCE[1]]), tf.reshape(kernels[place], [SEQUENCE[1], -1]))
        product = tf.nn.bias_add(product, tf.reshape(biases[place], [-1]))
        return tf.transpose(tf.reshape(product, [BATCH, SEQUENCE[0], -1, 64]), [0, 2, 1, 3])

    q, k, v = projected(0, query), projected(1, value), projected(2, value)
    if k.shape[1] != q.shape[1]:
        k, v = (tf.repeat(each, q.shape[1] // k.shape[1], axis=1) for each in (k, v))
    mixed = tf.matmul(tf.nn.softmax(tf.matmul(q * 0.125, k, transpose_b=True)), v)
    mixed = tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [BATCH * SEQUENCE[0], -1])
    product = tf.nn.bias_add(tf.matmul(mixed, tf.reshape(kernels[3], [mixed.shape[1], -1])), biases[3])
    return tf.reshape(product, [BATCH, *SEQUENCE])


def standardized(x: Any, axes: list[int], epsilon: float = 1e-3) -> Any:
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + epsilon)


def grouped_norm(layer: Any, x: Any) -> Any:
    y = standardized(tf.reshape(x, [BATCH, 56, 56, 16, 4]), [1, 2, 4])
    return tf.reshape(y, [BATCH, *IMAGE]) * layer.gamma + layer.beta


def steps(layer: Any, x: Any, step: Callable[..., Any], states: int) -> Any:
    """The last output of a loop over time, as short as TensorFlow writes one."""
    each = tf.unstack(x, axis=1)
    state = (tf.zeros([BATCH, layer.units]),) * states
    for inputs in each:
        state = step(inputs, *state)
    return state[0]


def lstm(layer: Any, x: Any) -> Any:
    cell = layer.cell

    def step(inputs: Any, h: Any, c: Any) -> Any:
        gates = tf.nn.bias_add(tf.matmul(inputs, cell.kernel) + tf.matmul(h, cell.recurrent_kernel), cell.bias)
        i, f, g, o = tf.split(gates, 4, 1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
        return tf.sigmoid(o) * tf.tanh(c), c

    return steps(layer, x, step, 2)


def gru(layer: Any, x: Any) -> Any:
    cell = layer.cell

    def step(inputs: Any, h: Any) -> Any:
        xz, xr, xh = tf.split(tf.nn.bias_add(tf.matmul(inputs, cell.kernel), cell.bias[0]), 3, 1)
        hz, hr, hh = tf.split(tf.nn.bias_add(tf.matmul(h, cell.recurrent_kernel), cell.bias[1]), 3, 1)
        z, r = tf.sigmoid(xz + hz), tf.sigmoid(xr + hr)
        return (z * h + (1 - z) * tf.tanh(xh + r * hh),)

    return steps(layer, x, step, 1)


def simple_rnn(layer: Any, x: Any) -> Any:
    cell = layer.cell

    def step(inputs: Any, h: Any) -> Any:
        return (
            tf.tanh(tf.nn.bias_add(tf.matmul(inputs, cell.kernel), cell.bias) + tf.matmul(h, cell.recurrent_kernel)),
        )

    return steps(layer, x, step, 1)


def conv_lstm(rank: int) -> Case:
    size = {1: (8, 64, 16), 2: (8, 16, 16, 16), 3: (4, 8, 8, 8, 8)}[rank]

    def plain(layer: Any, x: Any) -> Any:
        cell, h = layer.cell, tf.zeros([BATCH, *size[1:]])
        c = h
        for inputs in tf.unstack(x, axis=1):
            gates = tf.nn.convolution(inputs, cell.kernel, padding="SAME") + tf.nn.convolution(
                h, cell.recurrent_kernel, padding="SAME"
            )
            i, f, g, o = tf.split(tf.nn.bias_add(gates, cell.bias), 4, -1)
            c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
            h = tf.sigmoid(o) * tf.tanh(c)
        return h

    make = partial(getattr(layers, f"ConvLSTM{rank}D"), size[-1], 3, padding="same", recurrent_activation="sigmoid")
    return Case(make, size, plain)


def separable(layer: Any, x: Any) -> Any:
    return tf.nn.bias_add(
        tf.nn.separable_conv2d(x, layer.depthwise_kernel, layer.pointwise_kernel, [1, 1, 1, 1], "SAME"), layer.bias
    )


def depthwise_1d(x: Any, kernel: Any) -> Any:
    return tf.nn.depthwise_conv2d(x[:, None], kernel[None], [1, 1, 1, 1], "SAME")[:, 0]


CASES: dict[str, Case] = {
    **{f"Conv{rank}D": convolution(rank) for rank in (1, 2, 3)},
    "Conv2D, dilation 2": convolution(2, dilation_rate=2),
    "Conv2D, 16 groups": convolution(2, groups=16),
    "Conv2D, 64 groups": Case(
        partial(layers.Conv2D, 64, 3, padding="same", groups=64),
        IMAGE,
        lambda layer, x: tf.nn.bias_add(
            tf.nn.depthwise_conv2d(x, tf.transpose(layer.kernel, [0, 1, 3, 2]), [1, 1, 1, 1], "SAME"), layer.bias
        ),
    ),
    **{f"Conv{rank}DTranspose": transposed(rank) for rank in (1, 2, 3)},
    "DepthwiseConv1D": Case(
        partial(layers.DepthwiseConv1D, 3, padding="same"),
        (1024, 64),
        lambda layer, x: tf.nn.bias_add(depthwise_1d(x, layer.kernel), layer.bias),
    ),
    **{
        f"DepthwiseConv2D, {size}x{size}": Case(
            partial(layers.DepthwiseConv2D, size, padding="same"),
            IMAGE,
            lambda layer, x: tf.nn.bias_add(tf.nn.depthwise_conv2d(x, layer.kernel, [1, 1, 1, 1], "SAME"), layer.bias),
        )
        for size in (3, 7)
    },
    "SeparableConv1D": Case(
        partial(layers.SeparableConv1D, 64, 3, padding="same"),
        (1024, 64),
        lambda layer, x: tf.nn.bias_add(
            tf.nn.conv1d(depthwise_1d(x, layer.depthwise_kernel), layer.pointwise_kernel, 1, "SAME"), layer.bias
        ),
    ),
    "SeparableConv2D": Case(partial(layers.SeparableConv2D, 64, 3, padding="same"), IMAGE, separable),
    "Dense": Case(partial(layers.Dense, 1024), (1024,), lambda layer, x: tf.nn.bias_add(x @ layer.kernel, layer.bias)),
    "Dense of sequences": Case(
        partial(layers.Dense, 256),
        SEQUENCE,
        lambda layer, x: tf.reshape(
            tf.nn.bias_add(tf.reshape(x, [-1, SEQUENCE[1]]) @ layer.kernel, layer.bias), [BATCH, *SEQUENCE]
        ),
    ),
    "EinsumDense": Case(
        partial(layers.EinsumDense, "abc,cd->abd", (None, 256), bias_axes="d"),
        SEQUENCE,
        lambda layer, x: tf.reshape(
            tf.nn.bias_add(tf.reshape(x, [-1, SEQUENCE[1]]) @ layer.kernel, layer.bias), [BATCH, *SEQUENCE]
        ),
    ),
    "Embedding": Case(
        partial(layers.Embedding, 10_000, 256), (512,), lambda layer, x: tf.gather(layer.embeddings, x), classes=10_000
    ),
    "ReversibleEmbedding": Case(
        partial(layers.ReversibleEmbedding, 10_000, 256),
        (512,),
        lambda layer, x: tf.gather(layer.embeddings, x),
        classes=10_000,
    ),
    **{f"{name}Pooling{rank}D": pooling(name, rank) for name in ("Max", "Average") for rank in (1, 2, 3)},
    **{f"{name}Pooling{rank}D": overall(name, rank) for name in ("GlobalMax", "GlobalAverage") for rank in (1, 2, 3)},
    **{
        f"{name}Pooling{rank}D": adaptive(name, rank)
        for name in ("AdaptiveMax", "AdaptiveAverage")
        for rank in (1, 2, 3)
    },
    "BatchNormalization": Case(
        layers.BatchNormalization,
        IMAGE,
        lambda layer, x: tf.compat.v1.nn.fused_batch_norm(
            x, layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance, 1e-3, is_training=False
        )[0],
        trains=False,  # its statistics: measured in benchmarks/training_overhead.py as part of networks
    ),
    "LayerNormalization": Case(
        layers.LayerNormalization, SEQUENCE, lambda layer, x: standardized(x, [-1]) * layer.gamma + layer.beta
    ),
    "RMSNormalization": Case(
        layers.RMSNormalization,
        SEQUENCE,
        lambda layer, x: x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-6) * layer.scale,
    ),
    "GroupNormalization": Case(partial(layers.GroupNormalization, 16), IMAGE, grouped_norm),
    "UnitNormalization": elementwise(layers.UnitNormalization, lambda x: tf.math.l2_normalize(x, -1), SEQUENCE),
    "SpectralNormalization": Case(
        lambda: layers.SpectralNormalization(layers.Dense(1024)),
        (1024,),
        lambda layer, x: tf.nn.bias_add(x @ layer.layer.kernel, layer.layer.bias),
        trains=False,  # changes its kernel in each step
    ),
    "Normalization": elementwise(lambda: layers.Normalization(mean=1.0, variance=4.0), lambda x: (x - 1.0) * 0.5),
    "Rescaling": elementwise(lambda: layers.Rescaling(1 / 255, 0.5), lambda x: x * (1 / 255) + 0.5),
    **{
        f"Activation, {name}": elementwise(partial(layers.Activation, name), plain)
        for name, plain in {
            "relu6": tf.nn.relu6,
            "silu": tf.nn.silu,
            "gelu": partial(tf.nn.gelu, approximate=False),
            "sigmoid": tf.sigmoid,
            "tanh": tf.tanh,
            "softplus": tf.nn.softplus,
            "selu": tf.nn.selu,
            "mish": lambda x: x * tf.tanh(tf.nn.softplus(x)),
            "hard_silu": lambda x: x * tf.nn.relu6(x + 3) * (1 / 6),
            "log_softmax": tf.nn.log_softmax,
        }.items()
    },
    "ReLU": elementwise(layers.ReLU, tf.nn.relu),
    "LeakyReLU": elementwise(layers.LeakyReLU, partial(tf.nn.leaky_relu, alpha=0.3)),
    "ELU": elementwise(layers.ELU, tf.nn.elu),
    "PReLU": Case(
        partial(layers.PReLU, shared_axes=(1, 2)),
        IMAGE,
        lambda layer, x: tf.nn.relu(x) - layer.alpha * tf.nn.relu(-x),
    ),
    "Softmax": elementwise(layers.Softmax, tf.nn.softmax),
    "Add": merging(layers.Add, tf.add),
    "Subtract": merging(layers.Subtract, tf.subtract),
    "Multiply": merging(layers.Multiply, tf.multiply),
    "Average": merging(layers.Average, lambda x, y: (x + y) * 0.5),
    "Maximum": merging(layers.Maximum, tf.maximum),
    "Minimum": merging(layers.Minimum, tf.minimum),
    "Concatenate": merging(layers.Concatenate, lambda *x: tf.concat(x, -1)),
    "Dot": Case(partial(layers.Dot, axes=2), SEQUENCE, lambda layer, x, y: tf.matmul(x, y, transpose_b=True), inputs=2),
    "Attention": Case(layers.Attention, SEQUENCE, attention, inputs=2),
    "AdditiveAttention": Case(layers.AdditiveAttention, (64, 64), additive, inputs=2),
    "MultiHeadAttention": Case(partial(layers.MultiHeadAttention, 4, 64), SEQUENCE, heads, inputs=2, spread=True),
    "GroupQueryAttention": Case(partial(layers.GroupQueryAttention, 64, 4, 2), SEQUENCE, heads, inputs=2, spread=True),
    "LSTM": Case(partial(layers.LSTM, 64), (32, 64), lstm),
    "GRU": Case(partial(layers.GRU, 64), (32, 64), gru),
    "SimpleRNN": Case(partial(layers.SimpleRNN, 64), (32, 64), simple_rnn),
    "Bidirectional": Case(
        lambda: layers.Bidirectional(layers.LSTM(64)),
        (32, 64),
        lambda layer, x: tf.concat([lstm(layer.forward_layer, x), lstm(layer.backward_layer, x[:, ::-1])], -1),
    ),
    "RNN": Case(
        lambda: layers.RNN([layers.SimpleRNNCell(64), layers.SimpleRNNCell(64)]),
        (32, 64),
        lambda layer, x: stacked(layer, x),
    ),
    **{f"ConvLSTM{rank}D": conv_lstm(rank) for rank in (1, 2, 3)},
    "TimeDistributed": Case(
        lambda: layers.TimeDistributed(layers.Dense(256)),
        SEQUENCE,
        lambda layer, x: tf.reshape(
            tf.nn.bias_add(tf.reshape(x, [-1, SEQUENCE[1]]) @ layer.layer.kernel, layer.layer.bias), [BATCH, *SEQUENCE]
        ),
    ),
    "Flatten": elementwise(layers.Flatten, lambda x: tf.reshape(x, [BATCH, -1])),
    "Permute": elementwise(partial(layers.Permute, (3, 1, 2)), lambda x: tf.transpose(x, [0, 3, 1, 2])),
    "RepeatVector": elementwise(partial(layers.RepeatVector, 64), lambda x: tf.tile(x[:, None], [1, 64, 1]), ROWS),
    **{
        f"UpSampling{rank}D": elementwise(partial(getattr(layers, f"UpSampling{rank}D"), 2), plain, shape)
        for rank, plain, shape in (
            (1, lambda x: tf.repeat(x, 2, 1), (512, 128)),
            (2, lambda x: tf.compat.v1.image.resize_nearest_neighbor(x, [112, 112]), IMAGE),
            (3, lambda x: tf.repeat(tf.repeat(tf.repeat(x, 2, 1), 2, 2), 2, 3), (8, 14, 14, 32)),
        )
    },
    **{
        f"ZeroPadding{rank}D": elementwise(
            partial(getattr(layers, f"ZeroPadding{rank}D"), 1),
            lambda x: tf.pad(x, [[0, 0], *[[1, 1]] * (x.shape.rank - 2), [0, 0]]),
            shape,
        )
        for rank, shape in ((1, (1024, 128)), (2, IMAGE), (3, (16, 28, 28, 16)))
    },
    "Cropping1D": elementwise(partial(layers.Cropping1D, 2), lambda x: x[:, 2:-2], (1024, 128)),
    "Cropping2D": elementwise(partial(layers.Cropping2D, 2), lambda x: x[:, 2:-2, 2:-2]),
    "Cropping3D": elementwise(partial(layers.Cropping3D, 2), lambda x: x[:, 2:-2, 2:-2, 2:-2], (16, 28, 28, 16)),
    "CenterCrop": elementwise(partial(layers.CenterCrop, 40, 40), lambda x: x[:, 8:48, 8:48]),
    "Resizing": elementwise(
        partial(layers.Resizing, 80, 80),
        lambda x: tf.compat.v1.image.resize_bilinear(x, [80, 80], half_pixel_centers=True),
    ),
    "CategoryEncoding": Case(
        partial(layers.CategoryEncoding, 1000, output_mode="one_hot"),
        (256,),
        lambda layer, x: tf.one_hot(x, 1000),
        classes=1000,
        trains=False,
    ),
    "Discretization": elementwise(
        partial(layers.Discretization, [-1.0, 0.0, 1.0]),
        lambda x: tf.raw_ops.Bucketize(input=x, boundaries=[-1.0, 0.0, 1.0]),
    ),
    "STFTSpectrogram": elementwise(
        lambda: layers.STFTSpectrogram(
            mode="magnitude", scaling=None, frame_length=256, frame_step=128, fft_length=256
        ),
        lambda x: tf.abs(tf.signal.stft(tf.squeeze(x, -1), 256, 128)),
        (16_384, 1),
    ),
    "MelSpectrogram": elementwise(
        lambda: layers.MelSpectrogram(512, 256, num_mel_bins=80, power_to_db=False, mag_exp=1.0),
        lambda x: tf.transpose(
            tf.abs(tf.signal.stft(tf.pad(x, [[0, 0], [256, 256]], "REFLECT"), 512, 256))
            @ tf.signal.linear_to_mel_weight_matrix(80, 257, 16_000, 20.0, 8_000.0),
            [0, 2, 1],
        ),
        (16_384,),
    ),
}


def stacked(layer: Any, x: Any) -> Any:
    state = [tf.zeros([BATCH, 64])] * 2
    for inputs in tf.unstack(x, axis=1):
        for place, cell in enumerate(layer.cell.cells):
            inputs = state[place] = tf.tanh(
                tf.nn.bias_add(tf.matmul(inputs, cell.kernel), cell.bias)
                + tf.matmul(state[place], cell.recurrent_kernel)
            )
    return state[1]


NETWORKS = (
    *("ConvNeXtTiny", "DenseNet121", "EfficientNetB0", "EfficientNetV2B0", "InceptionResNetV2", "InceptionV3"),
    *("MobileNet", "MobileNetV2", "MobileNetV3Small", "NASNetMobile", "ResNet50", "ResNet50V2", "VGG16", "Xception"),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    layers: tuple[str, ...] = tuple(CASES)
    """Rows of the table of layers."""
    networks: tuple[str, ...] = NETWORKS
    """Names in keras.applications."""
    rounds: int = 7
    """Turns of the sides."""
    seconds: float = 0.15
    """Timing of each side in each turn, in seconds."""
    out: Path = RESULTS / "layer_sweep.json"
    """Path of the results file. What it holds of other layers and networks stays."""


def main(options: Options) -> dict[str, Any]:
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    results: dict[str, Any] = {
        "what": "milliseconds, medians; over_plain: over the plain operations' time; over_keras: over Keras'",
        "hardware": detect().to_dict(),
        "load": os.getloadavg()[0],
        "batch": BATCH,
        "layers": kept.get("layers", {}),
        "networks": kept.get("networks", {}),
    }
    for name in options.layers:
        results["layers"][name] = layer_row(name, CASES[name], options)
    for name in options.networks:
        results["networks"][name] = network_row(name, options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(options.out, json.dumps(results, indent=1) + "\n")
    return results


def layer_row(name: str, case: Case, options: Options) -> dict[str, Any]:
    keras.utils.set_random_seed(zlib.crc32(name.encode()) % 1000)
    layer = case.make()
    dtype = "int32" if case.classes else "float32"
    entries = [keras.Input(case.shape, dtype=dtype) for _ in range(case.inputs)]
    model = keras.Model(entries, called(layer, case, entries))
    draw = np.random.default_rng(0)
    shape = (BATCH, *case.shape)
    batch = [
        tf.constant(draw.integers(0, case.classes, shape) if case.classes else draw.normal(size=shape), dtype)
        for _ in entries
    ]
    row: dict[str, Any] = {"forward": forward(model, layer, case, batch, options)}
    if case.trains and not case.classes and layer.compute_dtype == "float32" and name != "Discretization":
        row["training"] = training(layer, case, batch, options)
    print(name, row, file=sys.stderr, flush=True)
    return row


def called(layer: Any, case: Case, inputs: Any, **more: Any) -> Any:
    return layer(*inputs, **more) if case.spread or len(inputs) == 1 else layer(list(inputs), **more)


def forward(model: Any, layer: Any, case: Case, batch: list[Any], options: Options) -> dict[str, Any]:
    plain = tf.Module()
    plain.weights = layer.variables

    @tf.function(input_signature=[tf.TensorSpec(x.shape, x.dtype, f"x{place}") for place, x in enumerate(batch)])
    def serve(*x: Any) -> Any:
        return {"y": case.plain(layer, *x)}

    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(plain, f"{folder}/plain", serve)
        model.export(f"{folder}/keras", verbose=False)
        tfopt.export(model, f"{folder}/tfopt")
        loaded = {side: tf.saved_model.load(f"{folder}/{side}") for side in SIDES}
    calls = {}
    for side, artifact in loaded.items():
        call = artifact.signatures["serving_default"]
        names = sorted(call.structured_input_signature[1])
        calls[side] = partial(call, **dict(zip(names, batch, strict=True)))
    values = {side: np.asarray(tf.nest.flatten(call())[0], "float64") for side, call in calls.items()}
    scale = np.abs(values["keras"]).max()
    row = ratios(calls, options)
    row["difference"] = {
        side: float(np.abs(values[side] - values["keras"]).max() / scale) for side in ("plain", "tfopt")
    }
    row["over_keras"] = round(row["ms"]["tfopt"] / row["ms"]["keras"], 3)
    return row


def training(layer: Any, case: Case, batch: list[Any], options: Options) -> dict[str, Any]:
    def traced(compute: Callable[..., Any]) -> Callable[[], Any]:
        @tf.function
        def step(*x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.square(compute(*x)))
            return tape.gradient(loss, [*(each.value for each in layer.trainable_variables), *x])

        return step.get_concrete_function(*batch)

    def by_layer(*x: Any) -> Any:
        return called(layer, case, x, training=True)

    steps = {"plain": traced(partial(case.plain, layer)), "keras": traced(by_layer)}
    with without_islands(False):
        steps["tfopt"] = traced(by_layer)
    return ratios({side: partial(step, *batch) for side, step in steps.items()}, options)


def ratios(calls: dict[str, Callable[[], Any]], options: Options) -> dict[str, Any]:
    for call in calls.values():
        call(), call()
    turns = in_turns(
        [lambda call=call: median(call_seconds(call, options.seconds)) for call in calls.values()], options.rounds
    )
    of_side = dict(zip(calls, turns, strict=True))
    found: dict[str, Any] = {"ms": {side: round(1e3 * median(seconds), 4) for side, seconds in of_side.items()}}
    if "plain" in of_side:
        found["over_plain"] = {
            side: round(median(a / b for a, b in zip(of_side[side], of_side["plain"], strict=True)), 3)
            for side in of_side
            if side != "plain"
        }
    return found


def network_row(name: str, options: Options) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(
        weights=None, input_shape=(160, 160, 3) if name != "NASNetMobile" else None
    )
    batch = tf.constant(np.random.default_rng(0).random((BATCH, *model.input_shape[1:])), "float32")
    calls: dict[str, Callable[[], Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model.export(f"{folder}/keras", verbose=False)
        tfopt.export(model, f"{folder}/tfopt")
        for side in ("keras", "tfopt"):
            call = tf.saved_model.load(f"{folder}/{side}").signatures["serving_default"]
            calls[side] = partial(call, **{next(iter(call.structured_input_signature[1])): batch})
    row = ratios(calls, options)
    row["over_keras"] = round(row["ms"]["tfopt"] / row["ms"]["keras"], 3)
    print(name, row, file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=1))
