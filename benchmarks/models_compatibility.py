"""Runs all features of tfopt on six kinds of models.

    python benchmarks/models_compatibility.py [--only unet bilstm] [--page-only]

models_cell.py defines the cells. Each kind of model has its own process. The script merges the outcomes into
benchmarks/results/models_compatibility.json and writes docs/compatibility.md. The run takes several minutes on two
cores.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import keras
import tensorflow as tf
import tyro
from compatibility_page import MODELS, write_page
from models_cell import BATCH, CELLS, EPOCHS, EXAMPLES, TOLERANCE, Outcome
from six_models import KINDS

from tfopt.atomic.files import write_text

SCRIPT = Path(__file__).with_name("models_cell.py")


@dataclass(frozen=True, kw_only=True)
class Options:
    only: tuple[Literal["transformer", "bilstm", "unet", "two_by_two", "penalized", "siamese"], ...] = tuple(KINDS)
    """Kinds of models to run."""
    timeout_s: float = 900.0
    """Time limit of the cells of one kind; cells over the limit count as hanging."""
    page_only: bool = False
    """Run nothing; write the page from the recorded results."""


def main(options: Options) -> None:
    recorded = json.loads(MODELS.read_text())["kinds"] if MODELS.exists() else {}
    for name in () if options.page_only else options.only:
        outcomes = run_cells(name, list(CELLS), options.timeout_s)
        for cell, outcome in outcomes.items():
            print(f"{name} {cell}: {outcome.status} {outcome.figure} {outcome.words}", flush=True)
        recorded[name] = {cell: asdict(outcome) for cell, outcome in outcomes.items()}
        write_text(MODELS, json.dumps(results(recorded), indent=1) + "\n")
    write_page()


def results(kinds: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of the results file, in the order of the table."""
    return {
        "what": f"{EPOCHS} epochs of {EXAMPLES} examples in batches of {BATCH}, on a CPU",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tolerance": TOLERANCE,
        "kinds": {name: kinds[name] for name in KINDS if name in kinds},
    }


def run_cells(name: str, cells: list[str], timeout_s: float) -> dict[str, Outcome]:
    """Runs cells of one kind of model. If a cell ends the process, the other cells run in a new process."""
    outcomes: dict[str, Outcome] = {}
    while todo := [cell for cell in cells if cell not in outcomes]:
        with tempfile.TemporaryDirectory() as directory:
            told = Path(directory) / "outcomes.jsonl"
            told.touch()
            ended = _run(name, todo, told, timeout_s)
            for line in told.read_text(encoding="utf-8").splitlines():
                outcome = json.loads(line)
                cell = outcome.pop("cell")
                outcomes[cell] = Outcome(**outcome)
        missing = [cell for cell in cells if cell not in outcomes]
        if ended and missing:
            outcomes[missing[0]] = Outcome(status="fails", words=ended)
    return outcomes


def _run(name: str, cells: list[str], told: Path, timeout_s: float) -> str:
    """Runs a process. If it did not run all cells, returns the reason why it ended."""
    command = [sys.executable, str(SCRIPT), name, str(told), *cells]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"hangs: nothing came of it in {timeout_s:.0f} s"
    if run.returncode == 0:
        return ""
    how = signal.Signals(-run.returncode).name if run.returncode < 0 else f"exit code {run.returncode}"
    return f"the process ends with {how}: {''.join(run.stderr.strip().splitlines()[-1:])[:200]}"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
