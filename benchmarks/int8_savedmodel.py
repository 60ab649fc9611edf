"""ResNet-50 at 224x224 as a SavedModel: Keras' own export against tfopt's float32 and int8.

    python benchmarks/int8_savedmodel.py

Each SavedModel runs in a process of its own, and the processes are timed in turns, so that a change in the machine's
load meets all of them alike. The weights are random and made to behave like trained ones: batch normalisation is
calibrated on the inputs, and each residual branch adds little to its shortcut. (Without that a random network of this
depth amplifies any rounding a hundredfold, and says nothing of int8.) The time does not depend on the weights.
Results go to benchmarks/results/int8_savedmodel.json. Takes three to five minutes on two cores.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tyro

import tfopt
from tfopt.exporting import SavedModelProcess
from tfopt.exporting.process import alternate
from tfopt.hardware import detect
from tfopt.report import write_text

RESULTS = Path(__file__).parent / "results"
INPUT = "keras_tensor"


@dataclass(frozen=True, kw_only=True)
class Options:
    batch_sizes: tuple[int, ...] = (1, 8)
    """Examples per call."""
    rounds: int = 8
    """How often the turn passes."""
    seconds: float = 2.0
    """How long each SavedModel is timed per round."""
    out: Path = RESULTS / "int8_savedmodel.json"
    """Where the results go."""


def main(options: Options) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None, classifier_activation=None)
    images = smooth_images(32)
    for layer in model.layers:
        if layer.name.endswith("_3_bn"):  # the last of a residual branch
            layer.gamma.assign(0.2 * layer.gamma)
    calibrate_batch_norm(model, images)
    with tempfile.TemporaryDirectory() as directory:
        paths = {name: Path(directory, name) for name in ("keras_export", "tfopt_float32", "tfopt_int8")}
        model.export(paths["keras_export"], verbose=False)
        tfopt.export(model, paths["tfopt_float32"])
        int8 = tfopt.ExportConfig(precision="int8")
        report = tfopt.export(model, paths["tfopt_int8"], int8, calibration_data=images).report
        results = {
            "what": "ResNet-50, 224x224, random weights with calibrated batch normalisation",
            "device": f"{detect().cpu_model}, {detect().logical_cores} cores",
            "cpu_features": detect().cpu_features,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "bytes_on_disk": {name: size(path) for name, path in paths.items()},
            "quantized": len(report.changed),
            "left_float": len(report.skipped),
            "latency": [measure(paths, images[:batch], options) for batch in options.batch_sizes],
            "int8_against_float": compare(paths, smooth_images(64, seed=1)),
        }
    options.out.parent.mkdir(exist_ok=True)
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def measure(paths: dict[str, Path], images: np.ndarray, options: Options) -> dict[str, Any]:
    processes = {name: SavedModelProcess(path) for name, path in paths.items()}
    with processes["keras_export"], processes["tfopt_float32"], processes["tfopt_int8"]:
        times = alternate(list(processes.values()), {INPUT: images}, options.seconds, options.rounds)
    medians = dict(zip(paths, (float(np.median(np.concatenate(each))) for each in times), strict=True))
    return {
        "batch_size": len(images),
        "median_ms": {name: round(value, 2) for name, value in medians.items()},
        "calls": dict(zip(paths, (len(np.concatenate(each)) for each in times), strict=True)),
        "speed_against_keras_export": {
            name: round(medians["keras_export"] / value, 2) for name, value in medians.items()
        },
    }


def compare(paths: dict[str, Path], images: np.ndarray) -> dict[str, float]:
    """Returns how far int8 is from float32 on inputs it was not calibrated on."""
    with SavedModelProcess(paths["tfopt_float32"]) as one, SavedModelProcess(paths["tfopt_int8"]) as other:
        exact, quantized = (process.predict({INPUT: images})["output_0"] for process in (one, other))
    # Without its mean over the inputs, an output says what the network tells apart.
    varying = exact - exact.mean(axis=0)
    return {
        "relative_error": round(float(np.linalg.norm(quantized - exact) / np.linalg.norm(exact)), 4),
        "relative_error_of_what_varies": round(float(np.linalg.norm(quantized - exact) / np.linalg.norm(varying)), 4),
        "top1_agreement": float(np.mean(exact.argmax(axis=1) == quantized.argmax(axis=1))),
    }


def smooth_images(count: int, seed: int = 0) -> np.ndarray:
    """Returns images that differ in their large shapes, as photographs do and noise does not."""
    coarse = np.random.default_rng(seed).random((count, 7, 7, 3), dtype=np.float32)
    return tf.image.resize(coarse, (224, 224), method="bicubic").numpy()


def calibrate_batch_norm(model: keras.Model, images: np.ndarray) -> None:
    """Sets each layer's moving statistics to those of the images."""
    layers = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    for layer in layers:
        layer.momentum = 0.0
    model(images, training=True)
    for layer in layers:
        layer.momentum = 0.99


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Options, description=__doc__)), indent=2))
