"""Exports fifteen models of keras.applications to int8, and measures speed and agreement.

    python benchmarks/applications.py [--models MobileNetV2 ...]

Each model is exported in float32 and in int8 with the default settings: nodes run in int8 if that is faster on this
machine. Both artifacts run in their own processes, without tfopt or Keras, on images outside the calibration data, and
are timed in turns. The weights are random, but they behave like trained weights: batch normalisation is calibrated,
residual branches add little to their shortcut, and a least squares fit sets the classifier to distinguish twenty kinds
of images, so that the largest output has a meaning. Results go to benchmarks/results/applications.json after each
model. The run takes an hour and a half on two cores.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tyro

import tfopt
from tfopt.atomic.files import write_text
from tfopt.exporting import SavedModelProcess
from tfopt.exporting.verification.process import alternate
from tfopt.hardware import detect

RESULTS = Path(__file__).parent / "results"
KINDS = 20
DAMPING = 0.2
# Name endings of the batch normalisation (or scale) that ends a residual branch.
BRANCH_ENDS = ("_3_bn", "project_BN", "project_bn", "_project/BatchNorm", "expanded_conv/project_bn", "layer_scale")
MODELS = (
    "ResNet50",
    "ResNet101",
    "ResNet50V2",
    "MobileNet",
    "MobileNetV2",
    "MobileNetV3Small",
    "MobileNetV3Large",
    "EfficientNetB0",
    "EfficientNetV2B0",
    "DenseNet121",
    "InceptionV3",
    "Xception",
    "VGG16",
    "NASNetMobile",
    "ConvNeXtTiny",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    models: tuple[str, ...] = MODELS
    """Names in keras.applications."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Examples per timed call."""
    rounds: int = 6
    """Number of timing rounds."""
    seconds: float = 1.0
    """Timing per artifact and round, in seconds."""
    out: Path = RESULTS / "applications.json"
    """Path of the results file; a model that is already in it is measured again only if --models names it."""


def main(options: Options) -> dict[str, Any]:
    known = json.loads(options.out.read_text())["models"] if options.out.exists() else {}
    results = {
        "device": f"{detect().processor}, {detect().logical_cores} cores",
        "cpu_features": detect().cpu_features,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "models": known,
    }
    for name in options.models:
        start = time.perf_counter()
        known[name] = measure(name, options)
        known[name]["minutes"] = round((time.perf_counter() - start) / 60, 1)
        print(name, json.dumps(known[name]), flush=True)
        options.out.parent.mkdir(exist_ok=True)
        write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def measure(name: str, options: Options) -> dict[str, Any]:
    model = like_trained(name)
    size = size_of(model)
    calibration, _ = images(96, size, seed=2)
    held_out, kinds = images(200, size, seed=3)
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, precision) for precision in ("float32", "int8")]
        tfopt.export(model, paths[0])
        config = tfopt.ExportConfig(precision="int8", batch_sizes=options.batch_sizes)
        artifact = tfopt.export(model, paths[1], config, calibration_data=calibration)
        with SavedModelProcess(paths[0]) as single, SavedModelProcess(paths[1]) as int8:
            source = next(iter(single.loaded["inputs"]))
            outputs = [next(iter(each.predict({source: held_out}).values())) for each in (single, int8)]
            assert int8.loaded["imported"] == []
            times = {
                size: [
                    float(np.median(np.concatenate(calls)))
                    for calls in alternate([single, int8], {source: held_out[:size]}, options.seconds, options.rounds)
                ]
                for size in options.batch_sizes
            }
        bytes_on_disk = [sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in paths]
    report = artifact.report
    return {
        "precision": artifact.precision,
        "int8_nodes": len(report.changed),
        "float_nodes": len(report.skipped),
        "agreement": float(np.mean(outputs[0].argmax(-1) == outputs[1].argmax(-1))),
        "accuracy": [round(float(np.mean(output.argmax(-1) == kinds)), 4) for output in outputs],
        "bytes_on_disk": bytes_on_disk,
        "size_ratio": round(bytes_on_disk[1] / bytes_on_disk[0], 3),
        "median_ms": {str(size): [round(value, 2) for value in pair] for size, pair in times.items()},
        "speedup": {str(size): round(pair[0] / pair[1], 2) for size, pair in times.items()},
    }


def like_trained(name: str) -> keras.Model:
    """Builds the model with weights that behave like trained ones."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(weights=None, classes=KINDS, classifier_activation=None)
    generator = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            if layer.scale:
                layer.gamma.assign(generator.uniform(0.3, 0.7, layer.gamma.shape))
            layer.beta.assign(generator.uniform(0.0, 1.0, layer.beta.shape))
        if layer.name.endswith(BRANCH_ENDS):
            layer.gamma.assign(tf.fill(layer.gamma.shape, DAMPING))
    examples, kinds = images(160, size_of(model), seed=1)
    calibrate_batch_norm(model, examples[:32])
    fit_classifier(model, examples, kinds)
    return model


def size_of(model: keras.Model) -> int:
    return model.input_shape[1] or 224


def images(count: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns images of twenty kinds, from 0 to 255, and the kind of each.

    A kind is a pattern of large shapes. Each image of a kind has a different brightness and differs in part.
    """
    patterns = np.random.default_rng(0).random((KINDS, 7, 7, 3))
    generator = np.random.default_rng(seed)
    kinds = generator.integers(0, KINDS, count)
    coarse = patterns[kinds] + generator.normal(0, 0.1, (count, 7, 7, 3))
    coarse *= generator.uniform(0.8, 1.2, (count, 1, 1, 1))
    large = tf.image.resize(coarse.astype(np.float32), (size, size), method="bicubic").numpy()
    return np.clip(255 * large, 0, 255), kinds


def calibrate_batch_norm(model: keras.Model, examples: np.ndarray) -> None:
    """Sets each batch normalisation's moving statistics to those of the examples."""
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    momenta = [layer.momentum for layer in norms]
    for layer in norms:
        layer.momentum = 0.0
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    if norms:
        model(examples, training=True)
    for layer, momentum in zip(norms, momenta, strict=True):
        layer.momentum = momentum


def fit_classifier(model: keras.Model, examples: np.ndarray, kinds: np.ndarray) -> None:
    """Sets the last weighted layer by a regularized least squares fit to the kinds."""
    head = next(
        layer for layer in reversed(model.layers) if isinstance(layer, (keras.layers.Dense, keras.layers.Conv2D))
    )
    features = keras.Model(model.inputs, head.input).predict(examples, batch_size=16, verbose=0)
    features = features.reshape(len(examples), -1).astype(np.float64)
    centre = features.mean(axis=0)
    spread = features - centre
    targets = np.eye(KINDS)[kinds] - 1 / KINDS
    kernel = spread @ spread.T
    kernel += 0.01 * np.trace(kernel) / len(kernel) * np.eye(len(kernel))
    weights = 10 * spread.T @ np.linalg.solve(kernel, targets)
    head.kernel.assign(weights.reshape(head.kernel.shape))
    head.bias.assign(-centre @ weights)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
