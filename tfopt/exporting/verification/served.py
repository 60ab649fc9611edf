"""Serves one artifact in its own process, which imports its runtime and NumPy, but not tfopt.

The process reads one JSON command per line from standard input: "load", "count", "predict", "cold_start", "time" or
"throughput". It answers with one JSON line. A command that takes long first sends lines that show that the process is
alive.

In its own process, a model is not slowed by the thread pool of another model. The process also proves that the artifact
needs only its runtime: tensorflow_only.py or one of its siblings. `tfopt.exporting.verification.process` starts it.
"""

import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def end_with(parent: int) -> None:
    """Ends this process when its parent has ended, also if that was killed while this one imports or computes."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    sys.path[:] = json.loads(sys.argv[1])  # where the caller finds the runtime

import numpy as np  # noqa: E402 - it ends with its parent from the first line on

NAMED = "="  # as in process.py
ALIVE_S = 1.0  # the time between two lines that show that the process is alive


class Runner:
    """Answers the commands with a runtime. It calls `show_life` after each step that may take long."""

    def __init__(self, runtime: Any, show_life: Callable[[], None]) -> None:
        self.runtime, self.show_life = runtime, show_life
        self.cold: dict[str, float | None] = {}

    def load(self, **options: Any) -> dict[str, Any]:
        loaded: dict[str, Any] = self.runtime.load(**options)
        loaded["imported"] = [name for name in self.runtime.blocked if sys.modules.get(name) is not None]
        self.cold = {"load_ms": self.runtime.load_ms}
        first = (spec["shape"][0] for spec in loaded["inputs"].values() if spec["shape"])
        self.fixed = next(first, None)
        return loaded

    def cold_start(self) -> dict[str, float | None]:
        """Returns the time of loading, and that of the first call of "predict" with the peak of memory after it."""
        return self.cold

    def count(self) -> dict[str, int]:
        """Counts the weights of products and convolutions, and the zeros among them."""
        arrays = list(self.runtime.weights())
        zeros = sum(array.size - np.count_nonzero(array) for array in arrays)
        return {"weights": sum(array.size for array in arrays), "zeros": int(zeros)}

    def kernels(self) -> dict[str, int]:
        return dict(self.runtime.kernels())

    def predict(self, inputs: str, outputs: str, batch_size: int, open_sizes: bool) -> dict[str, Any]:
        self.runtime.open_sizes = open_sizes  # which OpenVINO must know
        with np.load(inputs) as arrays:
            fed = {name.removeprefix(NAMED): arrays[name] for name in arrays.files}
        length = len(next(iter(fed.values())))
        size, short = self.fixed or batch_size, -length % self.fixed if self.fixed else 0
        if short:  # the last example fills the last batch, and its further outputs are dropped
            fed = {name: np.concatenate([value, np.repeat(value[-1:], short, axis=0)]) for name, value in fed.items()}
        parts: dict[str, list[Any]] = {}
        for start in range(0, length, size):
            batch = self.runtime.place({name: value[start : start + size] for name, value in fed.items()})
            started = time.perf_counter()
            for name, value in self.runtime.arrays(self.runtime.call(batch)).items():
                parts.setdefault(name, []).append(value)
            if "first_call_ms" not in self.cold:
                self.cold["first_call_ms"] = (time.perf_counter() - started) * 1e3
                self.cold["memory_peak_bytes"] = memory_peak()
            self.show_life()
        joined: Any = {
            NAMED + name: plain(np.concatenate(list(map(np.atleast_1d, values))))[: -short or None]
            for name, values in parts.items()
        }
        np.savez(outputs, **joined)
        return {}

    def time(self, inputs: str, seconds: float, at_least: int) -> dict[str, Any]:
        """Times calls for about `seconds` seconds. The first two, which trace and allocate, are not counted."""
        batch = self._warmed_up(inputs)
        milliseconds: list[float] = []
        until = time.perf_counter() + seconds
        while len(milliseconds) < at_least or time.perf_counter() < until:
            start = time.perf_counter()
            self.runtime.call(batch)
            milliseconds.append((time.perf_counter() - start) * 1e3)
            self.show_life()
        return {"ms": milliseconds}

    def throughput(self, inputs: str, seconds: float, callers: int) -> dict[str, float]:
        """Returns the calls in a second of several callers, each of which calls again and again."""
        self.runtime.callers = callers  # OpenVINO must know beforehand
        try:
            return {"calls_per_s": self._calls_per_s(self._warmed_up(inputs), seconds, callers)}
        finally:
            self.runtime.callers = 1

    def _calls_per_s(self, batch: Any, seconds: float, callers: int) -> float:
        def calls_per_s(show_life: Callable[[], None]) -> float:
            self.runtime.call(batch)  # a runtime may have something of its own for each thread
            calls, start = 0, time.perf_counter()
            while not calls or time.perf_counter() < start + seconds:
                self.runtime.call(batch)
                calls += 1
                show_life()
            return calls / (time.perf_counter() - start)

        with ThreadPoolExecutor(callers) as pool:  # this thread is a caller too, and alone shows life
            others = [pool.submit(calls_per_s, lambda: None) for _ in range(callers - 1)]
            return calls_per_s(self.show_life) + sum(each.result() for each in others)

    def _warmed_up(self, inputs: str) -> Any:
        with np.load(inputs) as arrays:
            batch = self.runtime.place({name.removeprefix(NAMED): arrays[name] for name in arrays.files})
        for _ in range(2):
            self.runtime.call(batch)
            self.show_life()
        return batch


def plain(values: Any) -> Any:
    """Returns strings as bytes, which a file can hold without Python objects; numbers as they are."""
    if values.dtype.kind not in "OU":
        return values
    if not all(isinstance(value, (str, bytes)) for value in values.flat):
        raise TypeError("its outputs must be tensors of numbers or strings, and one is a sequence or a map")
    encoded = [value if isinstance(value, bytes) else value.encode() for value in values.flat]
    return np.array(encoded, dtype=np.bytes_).reshape(values.shape)


def memory_peak() -> int | None:
    """Returns the most bytes of memory that this process has had, as Linux counts them; None on other systems.

    getrusage would count the memory of the process that started this one.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


def load_runtime(path: str) -> Any:
    """Returns the Runtime of a file such as tensorflow_only.py."""
    spec = importlib.util.spec_from_file_location("served_runtime", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Runtime()


def main(file: str) -> None:
    # Other output, of Python or of a C++ library, must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    shown = time.monotonic()

    def show_life() -> None:
        nonlocal shown
        if time.monotonic() - shown > ALIVE_S:  # rarely, so that the timed calls are not disturbed
            shown = time.monotonic()
            print(json.dumps({"alive": True}), file=answers, flush=True)

    runner = Runner(load_runtime(file), show_life)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(runner, command.pop("do"))(**command)
        except Exception as error:  # noqa: BLE001 - the parent process raises it again
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[2])
