"""Networks that enlarge images by UpSampling2D: one resize against Keras' repeated rows and columns, in each format.

    python benchmarks/upsampling.py [--networks decoder] [--formats onnx]

Each network is exported twice, once with the layer as Keras computes it. The two files are timed in turns in processes
of their own (`tfopt.benchmark`). Results go to benchmarks/results/upsampling.json.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tyro
from keras import layers

import tfopt
from tfopt.atomic.files import write_text
from tfopt.compat.plain import DETOURS
from tfopt.exporting.formats import FORMATS
from tfopt.hardware import detect

RESULTS = Path(__file__).parent / "results"
SIDES = ("repeated", "resized")


def block(x: Any, channels: int) -> Any:
    x = layers.Conv2D(channels, 3, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization()(x))


def unet() -> keras.Model:
    x = inputs = keras.Input((128, 128, 3))
    skips = []
    for channels in (16, 32, 64):
        x = block(block(x, channels), channels)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = block(x, 128)
    for channels in (64, 32, 16):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skips.pop()])
        x = block(block(x, channels), channels)
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))


def feature_pyramid() -> keras.Model:
    x = inputs = keras.Input((128, 128, 3))
    levels = []
    for channels in (16, 32, 64, 128):
        x = block(layers.MaxPooling2D()(x), channels)
        levels.append(x)
    x = layers.Conv2D(64, 1)(levels.pop())
    merged = [x]
    while levels:
        x = layers.Add()([layers.UpSampling2D()(x), layers.Conv2D(64, 1)(levels.pop())])
        merged.append(x)
    return keras.Model(inputs, [layers.Conv2D(8, 3, padding="same")(each) for each in merged])


def decoder() -> keras.Model:
    x = inputs = keras.Input((16, 16, 64))
    for channels in (48, 32, 16, 8):
        x = block(layers.UpSampling2D()(x), channels)
    return keras.Model(inputs, layers.Conv2D(3, 3, padding="same", activation="tanh")(x))


NETWORKS: dict[str, Callable[[], keras.Model]] = {"unet": unet, "feature_pyramid": feature_pyramid, "decoder": decoder}


@dataclass(frozen=True, kw_only=True)
class Options:
    networks: tuple[str, ...] = tuple(NETWORKS)
    formats: tuple[str, ...] = tuple(FORMATS)
    precisions: tuple[str, ...] = ("float32", "int8")
    seconds: float = 0.1
    """Timing of each file in each turn, in seconds."""
    out: Path = RESULTS / "upsampling.json"
    """Path of the results file. Networks that are in it, and not named, stay."""


@contextlib.contextmanager
def as_keras_repeats() -> Iterator[None]:
    detour = DETOURS.pop("upsampling")
    try:
        yield
    finally:
        DETOURS["upsampling"] = detour


def main(options: Options) -> dict[str, Any]:
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    results: dict[str, Any] = {
        "what": "milliseconds of a call, medians; gain: of the repetition over that of the resize",
        "hardware": detect().to_dict(),
        "networks": kept.get("networks", {}),
    }
    for name in options.networks:
        results["networks"][name] = measure(NETWORKS[name], options)
        write_text(options.out, json.dumps(results, indent=1) + "\n")
    return results


def measure(make: Callable[[], keras.Model], options: Options) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    model = make()
    x = np.random.default_rng(0).normal(size=(32, *model.input_shape[1:])).astype("float32")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for precision in options.precisions:
            data = {"calibration_data": x} if precision == "int8" else {}
            for side, scope in zip(SIDES, (as_keras_repeats, contextlib.nullcontext), strict=True):
                with scope():
                    tfopt.export_formats(
                        model,
                        Path(scratch, precision, side),
                        options.formats,
                        tfopt.ExportConfig(precision=precision),
                        **data,
                    )
            found[precision] = {each: compare(Path(scratch, precision), each, options) for each in options.formats}
    return found


def compare(directory: Path, file_format: str, options: Options) -> dict[str, Any]:
    report = tfopt.benchmark(
        [directory / side / file_format for side in SIDES], batch_sizes=(1, 8), seconds=options.seconds
    )
    found = {}
    for turns in zip(*(model.times for model in report.models), strict=True):
        before, after = (each.latency_ms_median for each in turns)
        ms = dict(zip(SIDES, (before, after), strict=True))
        found[f"batch_{turns[0].batch_size}"] = {"ms": ms, "gain": round(before / after, 3)}
    return found


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=1))
