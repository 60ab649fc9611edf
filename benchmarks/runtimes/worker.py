"""The common base of all runtime workers: JSON commands on standard input, one answer per line.

"load", "predict" and "time" are the commands of tfopt/exporting/verification/served.py, so that tfopt's
processes and these are timed in the same way. "convert" runs in a separate process. A worker runs with its runtime's
Python and does not import tfopt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


class Worker:
    """Base of the runtimes' workers, which define `packages`, `convert`, `open` and `call`.

    Models have one input, one output and a static batch size. Only the model of the current batch size is open.
    """

    packages: tuple[str, ...]

    def convert(self, source: str, calibration: np.ndarray, target: str, family: str) -> None:
        """Quantizes a float SavedModel.

        Args:
            source: The SavedModel. Its batch size is open, or equals the size of the calibration batches.
            calibration: Batches, along the first axis.
            target: The directory to fill; it exists.
            family: "convolutional" or "transformer".
        """
        raise NotImplementedError

    def open(self, path: str, threads: int) -> None:
        raise NotImplementedError

    def call(self, batch: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def do_convert(self, source: str, calibration: str, target: str, family: str, batch_size: int) -> dict[str, Any]:
        examples = only_array(calibration)
        batches = examples[: len(examples) // batch_size * batch_size].reshape(-1, batch_size, *examples.shape[1:])
        self.convert(source, batches, target, family)
        return {"versions": {package: version(package) for package in self.packages}}

    def do_load(self, path: str, threads: int) -> dict[str, Any]:
        self.path, self.threads, self.batch_size = path, threads, 0
        return {}

    def do_predict(self, inputs: str, outputs: str, batch_size: int, open_sizes: bool = False) -> dict[str, Any]:
        assert not open_sizes  # its models have static batch sizes
        examples = only_array(inputs)
        starts = range(0, len(examples), batch_size)
        np.savez(outputs, np.concatenate([self._run(examples[start : start + batch_size]) for start in starts]))
        return {}

    def do_time(self, inputs: str, seconds: float, at_least: int) -> dict[str, Any]:
        batch = only_array(inputs)
        for _ in range(2):
            self._run(batch)
        milliseconds: list[float] = []
        until = time.perf_counter() + seconds
        while len(milliseconds) < at_least or time.perf_counter() < until:
            start = time.perf_counter()
            self.call(batch)
            milliseconds.append((time.perf_counter() - start) * 1e3)
        return {"ms": milliseconds}

    def _run(self, batch: np.ndarray) -> np.ndarray:
        if len(batch) != self.batch_size:
            self.open(str(Path(self.path, f"batch_{len(batch)}")), self.threads)
            self.batch_size = len(batch)
        return np.array(self.call(batch))  # the runtime may overwrite its own at the next call


def only_array(path: str) -> np.ndarray:
    with np.load(path) as arrays:
        (array,) = (arrays[name] for name in arrays.files)
    return array


def serve(worker: Worker) -> None:
    # Output of Python or a C++ library must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, f"do_{command.pop('do')}")(**command)
        except Exception as error:  # noqa: BLE001 - the parent process raises it again
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
