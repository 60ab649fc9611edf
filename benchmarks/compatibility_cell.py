"""One cell of the compatibility matrix: tfopt or plain Keras trains a model, evaluates it and predicts with it.

In each cell, a small network of Conv2D, BatchNormalization and Dense trains for two epochs with validation data. The
last batch of an epoch is uneven. `evaluate` and `predict` follow. The cell trains if all of this works and the loss is
finite and falls.

In float32, a second network must also end with the weights, losses and predictions of plain Keras on one device with
none of the settings, to a relative TOLERANCE. The reference is the largest value of each tensor. This network has no
batch normalization, because its statistics come from the examples of each replica.

tfopt divides each batch into micro-batches. Keras accumulates over steps, so it gets more and smaller batches, by the
same factor.

    python benchmarks/compatibility_cell.py REFERENCE RESULTS SIDE CELLS

runs cells one after the other. compatibility.py starts it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

import tfopt
from tfopt.errors import ConfigError

TOLERANCE = 1e-4
EPOCHS, BATCH = 2, 16
# 8 full batches and one of 7: uneven, also for two replicas. In batches of 4 the last has 3, so no replica is empty.
EXAMPLES, VALIDATION = 135, 45
CLASSES = 3
# Lines of error messages that do not name the cause.
NOISE = re.compile(
    r"\s*(Graph execution error|Detected at node|File \"|<stack traces|in user code|.*most recent call last"
    r"|\d root error|Exception encountered when|$)"
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    strategy: Literal["none", "mirrored", "multi_worker"]
    precision: Literal["float32", "mixed_float16", "mixed_bfloat16"]
    jit_compile: bool
    accumulate: int
    steps_per_execution: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a cell.

    Attributes:
        status: The cell trains, trains but differs from the reference, was refused with a ConfigError, or fails.
        words: The quantity that differs, or the reason why the cell does not train.
        off: The relative difference.
        digest: A digest of the final weights, for comparison between workers.
    """

    status: Literal["trains", "differs", "refused", "fails"]
    words: str = ""
    off: float | None = None
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The results of a training."""

    losses: list[float]
    evaluated: float
    predicted: np.ndarray
    weights: list[np.ndarray]
    without_xla: str = ""


class StageError(Exception):
    """An error, and the action that raised it."""


def run(cell: Cell, side: Literal["tfopt", "keras"], reference: Trained) -> Outcome:
    """Runs a cell. It raises only errors that end the process.

    Args:
        cell: The settings.
        side: The library that trains.
        reference: The result of `train_reference`.
    """
    train = _train_by_tfopt if side == "tfopt" else _train_by_keras
    try:
        trained = train(cell, normalized=True)
        if not np.isfinite(trained.losses).all() or trained.losses[-1] >= trained.losses[0]:
            return Outcome(status="fails", words=f"the loss goes from {trained.losses[0]} to {trained.losses[-1]}")
        if not np.isfinite(trained.predicted).all() or not np.isfinite(trained.evaluated):
            return Outcome(status="fails", words="evaluate or predict gives figures that are not finite")
        words, off = trained.without_xla, None
        if not words and len(trained.predicted) != VALIDATION:
            words = f"predict returns {len(trained.predicted)} rows for {VALIDATION} examples"
        digests = hashlib.sha256(b"".join(array.tobytes() for array in trained.weights))
        if not words and cell.precision == "float32":
            words, off = _difference(train(cell, normalized=False), reference)
        status = "differs" if words else "trains"
        return Outcome(status=status, words=words, off=off, digest=digests.hexdigest()[:16])
    except ConfigError as error:
        return Outcome(status="refused", words=_short(error))
    except StageError as error:
        return Outcome(status="fails", words=f"{error}: {type(error.__cause__).__name__}: {_short(error.__cause__)}")


def train_reference() -> Trained:
    """Trains with plain Keras on one device, with none of the settings."""
    cell = Cell(strategy="none", precision="float32", jit_compile=False, accumulate=1, steps_per_execution=1)
    return _train_by_keras(cell, normalized=False)


def save(trained: Trained, path: Path) -> None:
    arrays = {f"weight_{index}": array for index, array in enumerate(trained.weights)}
    np.savez(path, losses=trained.losses, evaluated=trained.evaluated, predicted=trained.predicted, **arrays)


def load(path: Path) -> Trained:
    with np.load(path) as arrays:
        return Trained(
            losses=arrays["losses"].tolist(),
            evaluated=float(arrays["evaluated"]),
            predicted=arrays["predicted"],
            weights=[arrays[f"weight_{index}"] for index in range(len(arrays.files) - 3)],
        )


def _train_by_tfopt(cell: Cell, *, normalized: bool) -> Trained:
    with _during("plan"):
        plan = tfopt.plan(
            tfopt.TrainingConfig(
                strategy=cell.strategy,
                precision=cell.precision,
                jit_compile=cell.jit_compile,
                accumulate=cell.accumulate,
                steps_per_execution=cell.steps_per_execution,
                global_batch_size=BATCH,
                epochs=EPOCHS,
            )
        )
    with _during("build"), plan.scope():
        model = _build(normalized)
    with _during("compile"):
        tfopt.compile(
            model, plan, optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss=_loss(), metrics=["accuracy"]
        )
    x, y = _examples(EXAMPLES, seed=1)
    validation = _examples(VALIDATION, seed=2)
    # The data is in order if the weights are compared.
    trained = _use(
        model,
        plan.pipeline((x, y), training=normalized),
        plan.pipeline(validation, training=False),
        plan.pipeline(validation[:1], training=False),
    )
    if not cell.jit_compile:
        return trained
    ledger = tfopt.ledger(model)
    missing = ledger.fallback or ("" if ledger.of_kind("compilation") else "nothing was compiled")
    return Trained(**{**vars(trained), "without_xla": missing and f"without XLA: {missing}"})


def _train_by_keras(cell: Cell, *, normalized: bool) -> Trained:
    with _during("strategy"):
        strategy = _keras_strategy(cell.strategy)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(cell.precision)
    try:
        with strategy.scope() if strategy else contextlib.nullcontext():
            with _during("build"):
                model = _build(normalized)
            with _during("compile"):
                steps = cell.accumulate if cell.accumulate > 1 else None
                model.compile(
                    keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=steps),
                    _loss(),
                    metrics=["accuracy"],
                    jit_compile=cell.jit_compile,
                    steps_per_execution=cell.steps_per_execution,
                )
    finally:
        keras.config.set_dtype_policy(before)
    x, y = _examples(EXAMPLES, seed=1)
    validation = _examples(VALIDATION, seed=2)
    examples = tf.data.Dataset.from_tensor_slices((x, y))
    if normalized:
        examples = examples.shuffle(EXAMPLES, seed=0)
    trained = _use(
        model,
        examples.batch(BATCH // cell.accumulate),
        tf.data.Dataset.from_tensor_slices(validation).batch(BATCH),
        tf.data.Dataset.from_tensor_slices(validation[:1]).batch(BATCH),
    )
    missing = "without XLA: Keras switched it off" if cell.jit_compile and not model.jit_compile else ""
    return Trained(**{**vars(trained), "without_xla": missing})


def _use(model: keras.Model, examples: Any, validation: Any, inputs: Any) -> Trained:
    with _during("fit"):
        fitted = model.fit(examples, validation_data=validation, epochs=EPOCHS, shuffle=False, verbose=0)
    with _during("evaluate"):
        evaluated = model.evaluate(validation, verbose=0, return_dict=True)
    with _during("predict"):
        predicted = model.predict(inputs, verbose=0)
    return Trained(
        losses=[float(loss) for loss in fitted.history["loss"]],
        evaluated=float(evaluated["loss"]),
        predicted=np.asarray(predicted),
        weights=model.get_weights(),
    )


def _build(normalized: bool) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    middle = [layers.BatchNormalization()] if normalized else []
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, padding="same"),
            *middle,
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(16, activation="relu"),
            layers.Dense(CLASSES, dtype="float32"),
        ]
    )


def _loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _examples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of noise. One colour is brighter; it is the class."""
    generator = np.random.default_rng(seed)
    y = generator.integers(0, CLASSES, count).astype("int32")
    x = generator.normal(size=(count, 8, 8, 3)) + np.eye(CLASSES)[y][:, None, None, :]
    return x.astype("float32"), y


@functools.cache
def _keras_strategy(name: str) -> tf.distribute.Strategy | None:
    if name == "multi_worker":
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if name == "mirrored" else None


def _difference(trained: Trained, reference: Trained) -> tuple[str, float | None]:
    """Returns the first quantity in which a training differs, and the difference."""
    compared = {
        "final weights": zip(trained.weights, reference.weights, strict=True),
        "loss of fit": [(trained.losses, reference.losses)],
        "loss of evaluate": [(trained.evaluated, reference.evaluated)],
        "predictions": [(trained.predicted, reference.predicted)],
    }
    for name, pairs in compared.items():
        off = max(float(np.max(np.abs(np.subtract(one, other))) / np.max(np.abs(other))) for one, other in pairs)
        if not off <= TOLERANCE:
            return f"{name} differ from one device's", off
    return "", None


@contextlib.contextmanager
def _during(stage: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise StageError(stage) from error


def _short(error: BaseException | None) -> str:
    """Returns the line of an error message that names the cause, without paths and running numbers."""
    text = re.sub(r"\x1b\[\d*m", "", str(getattr(error, "message", None) or error))
    text = re.sub(r"\{\n.*?\n\}", "{...}", text, flags=re.DOTALL)  # a printed value
    # In code that autograph converted, the message ends with the original error.
    nested = re.findall(r"^\s*(?:\w+\.)*\w*Error: (.*)$", text, re.MULTILINE)
    lines = nested[-1:] or [line.strip() for line in text.splitlines() if not NOISE.match(line)]
    line = re.sub(r"(?<![\w.])(?:/[\w.+-]+){2,}/", "", lines[0] if lines else text)
    line = re.sub(r"^\(\d\) [A-Z_]+: *", "", line)
    return re.sub(r"(?<=0x)[0-9a-f]+|_\d+\b", "", line)[:300].strip()


def main(reference: str, results: str, side: Any, cells: str) -> None:
    """Appends a line for each cell to the results file. Stops after a failure, which can affect later cells."""
    todo = [Cell(**cell) for cell in json.loads(cells)]
    if todo[0].strategy == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with Path(results).open("a", encoding="utf-8") as out:
        for cell in todo:
            outcome = run(cell, side, load(Path(reference)))
            out.write(json.dumps(asdict(outcome)) + "\n")
            out.flush()
            if outcome.status == "fails":
                return


def every_cell(strategies: Sequence[str]) -> list[Cell]:
    """Returns the cells of the matrix in the order of its tables."""
    return [
        Cell(strategy=strategy, precision=precision, jit_compile=jit, accumulate=parts, steps_per_execution=steps)
        for strategy in strategies
        for precision in ("float32", "mixed_float16", "mixed_bfloat16")
        for jit in (False, True)
        for parts in (1, 4)
        for steps in (1, 4)
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
