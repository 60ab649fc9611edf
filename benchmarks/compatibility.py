"""Runs every combination of strategy, precision, XLA, accumulation and steps per execution in tfopt and plain Keras 3.

    python benchmarks/compatibility.py [--only none mirrored] [--side tfopt] [--page-only]

compatibility_cell.py defines the cells. This script runs them in separate processes, merges the outcomes into
benchmarks/results/compatibility.json, and writes docs/compatibility.md from this file. A process runs cells until one
fails. The next cell begins in a new process, because a failure can affect later cells. Under multi_worker, a cell has
two processes. Both must succeed and end with the same weights. The run takes about an hour on two shared cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import keras
import tensorflow as tf
import tyro
from compatibility_cell import BATCH, EPOCHS, EXAMPLES, TOLERANCE, Cell, Outcome, every_cell, save, train_reference
from compatibility_page import RESULTS, STRATEGIES, write_page

from tfopt.atomic.files import write_text

SIDES = ("tfopt", "keras")
GRACE_S = 20.0  # for the other worker, after one has failed


@dataclass(frozen=True, kw_only=True)
class Options:
    only: tuple[Literal["none", "mirrored", "multi_worker"], ...] = STRATEGIES
    """Strategies to run."""
    side: tuple[Literal["tfopt", "keras"], ...] = SIDES
    """The library that trains."""
    timeout_s: float = 600.0
    """Time limit of a cell; a cell over the limit counts as hanging."""
    page_only: bool = False
    """Run nothing; write the page from the recorded results."""


def main(options: Options) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": []}
    if not options.page_only:
        with tempfile.TemporaryDirectory() as directory:
            reference = Path(directory) / "reference.npz"
            save(train_reference(), reference)
            for strategy in options.only:
                for side in options.side:
                    for cell, outcome in run_cells(every_cell([strategy]), side, reference, options.timeout_s):
                        print(f"{side:6} {cell}: {outcome.status} {outcome.words}", flush=True)
                        results = merge(results, cell, side, outcome)
                        write_text(RESULTS, json.dumps(results, indent=1) + "\n")
    write_page()


def merge(results: dict[str, Any], cell: Cell, side: str, outcome: Outcome) -> dict[str, Any]:
    """Returns the results with one cell's outcome added or replaced, in the order of the tables."""
    known = {Cell(**entry["cell"]): entry for entry in results["cells"]}
    told = {key: value for key, value in asdict(outcome).items() if key != "digest"}
    known[cell] = {"cell": asdict(cell), **known.get(cell, {}), side: told}
    return {
        "what": f"{EPOCHS} epochs of {EXAMPLES} examples in batches of {BATCH}, evaluate and predict, on a CPU",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tolerance": TOLERANCE,
        "cells": [known[cell] for cell in every_cell(STRATEGIES) if cell in known],
    }


def run_cells(cells: Sequence[Cell], side: str, reference: Path, timeout_s: float) -> Iterator[tuple[Cell, Outcome]]:
    """Runs cells of one strategy, and yields each cell with its outcome."""
    done = 0
    while done < len(cells):
        todo = cells[done:]
        for cell, outcome in zip(todo, _run_until_failure(todo, side, reference, timeout_s), strict=False):
            done += 1
            yield cell, outcome


def _run_until_failure(cells: Sequence[Cell], side: str, reference: Path, timeout_s: float) -> Iterator[Outcome]:
    """Yields outcomes up to the first cell that fails, crashes or hangs; yields at least one."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as processes:
        workers = [
            processes.enter_context(_Worker(Path(directory) / str(index), environment, cells, side, reference))
            for index, environment in enumerate(_environments(cells[0].strategy))
        ]
        for index in range(len(cells)):
            outcome = _wait(workers, index, timeout_s)
            yield outcome
            if outcome.status == "fails":
                return


class _Worker:
    """A process that runs cells, and its two files: the outcomes and the printed output."""

    def __init__(
        self, path: Path, environment: dict[str, str], cells: Sequence[Cell], side: str, reference: Path
    ) -> None:
        self.results, self.printed = path.with_suffix(".jsonl"), path.with_suffix(".txt")
        self.results.touch()
        command = [sys.executable, str(Path(__file__).with_name("compatibility_cell.py")), str(reference)]
        with self.printed.open("w") as out:
            self.process = subprocess.Popen(
                [*command, str(self.results), side, json.dumps([asdict(cell) for cell in cells])],
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", **environment},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def outcome(self, index: int) -> Outcome | None:
        """Returns the outcome of a cell. A process that ended without an outcome has crashed."""
        ended = self.process.poll() is not None  # read first, because the process could write a line in between
        lines = self.results.read_text(encoding="utf-8").split("\n")[:-1]
        if index < len(lines):
            return Outcome(**json.loads(lines[index]))
        if not ended:
            return None
        code = self.process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = [line for line in self.printed.read_text(errors="replace").splitlines() if line.strip()][-1:]
        return Outcome(status="fails", words=f"the process ends with {how}: {''.join(last)[:200]}")


def _wait(workers: Sequence[_Worker], index: int, timeout_s: float) -> Outcome:
    """Waits for the outcome of a cell on all workers."""
    deadline = time.monotonic() + timeout_s
    failed = None
    while time.monotonic() < deadline:
        outcomes = [worker.outcome(index) for worker in workers]
        if failed is None:
            failed = next((outcome for outcome in outcomes if outcome and outcome.status == "fails"), None)
            if failed is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if all(outcomes):
            return failed or _together(outcomes)
        time.sleep(0.2)
    return failed or Outcome(status="fails", words=f"hangs: nothing came of it in {timeout_s:.0f} s")


def _together(outcomes: Sequence[Any]) -> Outcome:
    """Returns the worst of several workers' outcomes."""
    if all(outcome.status == "trains" for outcome in outcomes) and len({outcome.digest for outcome in outcomes}) > 1:
        return Outcome(status="differs", words="the workers end with different weights")
    return max(outcomes, key=lambda outcome: ("trains", "differs", "refused", "fails").index(outcome.status))


def _environments(strategy: str) -> list[dict[str, str]]:
    """Returns the environment variables of each process."""
    if strategy != "multi_worker":
        return [{"TF_CONFIG": "{}"}]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        workers = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
    return [
        {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})}
        for index in range(2)
    ]


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
