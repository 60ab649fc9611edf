"""Runs the features of tfopt on one kind of model. Tells whether each feature works and whether it equals plain Keras.

    python benchmarks/models_cell.py KIND RESULTS CELLS...

runs cells one after the other. models_compatibility.py starts it. The cells use only the public names of tfopt, as a
user's script does.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from six_models import KINDS, Examples, Kind

import tfopt

TOLERANCE = 1e-4
EPOCHS, BATCH = 3, 16
EXAMPLES, VALIDATION = 167, 93  # the last batch of an epoch has 7
SPARSITY = 0.75
# A cell fails if the relative error of its int8 outputs is above this; rounding errors of these models are far below.
INT8_ERROR = 0.25
INT8 = tfopt.ExportConfig(precision="int8", int8_nodes="all")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a cell.

    Attributes:
        status: "equal" to plain Keras, "works" if there is no reference, "refused" before work begins, or "fails".
        figure: The measured figure, for the table.
        words: The reason of a refusal or failure, or another note.
    """

    status: Literal["equal", "works", "refused", "fails"]
    figure: str = ""
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model, and its results in training and after training."""

    model: keras.Model
    history: dict[str, list[float]]
    predicted: dict[str, np.ndarray]
    warned: Sequence[str] = ()


def train_by_keras(kind: Kind) -> Trained:
    """Trains with plain Keras on one device, with none of the settings."""
    keras.utils.set_random_seed(0)
    model = kind.build()
    model.compile(**kind.settings(), jit_compile=False)
    return _fit(model, kind, lambda examples: tf.data.Dataset.from_tensor_slices(examples).batch(BATCH))


def train(kind: Kind, callbacks: Callable[[keras.Model], list[Any]] | None = None, **settings: Any) -> Trained:
    """Trains with tfopt, with the examples in order."""
    plan = tfopt.plan(tfopt.TrainingConfig(global_batch_size=BATCH, **settings))
    keras.utils.set_random_seed(0)
    with plan.scope():
        model = kind.build()
    tfopt.compile(model, plan, **kind.settings())
    batched = functools.partial(plan.pipeline, training=False)
    return _fit(model, kind, batched, callbacks(model) if callbacks else None)


def _fit(model: keras.Model, kind: Kind, batched: Callable[[Examples], Any], callbacks: Any = None) -> Trained:
    validation = kind.examples(VALIDATION, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", tfopt.TfoptWarning)
        history = model.fit(
            batched(kind.examples(EXAMPLES, 1)),
            validation_data=batched(validation),
            epochs=EPOCHS,
            callbacks=callbacks,
            verbose=0,
        ).history
    said = [str(warning.message) for warning in caught if issubclass(warning.category, tfopt.TfoptWarning)]
    evaluated = model.evaluate(batched(validation), verbose=0, return_dict=True)
    history["evaluated_loss"] = [evaluated["loss"]]
    return Trained(model=model, history=history, predicted=_predict(model, validation[0]), warned=said)


def _predict(model: keras.Model, inputs: Any) -> dict[str, np.ndarray]:
    outputs = model.predict(inputs, verbose=0)
    return dict(outputs) if isinstance(outputs, dict) else {"output": outputs}


class Trial:
    """The cells of one kind of model. Shared objects are created once."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.kind, self.directory = name, KINDS[name], directory

    @functools.cached_property
    def reference(self) -> Trained:
        return train_by_keras(self.kind)

    @functools.cached_property
    def trained(self) -> Trained:
        return train(self.kind, precision="float32", epochs=EPOCHS)

    @functools.cached_property
    def calibration(self) -> Any:
        return self.kind.examples(EXAMPLES, 1)[0]

    @functools.cached_property
    def held_out(self) -> tuple[Any, Any]:
        return self.kind.examples(VALIDATION, 2)[:2]

    @functools.cached_property
    def float_artifact(self) -> tfopt.Artifact:
        return tfopt.export(self.trained.model, self.directory / "float32")

    @functools.cached_property
    def int8_artifact(self) -> tfopt.Artifact:
        return tfopt.export(
            self.trained.model,
            self.directory / "int8",
            INT8,
            calibration_data=self.calibration,
            baseline=self.float_artifact.path,
        )

    def fit_auto(self) -> Outcome:
        return self._compare(train(self.kind, epochs=EPOCHS))

    def mirrored(self) -> Outcome:
        return self._compare(train(self.kind, strategy="mirrored", precision="float32"))

    def accumulate(self) -> Outcome:
        return self._compare(train(self.kind, accumulate=4, precision="float32"))

    def xla(self) -> Outcome:
        trained = train(self.kind, jit_compile=True, precision="float32", steps_per_execution=1)
        record = tfopt.ledger(trained.model)
        compiled = not record.fallback and record.of_kind("compilation")
        said = "" if compiled else f"Trained without XLA: {record.fallback or ' '.join(trained.warned)}"
        return self._compare(trained, said)

    def mixed_bfloat16(self) -> Outcome:
        return self._learns(train(self.kind, precision="mixed_bfloat16"))

    def mixed_float16(self) -> Outcome:
        return self._learns(train(self.kind, precision="mixed_float16"))

    def pruning(self) -> Outcome:
        config = tfopt.PruningConfig(target_sparsity=SPARSITY, frequency=2)
        schedules: list[tfopt.PruningSchedule] = []

        def scheduled(model: keras.Model) -> list[Any]:
            schedules.append(tfopt.PruningSchedule(model, config))
            return schedules

        trained = train(self.kind, scheduled, precision="float32", steps_per_execution=1)
        sparsity = schedules[0].report.metrics["sparsity"]
        if abs(sparsity - SPARSITY) > 0.01:
            return Outcome(status="fails", words=f"the weights are {sparsity:.1%} zeros, not {SPARSITY:.0%}")
        return self._learns(trained, f"{sparsity:.0%} zeros")

    def float_export(self) -> Outcome:
        inputs, predicted = self.held_out[0], self.trained.predicted
        found = _difference(_serve(self.float_artifact.path, inputs), predicted, "outputs")
        if isinstance(inputs, np.ndarray) and inputs.dtype.kind == "i":  # tokens of any length
            inputs = inputs[:, :9]
            predicted = _predict(self.trained.model, inputs)
            found = found or _difference(_serve(self.float_artifact.path, inputs), predicted, "outputs of length 9")
        return found or Outcome(status="equal")

    def int8_export(self) -> Outcome:
        outputs = _serve(self.int8_artifact.path, self.held_out[0])
        return _close(outputs, self.trained.predicted, INT8_ERROR, _int8_nodes(self.int8_artifact))

    def int8_weight_only(self) -> Outcome:
        return self._weight_only("int8_weight_only", 0.05)

    def int4_weight_only(self) -> Outcome:
        return self._weight_only("int4_weight_only", 0.5)

    def verify(self) -> Outcome:
        receipt = tfopt.verify(self.int8_artifact.path, data=self.held_out, metric=self.kind.scores, seconds=0.02)
        scored = receipt.scores if receipt.accuracy is None else {"accuracy": receipt.accuracy}
        of_float = receipt.baseline_scores if receipt.accuracy is None else {"accuracy": receipt.baseline_accuracy}
        if not receipt.ok or not scored:
            return Outcome(status="fails", words=" ".join(receipt.problems) or "nothing was scored")
        ((name, value),) = scored.items()
        return Outcome(status="works", figure=f"{value:.0%}, float {of_float[name]:.0%}")

    def quantization_aware(self) -> Outcome:
        plan = tfopt.plan(tfopt.TrainingConfig(global_batch_size=BATCH, precision="float32"))
        config = tfopt.QuantizationConfig(training=True)
        with plan.scope():
            model = tfopt.quantize(self.trained.model, config, calibration_data=self.calibration)
        tfopt.compile(model, plan, **self.kind.settings())
        trained = _fit(model, self.kind, functools.partial(plan.pipeline, training=False))
        artifact = tfopt.export(model, self.directory / "trained_int8", INT8)
        outputs = _serve(artifact.path, self.held_out[0])
        return _close(outputs, trained.predicted, 0.1, _int8_nodes(artifact))

    def kill_and_resume(self) -> Outcome:
        whole, history = train_with_checkpoints(self.name, self.directory / "whole")
        killed = self.directory / "killed"
        command = [sys.executable, __file__, "--until-killed", self.name, str(killed)]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        if child.returncode != -signal.SIGKILL:
            return Outcome(status="fails", words=f"exit code {child.returncode}: {child.stderr.strip()[-300:]}")
        resumed, other_history = train_with_checkpoints(self.name, killed)
        if not 0 < tfopt.ledger(resumed).resumed_from < KILLED_AT:
            return Outcome(status="fails", words=f"it went on from step {tfopt.ledger(resumed).resumed_from}")
        pairs = zip(whole.variables, resumed.variables, strict=True)
        if not all(np.array_equal(one.numpy(), other.numpy()) for one, other in pairs):
            return Outcome(status="fails", words="the weights differ from those of a training that was not killed")
        if history != other_history:
            return Outcome(status="fails", words="the history differs from that of a training that was not killed")
        return Outcome(status="equal")

    def _compare(self, trained: Trained, words: str = "") -> Outcome:
        """Returns whether a training equals that of plain Keras on one device."""
        if trained.model.dtype_policy.compute_dtype != "float32":  # the plan chose it for this machine
            return self._learns(trained)
        for name, values in self.reference.history.items():
            if name.removeprefix("val_").removesuffix("_loss") in self.reference.predicted:
                continue  # the loss of a single output: see docs/training_reference.md
            found = _difference({name: trained.history[name]}, {name: values}, f"{name} of fit")
            if found:
                return found
        weights, expected = trained.model.get_weights(), self.reference.model.get_weights()
        found = _difference(dict(enumerate(weights)), dict(enumerate(expected)), "weights")
        found = found or _difference(trained.predicted, self.reference.predicted, "predictions")
        return found or Outcome(status="equal", words=words)

    def _learns(self, trained: Trained, figure: str = "") -> Outcome:
        losses = trained.history["loss"]
        if not np.isfinite(losses).all() or losses[-1] >= losses[0]:
            return Outcome(status="fails", words=f"the loss goes from {losses[0]:.3g} to {losses[-1]:.3g}")
        if not all(np.isfinite(values).all() for values in trained.predicted.values()):
            return Outcome(status="fails", words="predict gives values that are not finite")
        return Outcome(status="works", figure=figure)

    def _weight_only(self, precision: Any, most: float) -> Outcome:
        path = self.directory / precision
        artifact = tfopt.export(self.trained.model, path, tfopt.ExportConfig(precision=precision))
        size = artifact.bytes_on_disk / self.float_artifact.bytes_on_disk
        return _close(_serve(path, self.held_out[0]), self.trained.predicted, most, f"{size:.2f}x the size")


CELLS: dict[str, str] = {
    "fit_auto": "fit, plan of `auto`",
    "mirrored": "fit, mirrored",
    "accumulate": "fit, accumulate=4",
    "mixed_bfloat16": "fit, mixed_bfloat16",
    "mixed_float16": "fit, mixed_float16",
    "xla": "fit, XLA",
    "pruning": "fit, pruning",
    "kill_and_resume": "fit, killed and resumed",
    "float_export": "export, float32",
    "int8_export": "export, int8",
    "int8_weight_only": "export, int8 weights only",
    "int4_weight_only": "export, int4 weights only",
    "verify": "verify int8 with data",
    "quantization_aware": "quantization-aware training, export int8",
}
KILLED_AT = 18  # one of 33 steps, between two checkpoints


class _Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) >= KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def train_with_checkpoints(name: str, directory: Path, callbacks: Any = None) -> tuple[keras.Model, Any]:
    """Trains with checkpoints, in a different order in each epoch."""
    kind = KINDS[name]
    plan = tfopt.plan(
        tfopt.TrainingConfig(
            global_batch_size=BATCH,
            precision="float32",
            steps_per_execution=1,
            checkpoint_dir=str(directory),
            checkpoint_every=5,
        )
    )
    keras.utils.set_random_seed(0)
    with plan.scope():
        model = kind.build()
    tfopt.compile(model, plan, **kind.settings())
    fitted = model.fit(
        plan.pipeline(kind.examples(EXAMPLES, 1)),
        validation_data=plan.pipeline(kind.examples(VALIDATION, 2), training=False),
        epochs=EPOCHS,
        callbacks=callbacks,
        verbose=0,
    )
    return model, fitted.history


def _serve(path: Path, inputs: Any) -> dict[str, np.ndarray]:
    """Returns the outputs of a SavedModel, served by TensorFlow alone."""
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    taken = serve.structured_input_signature[1]
    if isinstance(inputs, dict):
        given = inputs
    elif isinstance(inputs, tuple):
        given = dict(zip(("first", "second"), inputs, strict=True))
    else:
        given = {next(iter(taken)): inputs}
    outputs = {name: value.numpy() for name, value in serve(**{k: tf.constant(v) for k, v in given.items()}).items()}
    return outputs if len(outputs) > 1 else {"output": next(iter(outputs.values()))}


def _difference(found: Any, expected: Any, what: str) -> Outcome | None:
    """Returns a failure if values differ, relative to the largest value of each tensor."""
    if found.keys() != expected.keys():
        return Outcome(status="fails", words=f"{what} are {sorted(found)}, not {sorted(expected)}")
    # The bias of attention's keys has no gradient. It holds only rounding errors, so its largest value is no reference.
    least = 1e-3 * max(float(np.max(np.abs(values))) for values in expected.values())
    off = max(
        float(np.max(np.abs(np.subtract(found[name], values))) / max(np.max(np.abs(values)), least))
        for name, values in expected.items()
    )
    return None if off <= TOLERANCE else Outcome(status="fails", words=f"{what} differ by {off:.1e}")


def _close(found: Any, expected: Any, most: float, figure: str) -> Outcome:
    """Returns the difference of outputs, relative to their norm."""
    if found.keys() != expected.keys():
        return Outcome(status="fails", words=f"outputs are {sorted(found)}, not {sorted(expected)}")
    errors = [np.linalg.norm(found[name] - value) / np.linalg.norm(value) for name, value in expected.items()]
    error = float(max(errors))
    if not error <= most:
        return Outcome(status="fails", words=f"outputs differ by {error:.1%} of their norm")
    return Outcome(status="works", figure=f"error {error:.1%}, {figure}")


def _int8_nodes(artifact: tfopt.Artifact) -> str:
    count, skipped = len(artifact.report.changed), len(artifact.report.skipped)
    return f"{count} of {count + skipped} nodes"


def run(trial: Trial, cell: str) -> Outcome:
    """Runs a cell. It raises only errors that end the process."""
    try:
        return getattr(trial, cell)()
    except tfopt.TfoptError as error:
        return Outcome(status="refused", words=_one_line(error))
    except Exception as error:  # noqa: BLE001
        return Outcome(status="fails", words=f"{type(error).__name__}: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error))[:600]


def main(name: str, results: str, cells: Sequence[str]) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tempfile.TemporaryDirectory() as directory, Path(results).open("a", encoding="utf-8") as out:
        trial = Trial(name, Path(directory))
        for cell in cells:
            out.write(json.dumps({"cell": cell, **asdict(run(trial, cell))}) + "\n")
            out.flush()


if __name__ == "__main__":
    if sys.argv[1] == "--until-killed":
        train_with_checkpoints(sys.argv[2], Path(sys.argv[3]), [_Kill()])
    else:
        main(sys.argv[1], sys.argv[2], sys.argv[3:])
