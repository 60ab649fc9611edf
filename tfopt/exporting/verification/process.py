"""Runs an artifact with its runtime in its own process, and times several of them in turns."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import tensorflow as tf

from tfopt.atomic.scratch import scratch_directory
from tfopt.child_processes import ENDED_FROM_OUTSIDE, signal_group
from tfopt.errors import ArtifactError, TfoptError
from tfopt.exporting.formats import SAVED_MODEL, format_of
from tfopt.graph.frozen import reason_of
from tfopt.graph.unsafe_ops import check_saved_model
from tfopt.timing import in_turns

PYTHON = sys.executable  # what runs SERVED; the tests put one here that has imported TensorFlow before
SERVED = Path(__file__).with_name("served.py")
NAMED = "="  # before the names of arrays in files: np.savez has arguments of its own, such as "file"
ROUNDS = 5
STEP_LIMIT_S = 600.0
# The kernel ends the largest process with SIGKILL when the memory is full; containers and users use the others.
NO_MEMORY = ("ResourceExhaustedError", "MemoryError", "_ArrayMemoryError")
MISSING_KERNEL = re.compile(r"(?:No OpKernel was registered to support Op|Op type not registered) '(\w+)'")


class MissingKernelError(ArtifactError):
    """TensorFlow in the serving process has no kernel for the op `op`."""

    def __init__(self, op: str) -> None:
        super().__init__(f"TensorFlow must have a kernel for every op. Received: {op}, which has no kernel here.")
        self.op = op


class NotServedError(ArtifactError):
    """The model raised an error. Its text is in `error`."""

    def __init__(self, what: str, path: Path, error: str) -> None:
        super().__init__(f"The {what} cannot be served. Received: {path} ({reason_of(error)}).")
        self.error = error


class ServingStoppedError(TfoptError):
    """The machine ended the serving, by a signal or for want of memory. That says nothing about the SavedModel."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"The process that serves an artifact must have memory, and must not be ended. Received: {path}, whose "
            f"process {reason}. This does not mean that the artifact is damaged. Free memory, or pass smaller batches, "
            "and verify again."
        )


class RuntimeProcess:
    """A fresh Python process that has loaded one artifact with nothing but its runtime.

    Attributes:
        path: The artifact's directory, or a model's file.
        format: Its format, by the file.
        signature: The signature that is called.
        loaded: The report of the process after loading: inputs, outputs, versions, threads.
        renamed: The artifact's names of inputs that callers give under other names.
        step_limit_s: The seconds that one step may take: loading, one batch, or one timed call. A process that takes
            longer is ended, and an ArtifactError says so.
        trusted: Whether the artifact may touch files and the network. Otherwise one that would do so is refused
            before anything of it runs.
        threads: The number of intra-op threads. None means the runtime's default, one for each core.
    """

    def __init__(
        self,
        path: str | Path,
        signature: str = "serving_default",
        *,
        step_limit_s: float = STEP_LIMIT_S,
        trusted: bool = False,
        threads: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.format = format_of(self.path)
        self.signature = signature
        self.step_limit_s = step_limit_s
        self.trusted = trusted
        self.threads = threads
        self.renamed: Mapping[str, str] = {}

    def __enter__(self) -> Self:
        self._check()
        with ExitStack() as stack:
            self._directory = stack.enter_context(scratch_directory())
            self._log = stack.enter_context((self._directory / "stderr").open("wb"))
            words, settings = self._command()
            settings["env"]["TMPDIR"] = str(self._directory)  # what a killed process leaves there goes with it
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,  # a pipe that nobody reads would fill up and stop the process
                text=True,
                process_group=0,  # a group, so that its own child processes end with it
                **settings,
            )
            stack.callback(self._end)
            self.loaded = self._ask(do="load", path=str(self.format.model(self.path.absolute())), **self._options())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(self) -> tuple[list[str], dict[str, Any]]:
        """Returns the command and the settings of the process. Another runtime overrides this with its own command."""
        # -I: the child ignores PYTHONPATH, because search_path passes it the paths of this process.
        words = [PYTHON, "-I", str(SERVED), json.dumps(search_path()), str(SERVED.with_name(self.format.runtime))]
        return words, {"env": {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}}

    def _options(self) -> dict[str, Any]:
        """Returns the options of the command "load", besides the path."""
        return {"threads": self.threads}

    def _check(self) -> None:
        """Refuses what must not be run."""

    def close(self) -> None:
        self._stack.close()

    def _end(self) -> None:
        self._kill()
        self._process.communicate()

    def _kill(self) -> None:
        if self._process.returncode is None:  # otherwise another process may have its id
            signal_group(self._process, signal.SIGKILL)

    def count_weights(self) -> dict[str, int]:
        """Returns the number of "weights" of its products and convolutions, and the number of "zeros" among them."""
        return dict(self._ask(do="count"))

    def count_kernels(self) -> dict[str, int]:
        """Returns how often each computing op occurs in the graph that the runtime executes."""
        return dict(self._ask(do="kernels"))

    def cold_start(self) -> dict[str, float | None]:
        """Returns "load_ms", and from the first prediction on "first_call_ms" and "memory_peak_bytes".

        The peak is that of the whole process after the first call, TensorFlow included; None where it is unknown.
        """
        return dict(self._ask(do="cold_start"))

    def predict(
        self, inputs: Mapping[str, np.ndarray], batch_size: int = 32, *, open_sizes: bool = False
    ) -> dict[str, np.ndarray]:
        """Returns the outputs by name for all examples, in calls of `batch_size` or of the model's fixed size.

        A runtime that compiles does so for the sizes of these calls, or for `open_sizes` if the file has such.
        """
        target = self._directory / "outputs.npz"
        files = {"inputs": self._store(inputs), "outputs": str(target)}
        self._ask(do="predict", **files, batch_size=batch_size, open_sizes=open_sizes)
        with np.load(target) as arrays:
            return {name.removeprefix(NAMED): arrays[name] for name in arrays.files}

    def time_calls(self, inputs: Mapping[str, np.ndarray], seconds: float, at_least: int = 3) -> list[float]:
        """Times calls for about `seconds` seconds, and returns the milliseconds of each."""
        return list(self._ask(do="time", inputs=self._store(inputs), seconds=seconds, at_least=at_least)["ms"])

    def calls_per_second(self, inputs: Mapping[str, np.ndarray], seconds: float, callers: int = 1) -> float:
        """Returns the calls in a second while `callers` threads call again and again, for about `seconds` seconds."""
        return float(
            self._ask(do="throughput", inputs=self._store(inputs), seconds=seconds, callers=callers)["calls_per_s"]
        )

    def _store(self, inputs: Mapping[str, Any]) -> str:
        target = self._directory / "inputs.npz"
        with target.open("wb") as file:
            values = {NAMED + self.renamed.get(name, name): plain_strings(value) for name, value in inputs.items()}
            np.savez(file, **values)
        return str(target)

    def _ask(self, **command: Any) -> dict[str, Any]:
        answer = self._send(json.dumps(command) + "\n")
        while answer is not None and "alive" in answer:
            answer = self._send("")
        if answer is None:
            self._process.communicate()
            errors = Path(self._log.name).read_text(errors="replace")
            ended = ENDED_FROM_OUTSIDE.get(-self._process.returncode)
            if ended is None and "bad_alloc" in errors:
                ended = "found no memory"
            if ended is not None:
                raise ServingStoppedError(self.path, ended)
            if "ImportError" in errors or "ModuleNotFoundError" in errors:
                self.format.import_packages()  # tells which package
            raise ArtifactError(
                f"The {self.format.what} crashed the process that ran it. Received: {self.path} "
                f"(exit code {self._process.returncode}; {' '.join(errors.split()[-30:])})."
            )
        if "error" in answer:
            missing = MISSING_KERNEL.search(answer["error"])
            if missing:
                raise MissingKernelError(missing[1])
            if answer["error"].startswith(NO_MEMORY):
                raise ServingStoppedError(self.path, f"found no memory ({reason_of(answer['error'])})")
            raise NotServedError(self.format.what, self.path, answer["error"])
        return answer

    def _send(self, line: str) -> dict[str, Any] | None:
        """Sends a line and returns the next answer, or None if the process has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self._kill()  # this ends readline below

        timer = threading.Timer(self.step_limit_s, end)
        timer.start()
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            received = self._process.stdout.readline()
        except BrokenPipeError:
            received = ""
        finally:
            timer.cancel()
            timer.join()
        if late.is_set():
            raise ArtifactError(
                f"Each step of serving (loading, a batch, a call) must end within {self.step_limit_s:g} seconds. "
                f"Received: {self.path}, whose process did not answer and was ended. Pass smaller batches, or give "
                "the process a longer step_limit_s, if the model takes that long."
            )
        return json.loads(received) if received else None


class SavedModelProcess(RuntimeProcess):
    """A fresh Python process that has loaded one SavedModel with nothing but TensorFlow; see `RuntimeProcess`.

    Its attribute `loaded` has the "kernels" too.
    """

    def _check(self) -> None:
        if not self.trusted:
            check_saved_model(self.path)

    def _options(self) -> dict[str, Any]:
        return super()._options() | {"signature": self.signature}

    def count_kernels(self) -> dict[str, int]:
        return dict(self.loaded["kernels"])


def runs(path: str | Path) -> type[RuntimeProcess]:
    """Returns the process that runs an artifact, by the file that it holds."""
    return SavedModelProcess if format_of(Path(path)).name == SAVED_MODEL else RuntimeProcess


def plain_strings(values: Any) -> Any:
    """Returns strings as an array of bytes, which a file can hold without Python objects; other arrays as they are.

    Example:
        >>> plain_strings(np.array(["a", "é"], object)).tolist()
        [b'a', b'\\xc3\\xa9']
    """
    array = np.asarray(values)
    if array.dtype.kind not in "OU":
        return array
    encoded = [value if isinstance(value, bytes) else str(value).encode() for value in array.reshape(-1)]
    return np.array(encoded, dtype=np.bytes_).reshape(array.shape)


def search_path() -> list[str]:
    """Returns this process's paths to modules, without the working directory and the directory of its script.

    With them another process finds the same TensorFlow, also after `pip install --user` or with PYTHONPATH. It does not
    find modules of the user that have the name of one of TensorFlow's modules.
    """
    home = Path(tf.__file__).resolve().parents[1]
    own = {Path.cwd(), Path(sys.argv[0]).resolve().parent} - {home}
    return [path for path in sys.path if Path(path).resolve() not in own]


def time_in_turns(
    paths: Sequence[str | Path], inputs: Mapping[str, np.ndarray], seconds: float = 1.0, rounds: int = ROUNDS
) -> list[list[float]]:
    """Times several artifacts on the same inputs in alternating rounds, each in its own process.

    Args:
        paths: Their directories.
        inputs: One batch by input name.
        seconds: How long each is timed in one round.
        rounds: The number of rounds. They alternate, so that a change of the machine's load affects all of them.
    Returns: For each, the milliseconds of every call.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(runs(path)(path)) for path in paths]
        times = alternate(processes, inputs, seconds, rounds)
    return [[call for calls in each for call in calls] for each in times]


def alternate(
    processes: Sequence[RuntimeProcess], inputs: Mapping[str, np.ndarray], seconds: float, rounds: int = ROUNDS
) -> list[list[list[float]]]:
    """Times processes that are already running, as time_in_turns does.

    Returns: For each process and each round, the milliseconds of every call.
    """
    return in_turns([functools.partial(process.time_calls, inputs, seconds) for process in processes], rounds)
