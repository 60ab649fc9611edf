"""What every builder of tfopt.models can do: precisions, XLA, replicas, save and reload, pruning, export.

    python benchmarks/builders.py [--only vit unet] [--only-new] [--page-only]

runs the small model of each builder of tfopt/models/table.py in a process of its own, merges the outcomes into
benchmarks/results/models.json and writes docs/models.md. About a minute for each builder on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "models.json"
BATCH = 8
SPARSITY = 0.75
OPEN_SIZE = 24
# int8 outputs of a model with random weights further from the float ones than this are wrong, not rounded.
INT8_ERROR = 0.25


@dataclass(frozen=True, kw_only=True)
class Options:
    only: tuple[str, ...] = ()
    """Builders to run, all by default."""
    only_new: bool = False
    """Run only builders without results."""
    page_only: bool = False
    """Run nothing; write the page from the recorded results."""
    timeout_s: float = 900.0
    """Time limit of the cells of one builder."""
    cell: tuple[str, str] | None = None
    """Internal: run the cells of this builder in this process, and write the outcomes to this file."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a cell.

    Attributes:
        status: "works", "refused" with tfopt's own error, or "fails".
        figure: The measured figure, for the table.
        words: The reason of a refusal or failure.
    """

    status: Literal["works", "refused", "fails"]
    figure: str = ""
    words: str = ""


def main(options: Options) -> None:
    if options.cell is not None:
        run_cells(options.cell[0], Path(options.cell[1]))
        return
    from builders_page import write_page

    from tfopt.models.table import SMALL_MODELS

    recorded = json.loads(RESULTS.read_text())["builders"] if RESULTS.exists() else {}
    names = [name for name in options.only or SMALL_MODELS if not (options.only_new and name in recorded)]
    for name in () if options.page_only else names:
        recorded[name] = run(name, options.timeout_s)
        print(
            name, {cell: outcome["figure"] or outcome["status"] for cell, outcome in recorded[name].items()}, flush=True
        )
        _write({name: recorded[name] for name in sorted(SMALL_MODELS) if name in recorded})
    write_page()


def _write(builders: dict[str, Any]) -> None:
    import keras
    import tensorflow as tf

    from tfopt.atomic.files import write_text

    results = {
        "what": f"the small model of each builder; one training step of {BATCH} examples, on a CPU",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "builders": builders,
    }
    write_text(RESULTS, json.dumps(results, indent=1) + "\n")


def run(name: str, timeout_s: float) -> dict[str, Any]:
    """Runs the cells of one builder in a process of its own, and returns their outcomes."""
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory) / "outcomes.json"
        command = [sys.executable, __file__, "--cell", name, str(told)]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s)
        if done.returncode != 0:
            raise SystemExit(f"The cells of {name} ended with code {done.returncode}: {done.stderr[-2000:]}")
        return dict(json.loads(told.read_text()))


def run_cells(name: str, told: Path) -> None:
    """Runs the cells of one builder, and writes their outcomes."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tempfile.TemporaryDirectory() as directory:
        trial = Trial(name, Path(directory))
        outcomes = {cell: asdict(outcome(getattr(trial, cell))) for cell in CELLS}
    told.write_text(json.dumps(outcomes))


def outcome(cell: Callable[[], str]) -> Outcome:
    """Runs a cell. An error of tfopt is a refusal, and any other error a failure."""
    from tfopt.errors import TfoptError

    try:
        return Outcome(status="works", figure=cell())
    except TfoptError as error:
        return Outcome(status="refused", words=str(error))
    except Exception as error:  # noqa: BLE001 - the failure of a cell is its outcome
        return Outcome(status="fails", words=f"{type(error).__name__}: {error}")


class Trial:
    """The cells of one builder. Each returns its figure, and raises an error if it does not work."""

    def __init__(self, name: str, directory: Path) -> None:
        import keras
        from int8_models import calibrate_batch_norm

        from tfopt.models.table import SMALL_MODELS

        self.entry, self.directory = SMALL_MODELS[name], directory
        self.model = self.train(precision="float32", jit_compile=False, strategy="none")
        # After one step the moving statistics are those of the start, and all outputs of a deep model are alike. With
        # those of the examples, a deep model with random weights amplifies every rounding. Shifted values pass the
        # activations, as in int8_models.py.
        for layer in self.model.layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.beta.assign(layer.beta + 1)
        calibrate_batch_norm(self.model, self.examples(4 * BATCH)[0])

    def examples(self, count: int) -> tuple[Any, Any]:
        """Returns inputs, and targets of the model's task."""
        import numpy as np

        entry, generator = self.entry, np.random.default_rng(0)
        shape = (count, *(OPEN_SIZE if size is None else size for size in entry.input_shape))
        if entry.input_dtype == "int32":
            x = generator.integers(0, min(entry.outputs, 10), shape, np.int32)
        else:
            x = generator.random(shape, np.float32)
        outputs = entry.build().compute_output_shape(shape)
        return x, generator.integers(0, entry.outputs, outputs[:-1]).astype(np.int32)

    def train(self, **settings: Any) -> Any:
        """Trains one step with tfopt, and returns the model."""
        import keras
        import numpy as np

        import tfopt

        keras.utils.set_random_seed(0)
        plan = tfopt.plan(tfopt.TrainingConfig(global_batch_size=BATCH, steps_per_execution=1, **settings))
        with plan.scope():
            model = self.entry.build()
        tfopt.compile(model, plan, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        history = model.fit(plan.pipeline(self.examples(BATCH), training=False), verbose=0).history
        if not np.isfinite(history["loss"]).all():
            raise ArithmeticError(f"the loss is {history['loss']}")
        return model

    def mixed_float16(self) -> str:
        self.train(precision="mixed_float16", jit_compile=False, strategy="none")
        return ""

    def mixed_bfloat16(self) -> str:
        self.train(precision="mixed_bfloat16", jit_compile=False, strategy="none")
        return ""

    def xla(self) -> str:
        import tfopt

        model = self.train(precision="float32", jit_compile=True, strategy="none")
        record = tfopt.ledger(model)
        if record.fallback:
            raise tfopt.ConfigError(f"The step trains without XLA. Received: {record.fallback}.")
        return ""

    def mirrored(self) -> str:
        self.train(precision="float32", jit_compile=False, strategy="mirrored")
        return ""

    def save_and_reload(self) -> str:
        import keras
        import numpy as np

        file = self.directory / "model.keras"
        self.model.save(file)
        x = self.examples(BATCH)[0]
        np.testing.assert_array_equal(keras.models.load_model(file)(x), self.model(x))
        return ""

    def pruning(self) -> str:
        import keras

        import tfopt

        copy = keras.models.clone_model(self.model)
        copy.set_weights(self.model.get_weights())
        sparsity = tfopt.prune(copy, tfopt.PruningConfig(target_sparsity=SPARSITY)).metrics["sparsity"]
        if abs(sparsity - SPARSITY) > 0.02:
            raise ArithmeticError(f"the weights are {sparsity:.1%} zeros, not {SPARSITY:.0%}")
        return f"{sparsity:.0%} zeros"

    def float32_export(self) -> str:
        import tfopt

        artifact = tfopt.export(self.model, self.directory / "float32")
        return self._parity(artifact, 1e-4)

    def int8_export(self) -> str:
        import tfopt

        config = tfopt.ExportConfig(precision="int8", int8_nodes="all")
        artifact = tfopt.export(
            self.model, self.directory / "int8", config, calibration_data=self.examples(4 * BATCH)[0]
        )
        return self._parity(artifact, INT8_ERROR)

    def _parity(self, artifact: Any, limit: float) -> str:
        """Returns the relative error that the receipt states, of a verification in a fresh process."""
        import tfopt

        receipt = tfopt.verify(artifact.path, seconds=0.02)
        if not receipt.ok or receipt.parity_relative_error is None or receipt.parity_relative_error > limit:
            raise ArithmeticError(f"parity {receipt.parity_relative_error}; {' '.join(receipt.problems)}")
        return f"{receipt.parity_relative_error:.0e}"


CELLS: dict[str, str] = {
    "mixed_float16": "mixed_float16",
    "mixed_bfloat16": "mixed_bfloat16",
    "xla": "XLA",
    "mirrored": "mirrored",
    "save_and_reload": "reload",
    "pruning": "prune",
    "float32_export": "float32 export",
    "int8_export": "int8 export",
}

if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
