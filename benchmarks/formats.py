"""Checks each file format on every builder and on ten networks of keras.applications, in the format's own runtime.

    python benchmarks/formats.py [--only MobileNetV2 vit] [--trained resnet_cifar]

Each model is exported in float32 and int8 in each format. The artifacts run in their own processes, without tfopt or
Keras, on examples that were not calibrated on, and are compared with the Keras model and with tfopt's int8 SavedModel,
in which the same nodes are in int8. The weights are random, but behave like trained ones; see applications.py. Results
go to benchmarks/results/formats.json after each model. A network takes 8 to 15 minutes on two cores with AVX2.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import applications
import keras
import numpy as np
import tensorflow as tf
import tyro
from onnxruntime import __version__ as onnxruntime_version
from openvino import __version__ as openvino_version
from rich.console import Console

import tfopt
from tfopt.atomic.files import write_text
from tfopt.errors import TfoptError
from tfopt.exporting.verification.process import runs
from tfopt.hardware import detect
from tfopt.models.table import SMALL_MODELS
from tfopt.recipes import RECIPES

RESULTS = Path(__file__).parent / "results"
FORMATS = ("saved_model", "onnx", "openvino", "litert")
NETWORKS = (
    *("ResNet50", "ResNet50V2", "MobileNet", "MobileNetV2", "MobileNetV3Small"),
    *("EfficientNetV2B0", "DenseNet121", "InceptionV3", "Xception", "ConvNeXtTiny"),
)
TRAINED = (
    *("mlp", "digits_cnn", "resnet_cifar", "resnet50", "mobilenet_v2", "mobilenet_v3", "efficientnet_v2", "convnext"),
    *("vit", "unet", "lstm", "tcn", "text_encoder", "gpt"),
)  # a recipe for each builder
QUICK = ("gpt",)  # in its quick form: its default takes a quarter of an hour
# Epochs: after the 15 to 20 of the recipe these are so unsure of some digits that any rounding decides on them.
LONGER = {"mobilenet_v2": 60, "mobilenet_v3": 60, "efficientnet_v2": 60}
OPEN_SIZE = 24


@dataclass(frozen=True, kw_only=True)
class Options:
    only: tuple[str, ...] = ()
    """Names of builders and networks, all by default."""
    trained: tuple[str, ...] = ()
    """Recipes to train, all by default. With --only or --trained, what the other one would name is left out."""
    examples: int = 256
    """Number of examples for the comparison."""
    out: Path = RESULTS / "formats.json"
    """Path of the results file. Models that are in it, and not named, stay."""


def main(options: Options) -> dict[str, Any]:
    partly = bool(options.only or options.trained)
    before = json.loads(options.out.read_text()) if partly and options.out.exists() else {}
    found, trained = before.get("models", {}), before.get("trained", {})
    machine = {
        "device": f"{detect().cpu_model}, {detect().logical_cores} cores",
        "cpu_features": detect().cpu_features,
    }
    results = {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "onnxruntime": onnxruntime_version,
        "openvino": openvino_version,
        "litert": version("ai-edge-litert"),
        "examples": options.examples,
        "models": found,
        "trained": trained,
    }
    for name in options.only if partly else (*SMALL_MODELS, *NETWORKS):
        model, inputs = network(name) if name in NETWORKS else builder(name)
        found[name] = {**measure(model, inputs, options.examples), **machine}
        print(name, json.dumps(found[name]), flush=True)
        write_text(options.out, json.dumps(results, indent=2) + "\n")
    for name in options.trained if partly else TRAINED:
        trained[name] = {**train(RECIPES[name]), **machine}
        print(name, json.dumps(trained[name]), flush=True)
        write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def train(recipe: tfopt.Recipe) -> dict[str, Any]:
    """Trains a recipe, and returns the score of each artifact and its agreement with the int8 SavedModel."""
    keras.backend.clear_session()
    with tempfile.TemporaryDirectory() as directory:
        if recipe.name in QUICK:
            recipe = recipe.form("quick")
        training = replace(recipe.training, epochs=LONGER.get(recipe.name, recipe.training.epochs))
        recipe = replace(
            recipe, training=training, pruning=None, export_dir=directory, formats=FORMATS, int8_nodes="all", forms={}
        )
        result = tfopt.run(recipe, console=Console(quiet=True))
        examples = recipe.data.load()
        x = np.concatenate([np.asarray(batch) for batch, _ in examples.batches("test", 64)])
        x = x.astype("float32") if x.dtype == np.uint8 else x
        outputs = {}
        for name in result.receipts:
            if name.startswith("int8"):
                with runs(Path(directory, name))(Path(directory, name)) as process:
                    (source,) = process.loaded["inputs"]
                    (outputs[name],) = process.predict({source: x}, 32).values()
    found: dict[str, Any] = {
        "score": recipe.find_task().name,
        "epochs": recipe.training.epochs,
        "scores": {},
        "agreement_with_saved_model": {},
    }
    for name, receipt in result.receipts.items():
        found["scores"][name] = next(iter(receipt.scores.values()), receipt.accuracy)
        if name in outputs:
            found["agreement_with_saved_model"][name] = agreement(outputs[name], outputs["int8"])
    return found


def network(name: str) -> tuple[keras.Model, Callable[[int, int], np.ndarray]]:
    model = applications.like_trained(name)
    size = applications.size_of(model)
    return model, lambda count, seed: applications.images(count, size, seed)[0]


def builder(name: str) -> tuple[keras.Model, Callable[[int, int], np.ndarray]]:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    entry = SMALL_MODELS[name]
    model = entry.build()
    shape = [OPEN_SIZE if size is None else size for size in entry.input_shape]

    def inputs(count: int, seed: int) -> np.ndarray:
        generator = np.random.default_rng(seed)
        if entry.input_dtype == "int32":
            return generator.integers(0, min(entry.outputs, 10), (count, *shape), np.int32)
        return generator.random((count, *shape), np.float32)

    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.beta.assign(layer.beta + 1)
    applications.calibrate_batch_norm(model, inputs(32, 0))
    return model, inputs


def measure(model: keras.Model, inputs: Callable[[int, int], np.ndarray], examples: int) -> dict[str, Any]:
    x = inputs(examples, 3)
    expected = np.concatenate([np.asarray(model(x[start : start + 16])) for start in range(0, examples, 16)])
    outputs, found, calibration = {}, {}, inputs(64, 2)
    sources = {"float32": model, "int8": tfopt.quantize(model, calibration_data=calibration)}
    with tempfile.TemporaryDirectory() as directory:
        for file_format in FORMATS:
            for precision, source_model in sources.items():
                key = f"{file_format}_{precision}"
                path = Path(directory, key)
                config = tfopt.ExportConfig(format=file_format, precision=precision, int8_nodes="all")
                try:
                    artifact = tfopt.export(source_model, path, config, calibration_data=calibration)
                    with runs(path)(path) as process:
                        (source,) = process.loaded["inputs"]
                        (outputs[key],) = process.predict({source: x}, 16).values()
                        kernels = process.count_kernels()
                except TfoptError as error:
                    found[key] = {"refused": str(error)}
                    continue
                error = np.linalg.norm(outputs[key] - expected) / np.linalg.norm(expected)
                found[key] = {
                    "relative_error": float(f"{error:.2g}"),
                    "agreement": agreement(outputs[key], expected),
                    "bytes_on_disk": artifact.bytes_on_disk,
                    "kernels": kernels,
                }
    for key, output in outputs.items():
        if key.endswith("_int8") and "saved_model_int8" in outputs:
            found[key]["agreement_with_saved_model"] = agreement(output, outputs["saved_model_int8"])
    return found


def agreement(one: np.ndarray, other: np.ndarray) -> float:
    return round(float(np.mean(one.argmax(-1) == other.argmax(-1))), 4)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
