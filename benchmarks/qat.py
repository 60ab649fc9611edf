"""Accuracy on the digits in float, after post-training quantization and after quantization-aware training.

    python benchmarks/qat.py
    python benchmarks/qat.py --quick

Trains each model in float. Then exports it to six SavedModels: with 8-bit and with 4-bit weights, each one only rounded
after training, quantized after training with the default settings (equalization, bias correction), and after
quantization-aware training with learned ranges. Accuracies are those of the int8 kernels in the SavedModel, on 360
held-out digits. "float_trained_on" is the float model with the same additional epochs as the quantized models. It
shows the effect of the longer training alone. Results go to benchmarks/results/qat.json after each model.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tyro
from keras import layers

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect

RESULTS = Path(__file__).parent / "results"
SHAPE, CLASSES, BATCH = (32, 32, 1), 10, 32


@dataclass(frozen=True, kw_only=True)
class Options:
    epochs: int = 12
    """Epochs of training in float."""
    more_epochs: int = 6
    """Epochs of quantization-aware training."""
    only: str | None = None
    """Measure only this model."""
    quick: bool = False
    """Run two epochs on a quarter of the examples as a test; write no results."""
    out: Path = RESULTS / "qat.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    examples = tfopt.data.digits(image_size=SHAPE[0])
    epochs, more_epochs = (2, 2) if options.quick else (options.epochs, options.more_epochs)
    if options.quick:
        examples = examples.limit(360)
    results: dict[str, Any] = {
        "what": f"accuracy on {len(examples.x_test)} digits held out, of float models and of int8 SavedModels",
        "epochs": epochs,
        "more_epochs": more_epochs,
        "device": f"{detect().processor}, {detect().logical_cores} cores",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "models": {},
    }
    for name, build in MODELS.items():
        if options.only in (None, name):
            results["models"][name] = measure(build, examples, epochs, more_epochs)
            print(name, json.dumps(results["models"][name]), flush=True)
            if not options.quick:
                options.out.parent.mkdir(exist_ok=True)
                write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def measure(build: Callable[[], keras.Model], examples: Any, epochs: int, more_epochs: int) -> dict[str, Any]:
    start = time.perf_counter()
    keras.utils.set_random_seed(0)
    model = build()
    fit(model, examples, epochs, 3e-3)
    trained_on = keras.models.clone_model(model)
    trained_on.set_weights(model.get_weights())
    fit(trained_on, examples, more_epochs, 1e-3)
    found = {"weights": model.count_params(), "float": accuracy(model, examples)}
    found["float_trained_on"] = accuracy(trained_on, examples)
    for bits in (8, 4):
        plain = {"equalization": False, "smooth_quant": 0.0, "bias_correction": False}
        for name, settings in (("rounded", plain), ("after_training", {})):
            after = tfopt.QuantizationConfig(weight_bits=bits, **settings)
            quantized = tfopt.quantize(model, after, calibration_data=examples.x_train)
            found[f"int{bits}_{name}"] = exported_accuracy(quantized, examples)
        while_training = tfopt.QuantizationConfig(weight_bits=bits, training=True, learned_ranges=True)
        trained = tfopt.quantize(model, while_training, calibration_data=examples.x_train)
        fit(trained, examples, more_epochs, 1e-3)
        found[f"int{bits}_while_training"] = exported_accuracy(trained, examples)
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def fit(model: keras.Model, examples: Any, epochs: int, learning_rate: float) -> None:
    steps = -(-len(examples.x_train) // BATCH) * epochs
    rate = keras.optimizers.schedules.CosineDecay(learning_rate, steps)
    model.compile(keras.optimizers.Adam(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = tfopt.data.pipeline((examples.x_train, examples.y_train), batch_size=BATCH, random_shift=2)
    model.fit(data, epochs=epochs, shuffle=False, verbose=0)


def exported_accuracy(model: Any, examples: Any) -> float:
    with tempfile.TemporaryDirectory() as directory:
        tfopt.export(model, f"{directory}/int8", tfopt.ExportConfig(precision="int8", int8_nodes="all"))
        serve = tf.saved_model.load(f"{directory}/int8").signatures["serving_default"]
        (name,) = serve.structured_input_signature[1]
        (outputs,) = serve(**{name: tf.constant(examples.x_test)}).values()
    return share_right(outputs.numpy(), examples)


def accuracy(model: keras.Model, examples: Any) -> float:
    return share_right(model.predict(examples.x_test, verbose=0), examples)


def share_right(outputs: np.ndarray, examples: Any) -> float:
    return round(float((outputs.argmax(-1) == examples.y_test).mean()), 4)


def separable(blocks: Sequence[tuple[int, int]]) -> keras.Model:
    """A small MobileNet with these (filters, strides). Its depthwise convolutions have few weights per channel."""
    inputs = keras.Input(SHAPE, name="image")
    x = norm(layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs))
    for filters, strides in blocks:
        x = norm(layers.DepthwiseConv2D(3, strides=strides, padding="same", use_bias=False)(x))
        x = norm(layers.Conv2D(filters, 1, use_bias=False)(x))
    return keras.Model(inputs, layers.Dense(CLASSES, name="logits")(layers.GlobalAveragePooling2D()(x)))


def norm(x: Any) -> Any:
    return layers.ReLU(6.0)(layers.BatchNormalization(momentum=0.9)(x))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "mlp": lambda: tfopt.models.mlp(SHAPE, CLASSES, units=(64, 64)),
    "simple_cnn": lambda: tfopt.models.simple_cnn(SHAPE, CLASSES, kernel_size=3),
    "resnet_cifar": lambda: tfopt.models.resnet_cifar(SHAPE, CLASSES, depth=8),
    "separable": lambda: separable([(16, 2), (16, 1), (32, 2), (32, 1)]),
    # Few weights, so that each one matters.
    "narrow": lambda: separable([(6, 1), (8, 2), (8, 1), (12, 2), (12, 1), (12, 1)]),
}


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
