"""Bytes on disk, speed and error of every precision relative to float32, for a ResNet-50 and a BERT-like encoder.

    python benchmarks/weight_only.py --model resnet50 --directory DIR --export
    python benchmarks/weight_only.py --model resnet50 --directory DIR

The first command writes the artifacts. The second command times them, each in its own process, in turns. The weights
are random. The weights of the ResNet behave like trained weights, as in int8_savedmodel.py. The time does not depend on
the weights. Results go to benchmarks/results/weight_only.json; the results of the other model stay.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
import tyro
from keras import layers

import tfopt
from tfopt.atomic.files import write_text
from tfopt.exporting import SavedModelProcess
from tfopt.exporting.verification.process import alternate
from tfopt.hardware import detect

RESULTS = Path(__file__).parent / "results" / "weight_only.json"
CALL = tfopt.WeightOnlyConfig(decode="call")
CONFIGS = {
    "float32": tfopt.ExportConfig(),
    "float16": tfopt.ExportConfig(precision="float16"),
    "bfloat16": tfopt.ExportConfig(precision="bfloat16"),
    "int8_weight_only": tfopt.ExportConfig(precision="int8_weight_only"),
    "int8_weight_only, call": tfopt.ExportConfig(precision="int8_weight_only", weight_only=CALL),
    "int4_weight_only": tfopt.ExportConfig(precision="int4_weight_only"),
    "int4_weight_only, group_size 32": tfopt.ExportConfig(
        precision="int4_weight_only", weight_only=tfopt.WeightOnlyConfig(group_size=32)
    ),
    "int8": tfopt.ExportConfig(precision="int8"),
    "int8, float_fallback": tfopt.ExportConfig(precision="int8", float_fallback=True, xla_signature=True),
}
MEASURED = (*list(CONFIGS)[1:], "int8, serving_float", "int8, serving_xla")


@dataclass(frozen=True, kw_only=True)
class Options:
    model: Literal["resnet50", "bert"] = "resnet50"
    """Which model."""
    directory: Path
    """Directory of the artifacts."""
    names: tuple[str, ...] = MEASURED
    """Artifacts to time besides float32; use several runs if one run takes too long."""
    export: bool = False
    """Write the artifacts; without this flag, measure them."""
    batch_size: int = 1
    """Examples per timed call."""
    rounds: int = 5
    """Number of timing rounds."""
    seconds: float = 0.6
    """Timing per SavedModel and round, in seconds."""


def main(options: Options) -> None:
    inputs = images() if options.model == "resnet50" else tokens()
    root = options.directory / options.model
    if options.export:
        model = resnet50(inputs) if options.model == "resnet50" else bert()
        for name, config in CONFIGS.items():
            artifact = tfopt.export(model, root / name, config, calibration_data=inputs[:16])
            print(name, artifact.bytes_on_disk, flush=True)
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"models": {}}
    results |= {
        "device": f"{detect().processor}, {detect().logical_cores} cores",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }
    results["models"].setdefault(options.model, {}).update(measure(root, inputs[:16], options))
    write_text(RESULTS, json.dumps(results, indent=2) + "\n")
    print(json.dumps(results["models"][options.model], indent=2))


def measure(root: Path, inputs: np.ndarray, options: Options) -> dict[str, Any]:
    with ExitStack() as stack:
        served = {}
        for name in ("float32", *options.names):
            path = root / ("int8, float_fallback" if name.startswith("int8, serving") else name)
            signature = name.removeprefix("int8, ") if name.startswith("int8, serving") else "serving_default"
            served[name] = stack.enter_context(SavedModelProcess(path, signature))
        (key,) = served["float32"].loaded["inputs"]
        outputs = {name: process.predict({key: inputs}, 8)["output_0"] for name, process in served.items()}
        times = alternate(list(served.values()), {key: inputs[: options.batch_size]}, options.seconds, options.rounds)
    medians = [float(np.median(np.concatenate(rounds))) for rounds in times]
    exact = outputs["float32"]
    sizes = {name: size(process.path) for name, process in served.items()}
    return {
        name: {
            "bytes_on_disk": sizes[name],
            "size_against_float32": round(sizes[name] / sizes["float32"], 3),
            "batch_size": options.batch_size,
            "median_ms": round(median, 2),
            "float32_median_ms": round(medians[0], 2),
            "speed_against_float32": round(medians[0] / median, 2),
            "relative_error": round(float(np.linalg.norm(outputs[name] - exact) / np.linalg.norm(exact)), 4),
            "top1_agreement": float(np.mean(outputs[name].argmax(axis=1) == exact.argmax(axis=1))),
        }
        for name, median in zip(served, medians, strict=True)
    }


def images() -> np.ndarray:
    coarse = np.random.default_rng(0).random((32, 7, 7, 3), dtype=np.float32)
    return tf.image.resize(coarse, (224, 224), method="bicubic").numpy()


def resnet50(images: np.ndarray) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None, classifier_activation=None)
    norms = [layer for layer in model.layers if isinstance(layer, layers.BatchNormalization)]
    for norm in norms:
        norm.momentum = 0.0
        if norm.name.endswith("_3_bn"):  # the last of a residual branch
            norm.gamma.assign(0.2 * norm.gamma)
    model(images, training=True)
    return model


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 30522, (32, 128)).astype(np.int32)


def bert() -> keras.Model:
    """An encoder with 4 layers of width 512 and a classifier, on 128 tokens of a vocabulary of 30,522."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((128,), dtype="int32", name="tokens")
    x = layers.Embedding(30522, 512)(inputs) * 20.0
    for _ in range(4):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(8, 64)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(512)(layers.Dense(2048, activation="gelu")(x)))
    return keras.Model(inputs, layers.Dense(100)(layers.GlobalAveragePooling1D()(x)))


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
