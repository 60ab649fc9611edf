"""Networks with grouped convolutions: their export and their training, against Keras' own.

    python benchmarks/grouped_convolutions.py

    export    the time of a call of tfopt's float32 and int8 artifacts over that of `model.export`, for ConvNeXt-tiny, a
              ResNeXt-50 (32 groups of 4) and a small RegNet, with random weights and statistics. The processes are
              timed in turns. int8 is calibrated on the random images that are timed
    training  the time of an epoch of a small ConvNeXt and of a small ResNeXt under `tfopt.compile` and with the step
              that `tfopt accelerate` puts under a script, over that of Keras. Fresh processes, in turns; the fastest
              epoch after the first counts, and the losses of all epochs are compared

Keras lets XLA compile each grouped convolution alone; see docs/export_reference.md. Results go to
benchmarks/results/grouped_convolutions.json, those of a machine with a GPU to grouped_convolutions-gpu.json. There XLA
compiles Keras' whole step, so `tfopt_plain` answers whether plain operations would be a gain: the same step with XLA
off and without islands. Some parts may be left out with --models. --quick runs small images and two epochs, as a test.
The run takes some fifteen minutes on two cores, most of it for Keras' own gradients.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tyro

from tfopt.timing import in_turns

RESULTS = Path(__file__).parent / "results"
EXPORTED = ("convnext_tiny", "resnext50", "regnet")
TRAINED = ("convnext", "resnext")
SIDES = ("keras", "tfopt", "accelerate")
PLAIN = "tfopt_plain"


@dataclass(frozen=True, kw_only=True)
class Options:
    models: tuple[str, ...] = (*EXPORTED, *TRAINED)
    """Networks to export, and those to train."""
    batch_sizes: tuple[int, ...] = (8, 1)
    """Examples per call of the artifacts."""
    size: int = 160
    """Height and width of the images of the exported networks."""
    rounds: int = 3
    """Number of timing rounds of the artifacts, and of fresh processes of each side of a training."""
    seconds: float = 3.0
    """Timing per artifact and round, in seconds."""
    epochs: int = 3
    """Epochs of each training."""
    examples: int = 256
    """Examples of an epoch, in batches of 32."""
    quick: bool = False
    """Run small images, one round and two epochs as a test, not as a measurement."""
    out: Path | None = None
    """Path of the results file."""
    side: str | None = None
    """Used by the benchmark itself: train one network on this side, and print its times."""


def main(options: Options) -> dict[str, Any]:
    from tfopt.atomic.files import write_text
    from tfopt.hardware import detect

    if options.quick:
        options = Options(models=options.models, size=32, rounds=1, seconds=0.2, epochs=2, examples=64, out=options.out)
    hardware = detect()
    sides = (*SIDES, PLAIN) if hardware.gpus else SIDES
    out = options.out or RESULTS / f"grouped_convolutions{'-gpu' if hardware.gpus else ''}.json"
    results = {
        "what": "milliseconds of a call and of an epoch, medians; times is Keras' over ours",
        "hardware": hardware.to_dict(),
        "load": os.getloadavg()[0],
        "export": [exported(name, options) for name in EXPORTED if name in options.models],
        "training": [trained(name, sides, options) for name in TRAINED if name in options.models],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, json.dumps(results, indent=1) + "\n")
    return results


def exported(name: str, options: Options) -> dict[str, Any]:
    import keras

    import tfopt
    from tfopt.exporting import SavedModelProcess
    from tfopt.exporting.verification.process import alternate

    keras.utils.set_random_seed(0)
    model = with_statistics(NETWORKS[name](options.size))
    images = np.random.default_rng(0).random((max(options.batch_sizes), *model.input_shape[1:])).astype("float32")
    row: dict[str, Any] = {"model": name, "size": options.size, "batch": {}}
    with tempfile.TemporaryDirectory() as folder:
        model.export(f"{folder}/keras", verbose=False)
        tfopt.export(model, f"{folder}/tfopt")
        int8 = tfopt.export(model, f"{folder}/int8", tfopt.ExportConfig(precision="int8"), calibration_data=images)
        row["int8_nodes"] = len(int8.report.changed) if int8.report else 0
        with ExitStack() as stack:
            sides = [stack.enter_context(SavedModelProcess(f"{folder}/{side}")) for side in ("keras", "tfopt", "int8")]
            for batch_size in options.batch_sizes:
                batch = dict.fromkeys(sides[0].loaded["inputs"], images[:batch_size])
                outputs = [next(iter(each.predict(batch, batch_size).values())) for each in sides]
                rounds = alternate(sides, batch, options.seconds, options.rounds)
                before, after, in_int8 = (float(np.median(np.concatenate(times))) for times in rounds)
                difference, in_int8_difference = (
                    float(np.abs(outputs[0] - each).max() / np.abs(outputs[0]).max()) for each in outputs[1:]
                )
                row["batch"][batch_size] = {
                    "keras_ms": round(before, 2),
                    "tfopt_ms": round(after, 2),
                    "times": round(before / after, 2),
                    "difference": difference,
                    "int8_ms": round(in_int8, 2),
                    "int8_times": round(before / in_int8, 2),
                    "int8_difference": in_int8_difference,
                }
    print(row, file=sys.stderr, flush=True)
    return row


def with_statistics(model: Any) -> Any:
    """Gives the batch norms of a model random weights and statistics, as training does.

    Without them, a batch norm adds zeros, which TensorFlow leaves out.
    """
    import keras

    draw = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            channels = layer.gamma.shape
            gamma, variance = draw.uniform(0.5, 1.5, (2, *channels))
            beta, mean = draw.normal(0, 0.1, (2, *channels))
            layer.set_weights([gamma, beta, mean, variance])
    return model


def trained(name: str, sides: tuple[str, ...], options: Options) -> dict[str, Any]:
    turns = in_turns([partial(fresh_process, name, side, options) for side in sides], options.rounds)
    runs = dict(zip(sides, turns, strict=True))
    epochs = {side: median(run["epoch_ms"] for run in of_side) for side, of_side in runs.items()}
    losses = {side: of_side[0]["losses"] for side, of_side in runs.items()}
    row = {
        "model": name,
        "epoch_ms": {side: round(ms, 1) for side, ms in epochs.items()},
        "times": {side: round(epochs["keras"] / ms, 2) for side, ms in epochs.items() if side != "keras"},
        "loss_difference": {
            side: float(np.max(np.abs(np.subtract(losses[side], losses["keras"])) / np.abs(losses["keras"])))
            for side in sides
            if side != "keras"
        },
    }
    print(row, file=sys.stderr, flush=True)
    return row


def fresh_process(name: str, side: str, options: Options) -> dict[str, Any]:
    words = [sys.executable, __file__, "--side", side, "--models", name]
    words += ["--epochs", str(options.epochs), "--examples", str(options.examples)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def timed(name: str, side: str, options: Options) -> dict[str, Any]:
    """Trains a network here. Returns the milliseconds of its fastest epoch but the first, and its losses."""
    import time

    import keras

    import tfopt
    from tfopt.scripts.accelerate import AccelerateHook
    from tfopt.training.config import TrainingConfig
    from tfopt.training.plan import plan

    keras.utils.set_random_seed(0)
    model = NETWORKS[name](32)
    draw = np.random.default_rng(0)
    x = draw.random((options.examples, *model.input_shape[1:])).astype("float32")
    y = draw.integers(0, 10, options.examples)
    loss, optimizer = keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.optimizers.SGD(0.01)
    if side in ("tfopt", PLAIN):
        config = TrainingConfig(precision="float32", jit_compile=False if side == PLAIN else "auto")
        tfopt.compile(model, plan(config), optimizer=optimizer, loss=loss)
    elif side == "accelerate":

        def by_keras(*args: Any, **kwargs: Any) -> None:
            keras.Model.compile(model, *args, **kwargs)

        AccelerateHook().compile(model, by_keras, (optimizer, loss), {})
    else:
        model.compile(optimizer, loss)
    ends: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: ends.append(time.perf_counter()),
        on_epoch_end=lambda *_: ends.append(time.perf_counter()),
    )
    history = model.fit(x, y, batch_size=32, epochs=options.epochs, shuffle=False, verbose=0, callbacks=[clock])
    epochs = [after - before for before, after in zip(ends[::2], ends[1::2], strict=True)]
    return {"epoch_ms": 1e3 * min(epochs[1:]), "losses": history.history["loss"]}


def convnext_tiny(size: int) -> Any:
    import keras

    return keras.applications.ConvNeXtTiny(weights=None, input_shape=(size, size, 3))


def resnext(
    size: int,
    depths: tuple[int, ...],
    width: int,
    groups: int,
    classes: int,
    group_width: int = 0,
    stem: int = 3,
) -> Any:
    """Returns a network of bottlenecks whose 3x3 convolutions are grouped.

    Args:
        size: Height and width of the images.
        depths: Bottlenecks of each stage.
        width: Channels inside the bottlenecks of the first stage; those of the next are twice as many.
        groups: Groups of each convolution; with `group_width` the channels of a group are fixed instead, as in RegNet.
        classes: Number of outputs.
        group_width: Channels of a group, or 0.
        stem: Size of the kernel of the first convolution. Max pooling follows one of 7, as in ResNeXt-50.
    """
    import keras
    from keras import layers

    def norm(x: Any) -> Any:
        return layers.BatchNormalization()(x)

    inputs = keras.Input((size, size, 3))
    x = layers.ReLU()(norm(layers.Conv2D(min(width, 64), stem, 2, padding="same", use_bias=False)(inputs)))
    if stem == 7:
        x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, depth in enumerate(depths):
        inner = width * 2**stage
        outer = inner if group_width else 2 * inner
        for index in range(depth):
            strides = 2 if index == 0 and stage else 1
            shortcut = x
            if index == 0:
                shortcut = norm(layers.Conv2D(outer, 1, strides, use_bias=False)(x))
            y = layers.ReLU()(norm(layers.Conv2D(inner, 1, use_bias=False)(x)))
            grouped = layers.Conv2D(
                inner,
                3,
                strides,
                padding="same",
                groups=inner // group_width if group_width else groups,
                use_bias=False,
            )
            y = layers.ReLU()(norm(grouped(y)))
            x = layers.ReLU()(layers.Add()([shortcut, norm(layers.Conv2D(outer, 1, use_bias=False)(y))]))
    return keras.Model(inputs, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))


def small_convnext(size: int) -> Any:
    import keras
    from keras import layers

    inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(32, 4, 4)(inputs)
    for width in (32, 64):
        if x.shape[-1] != width:
            x = layers.Conv2D(width, 2, 2)(layers.LayerNormalization(epsilon=1e-6)(x))
        for _ in range(2):
            y = layers.Conv2D(width, 7, padding="same", groups=width)(x)
            y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(y))
            x = layers.Add()([x, layers.Dense(width)(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


NETWORKS: dict[str, Callable[[int], Any]] = {
    "convnext_tiny": convnext_tiny,
    "resnext50": lambda size: resnext(size, (3, 4, 6, 3), 128, 32, 1000, stem=7),
    "regnet": lambda size: resnext(size, (1, 2, 7, 2), 48, 0, 1000, group_width=24),
    "convnext": small_convnext,
    "resnext": lambda size: resnext(size, (1, 1), 64, 32, 10),
}


if __name__ == "__main__":
    given = tyro.cli(Options, description=__doc__)
    if given.side is not None:
        print(json.dumps(timed(given.models[0], given.side, given)))
    else:
        print(json.dumps(main(given), indent=1))
