"""Several workers on this machine: their ports, devices and output, and the end of all when one fails.

Each worker leads a process group of its own, so that what it started ends with it. A shell outside of all groups holds
a pipe from the launcher; when that breaks, however the launcher ended, it kills the groups.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import tensorflow as tf

from tfopt.errors import ConfigError
from tfopt.training.distributed.cluster import Cluster, tf_config

# A failure breaks the others' connections, so they fail too, sometimes before the first has quite ended. Those that do
# so in this time are compared, and the one whose traceback came first is to blame.
SETTLE_S = 5.0
STOP_S = 15.0  # from SIGTERM to SIGKILL, once one has failed
SAVE_S = 120.0  # the same when all were healthy and have a checkpoint to save
TAIL_LINES = 100
TRACEBACK = "Traceback (most recent call last):"
# What TensorFlow writes when it is imported, before it looks at TF_CPP_MIN_LOG_LEVEL: the same lines from every worker.
NOTICES = (
    r"WARNING: All log messages before absl::InitializeLog\(\)|I0000 00:00:|To enable the following instructions: "
)
NO_CUDA = r"E0000 00:00:.* failed call to cuInit: "  # said by each worker of a machine that has no GPU
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


def launch(script: Sequence[str], workers: int, devices_per_worker: int | None = None) -> int:
    """Runs a script in several processes that train together, and returns when all have ended.

    Every line of their output gets the worker in front, such as "[worker 0] ". What TensorFlow writes when it starts is
    left out; TF_CPP_MIN_LOG_LEVEL=0 shows it. When one fails the others are stopped,
    and what it last wrote to standard error is repeated at the end. SIGTERM and Ctrl-C are passed on to the workers,
    who have two minutes to save a checkpoint; a second one kills them.

    Args:
        script: A Python file, or "-m" and a module, and its arguments.
        workers: How many processes.
        devices_per_worker: GPUs of each worker, by default an equal share of those there are. Without GPUs it is the
            number of logical CPU devices, by default one.
    Returns: The exit code: 0, that of the worker that failed first (128 + N after signal N), 143 after SIGTERM, 130
        after Ctrl-C.
    Raises:
        ConfigError: There is no such script, too few GPUs, or a number is below 1.
    Example:
        >>> launch(["-m", "this"], workers=0)
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: workers must be a whole number of at least 1. Received: workers=0.
    """
    command, environments = _commands(script, workers, devices_per_worker)
    hidden = _hidden_lines()
    started: list[_Worker] = []
    with selectors.DefaultSelector() as pipes, _signals() as received, _guard() as guard:
        try:
            for index, environment in enumerate(environments):
                worker = _Worker(index, _start(command, environment), hidden)
                started.append(worker)
                guard.write(b"%d\n" % worker.process.pid)
                for pipe in (worker.process.stdout, worker.process.stderr):
                    assert pipe is not None
                    os.set_blocking(pipe.fileno(), False)
                    pipes.register(pipe, selectors.EVENT_READ, worker)
            return _watch(started, pipes, received)
        finally:
            for worker in started:
                worker.kill()
                worker.close()


@dataclass
class _Worker:
    """One process, the beginnings of lines it has written, and the last lines of its standard error."""

    index: int
    process: subprocess.Popen[bytes]
    hidden: re.Pattern[str] | None = None
    unfinished: dict[str, bytes] = field(default_factory=dict)
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    traceback_at: float | None = None
    stopped: bool = False

    def send(self, number: int) -> None:
        if self.process.poll() is None:
            self.stopped = True
            self.process.send_signal(number)

    def kill(self) -> None:
        """Ends what is left of the worker's group, and the worker."""
        self.stopped = self.stopped or self.process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    @property
    def exit_code(self) -> int | None:
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def relay(self, pipe: IO[bytes], *, to_the_end: bool = False) -> bool:
        """Prints the whole lines that have come through a pipe, and returns whether more may come."""
        name, output = ("stdout", sys.stdout) if pipe is self.process.stdout else ("stderr", sys.stderr)
        chunk = pipe.read(65_536)  # None: nothing there
        *lines, rest = (self.unfinished.get(name, b"") + (chunk or b"")).split(b"\n")
        ended = chunk == b"" or (to_the_end and chunk is None)
        if ended and rest:
            lines, rest = [*lines, rest], b""
        self.unfinished[name] = rest
        for line in lines:
            text = line.decode(errors="replace")
            if name == "stderr":
                if self.hidden and self.hidden.match(text):
                    continue
                self.errors.append(text)
                if TRACEBACK in text:
                    self.traceback_at = time.monotonic()
            output.write(f"[worker {self.index}] {text}\n")
        output.flush()
        return not ended

    def last_words(self) -> list[str]:
        """The last traceback, or what stands where one would."""
        lines = list(self.errors)
        starts = [place for place, line in enumerate(lines) if TRACEBACK in line]
        return lines[starts[-1] :] if starts else lines[-20:]


def _commands(script: Sequence[str], workers: int, devices: int | None) -> tuple[list[str], list[dict[str, str]]]:
    """Validates everything, and returns the command of all workers and the environment of each."""
    for name, value in (("workers", workers), ("devices_per_worker", 1 if devices is None else devices)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1. Received: {name}={value!r}.")
    if sys.platform == "win32":
        raise ConfigError("tfopt launch needs process groups. Received: Windows. Run it under WSL.")
    words = list(script)
    if not words or words == ["-m"]:
        raise ConfigError(f"script must be a Python file, or -m and a module. Received: script={words}.")
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise ConfigError(f"script must be a Python file that exists. Received: script={words[0]!r}, in {Path.cwd()}.")
    gpus = _gpu_names()
    share = devices or max(1, len(gpus) // workers)
    if gpus and share * workers > len(gpus):
        raise ConfigError(
            f"workers times devices_per_worker must be at most the number of GPUs. Received: workers={workers}, "
            f"devices_per_worker={share}, {len(gpus)} GPUs. Use fewer, or set CUDA_VISIBLE_DEVICES= for the CPU."
        )
    bootstrap = ["-m", "tfopt.training.distributed.worker", str(devices)] if devices and not gpus else []
    environments = []
    addresses = _free_addresses(workers)
    for index in range(workers):
        own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * share : (index + 1) * share])} if gpus else {}
        cluster = {"TF_CONFIG": tf_config(Cluster(addresses, index, "tfopt launch"))}
        environments.append({**os.environ, "PYTHONUNBUFFERED": "1", **cluster, **own})
    return [sys.executable, *bootstrap, *words], environments


def _gpu_names() -> list[str]:
    """The GPUs that TensorFlow sees, as CUDA_VISIBLE_DEVICES names them."""
    count = len(tf.config.list_physical_devices("GPU"))
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (named or [str(number) for number in range(count)])[:count]


def _hidden_lines() -> re.Pattern[str] | None:
    """The lines of standard error that say nothing of the training, or None where all were asked for."""
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
        return None
    return re.compile(NOTICES if _gpu_names() else f"{NOTICES}|{NO_CUDA}")


def _free_addresses(count: int) -> tuple[str, ...]:
    with contextlib.ExitStack() as stack:  # all at once, or one would be given twice
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return tuple(f"127.0.0.1:{server.getsockname()[1]}" for server in servers)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )


@contextlib.contextmanager
def _guard() -> Iterator[IO[bytes]]:
    """The shell that kills the groups written to it once it reads no more."""
    kill_all = 'while read -r group; do groups="$groups $group"; done; for group in $groups; do %s; done'
    guard = subprocess.Popen(
        ["/bin/sh", "-c", kill_all % 'kill -s KILL -- "-$group" 2>/dev/null'],
        stdin=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    assert guard.stdin is not None
    try:
        yield guard.stdin
    finally:
        guard.kill()  # the workers have ended; their numbers may come to belong to others
        guard.wait()
        guard.stdin.close()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects what would end the launcher."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, lambda number, frame: received.append(number)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _watch(workers: Sequence[_Worker], pipes: selectors.BaseSelector, received: Sequence[int]) -> int:
    """Relays output and signals until all workers have ended, and returns the exit code."""
    passed_on = 0
    failed_at: float | None = None
    kill_at: float | None = None
    while any(worker.exit_code is None for worker in workers):
        for key, _ in pipes.select(timeout=0.1):
            if not key.data.relay(key.fileobj):
                pipes.unregister(key.fileobj)
        now = time.monotonic()
        if failed_at is None and any(worker.exit_code for worker in workers):
            failed_at = now
        if len(received) > passed_on:
            kill_at = now if passed_on else now + SAVE_S
            for worker in workers:
                worker.send(signal.SIGINT if received[0] == signal.SIGINT else signal.SIGTERM)
            passed_on = len(received)
        elif failed_at is not None and kill_at is None and now > failed_at + SETTLE_S:
            kill_at = now + STOP_S
            for worker in workers:
                worker.send(signal.SIGTERM)
        if kill_at is not None and now >= kill_at:
            for worker in workers:
                worker.kill()
    for worker in workers:
        worker.kill()  # what it may have left behind, which may hold its pipes open
    for key in list(pipes.get_map().values()):
        while key.data.relay(key.fileobj, to_the_end=True):
            pass
    return _result(workers, received)


def _result(workers: Sequence[_Worker], received: Sequence[int]) -> int:
    wanted = 0
    if received:
        wanted = INTERRUPTED if received[0] == signal.SIGINT else TERMINATED
    # After a signal to all, any other end than by it is a failure; after a failure, the ends that were forced are not.
    failed = [worker for worker in workers if worker.exit_code not in (0, wanted) and (received or not worker.stopped)]
    if not failed:
        return wanted
    # One that was killed wrote no traceback, and broke the others' connections.
    blamed = min(failed, key=lambda worker: worker.traceback_at or 0.0)
    sys.stderr.write(f"tfopt: worker {blamed.index} failed with exit code {blamed.exit_code}. It ended with:\n")
    sys.stderr.writelines(f"[worker {blamed.index}] {line}\n" for line in blamed.last_words())
    sys.stderr.flush()
    return blamed.exit_code or 0
