"""Training and inference with oneDNN's kernels and without, on a processor where TensorFlow leaves them off.

    python benchmarks/onednn.py

TensorFlow turns oneDNN on by itself only where the processor has AVX512_VNNI, AVX512_BF16 or AMX. On others, such as
those with AVX2 alone, TF_ENABLE_ONEDNN_OPTS=1 does so, if it is set before Python imports TensorFlow.

    training   the time of an epoch under Keras' `fit`, for small networks
    inference  the time of a call of Keras' `model.export` and of tfopt's float32 artifact, for networks of
               keras.applications with random weights

Fresh processes with the variable at 0 and at 1 are timed in turns. The times are medians, and the ratio is that of the
medians: above 1, oneDNN is faster. Results go to benchmarks/results/onednn.json. The run takes some twenty minutes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from tfopt.timing import in_turns

RESULTS = Path(__file__).parent / "results"
VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
APPLICATIONS = {"resnet50": "ResNet50", "mobilenet_v2": "MobileNetV2", "efficientnet_v2": "EfficientNetV2B0"}


@dataclass(frozen=True, kw_only=True)
class Options:
    trained: tuple[str, ...] = ("mlp", "cnn", "separable", "transformer", "lstm")
    """Networks to train."""
    exported: tuple[str, ...] = tuple(APPLICATIONS)
    """Networks to export."""
    batch_sizes: tuple[int, ...] = (8, 1)
    """Examples per call of the artifacts."""
    size: int = 160
    """Height and width of the images of the exported networks."""
    rounds: int = 5
    """Processes of each side."""
    quick: bool = False
    """Run one round and small images as a test, not as a measurement."""
    out: Path = RESULTS / "onednn.json"
    """Path of the results file."""
    part: str | None = None
    """Used by the benchmark itself: time this network or this artifact, and print the milliseconds."""


def main(options: Options) -> dict[str, Any]:
    from tfopt.atomic.files import write_text
    from tfopt.hardware import detect

    if options.quick:
        options = replace(options, size=32, rounds=1)
    results: dict[str, Any] = {
        "what": "milliseconds of an epoch and of a call, medians; times is the time without oneDNN over that with it",
        "hardware": detect().to_dict(),
        "load": os.getloadavg()[0],
        "training": {name: row({"epoch": name}, options)["epoch"]["epoch"] for name in options.trained},
        "inference": {},
    }
    for name in options.exported:
        with tempfile.TemporaryDirectory() as folder:
            export_both(name, Path(folder), options.size)
            sides = {each: str(Path(folder, each)) for each in ("keras", "tfopt")}
            results["inference"][name] = row(sides, options)
    write_text(options.out, json.dumps(results, indent=1) + "\n")
    return results


def row(parts: dict[str, str], options: Options) -> dict[str, Any]:
    """Times each part without and with oneDNN, all in turns."""
    sides = [(name, setting) for name in parts for setting in ("0", "1")]
    turns = in_turns([partial(apart, parts[name], setting, options) for name, setting in sides], options.rounds)
    found: dict[str, Any] = {}
    for (name, setting), runs in zip(sides, turns, strict=True):
        for key in runs[0]:
            ms = statistics.median(run[key] for run in runs)
            found.setdefault(name, {}).setdefault(key, {})["with_ms" if setting == "1" else "without_ms"] = round(ms, 3)
    for keys in found.values():
        for each in keys.values():
            each["times"] = round(each["without_ms"] / each["with_ms"], 2)
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def apart(part: str, setting: str, options: Options) -> dict[str, float]:
    words = [sys.executable, __file__, "--part", part, "--batch-sizes", *map(str, options.batch_sizes)]
    words += ["--size", str(options.size), *(["--quick"] if options.quick else [])]
    environment = {**os.environ, VARIABLE: setting}
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def export_both(name: str, folder: Path, size: int) -> None:
    import keras

    import tfopt

    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, APPLICATIONS[name])(weights=None, input_shape=(size, size, 3))
    model.export(str(folder / "keras"), verbose=False)
    tfopt.export(model, folder / "tfopt")


def timed(part: str, options: Options) -> dict[str, float]:
    """Returns the milliseconds of an epoch of a network, or of a call of an artifact for each batch size."""
    return epoch_ms(part, options.quick) if part in NETWORKS else calls_ms(part, options)


def epoch_ms(name: str, quick: bool) -> dict[str, float]:
    import keras

    keras.utils.set_random_seed(0)
    model, examples = NETWORKS[name](), 64 if quick else 1024
    draw = np.random.default_rng(0)
    x = draw.random((examples, *model.input_shape[1:])).astype("float32")
    y = draw.integers(0, 10, examples)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=64, verbose=0)
    seconds = []
    for _ in range(1 if quick else 3):
        begin = time.perf_counter()
        model.fit(x, y, batch_size=64, verbose=0)
        seconds.append(time.perf_counter() - begin)
    return {"epoch": 1e3 * min(seconds)}


def calls_ms(path: str, options: Options) -> dict[str, float]:
    import tensorflow as tf

    serve = tf.saved_model.load(path).signatures["serving_default"]
    ((name, spec),) = serve.structured_input_signature[1].items()
    draw, found = np.random.default_rng(0), {}
    for batch_size in options.batch_sizes:
        images = {name: tf.constant(draw.random((batch_size, *spec.shape[1:])).astype("float32"))}
        seconds = []
        for _ in range(2 if options.quick else 12):
            begin = time.perf_counter()
            serve(**images)
            seconds.append(time.perf_counter() - begin)
        found[f"batch {batch_size}"] = 1e3 * statistics.median(seconds[1:])
    return found


def network(*layers: Any) -> Any:
    import keras

    return keras.Sequential(list(layers))


def mlp() -> Any:
    from keras import Input, layers

    hidden = [layers.Dense(512, activation="relu") for _ in range(3)]
    return network(Input((256,)), *hidden, layers.Dense(10))


def cnn() -> Any:
    from keras import Input, layers

    def block(width: int) -> list[Any]:
        conv = layers.Conv2D(width, 3, padding="same", use_bias=False)
        return [conv, layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D()]

    return network(Input((32, 32, 3)), *block(32), *block(64), *block(64), layers.Flatten(), layers.Dense(10))


def separable() -> Any:
    from keras import Input, layers

    def block(width: int, strides: int) -> list[Any]:
        depthwise = layers.DepthwiseConv2D(3, strides, padding="same", use_bias=False)
        pointwise = layers.Conv2D(width, 1, use_bias=False)
        return [depthwise, layers.BatchNormalization(), layers.ReLU(), pointwise, layers.BatchNormalization()]

    blocks = [*block(32, 2), *block(64, 2), *block(64, 1)]
    return network(Input((32, 32, 3)), layers.Conv2D(16, 3), *blocks, layers.GlobalMaxPooling2D(), layers.Dense(10))


def transformer() -> Any:
    import keras
    from keras import layers

    inputs = x = keras.Input((64, 64))
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(256, activation="gelu")(x)))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def lstm() -> Any:
    from keras import Input, layers

    return network(Input((32, 64)), layers.LSTM(128), layers.Dense(10))


NETWORKS: dict[str, Callable[[], Any]] = {each.__name__: each for each in (mlp, cnn, separable, transformer, lstm)}


if __name__ == "__main__":
    given = tyro.cli(Options, description=__doc__)
    print(json.dumps(main(given), indent=1) if given.part is None else json.dumps(timed(given.part, given)))
