"""Starts several workers on this machine: sets their ports and devices, prints their output, stops all if one fails.

Each worker leads its own process group, so that the processes it started end with it. A shell outside these groups
reads a pipe from the launcher. The pipe closes when the launcher ends, for any reason; then the shell kills the groups.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import tensorflow as tf

from tfopt.child_processes import ENDED_FROM_OUTSIDE, exit_code, signal_group
from tfopt.errors import ConfigError
from tfopt.signals import on_signals
from tfopt.terminal import encodable
from tfopt.training.distributed.cluster import Cluster, tf_config

PYTHON = sys.executable  # what runs the workers; the tests put one here that has imported tfopt before
# When one worker fails, the others lose their connection and fail too, sometimes before the first has ended. The
# launcher waits this long, then reports the worker whose traceback came first.
SETTLE_S = 5.0
STOP_S = 15.0  # from SIGTERM to SIGKILL, if a worker has failed
SAVE_S = 120.0  # from SIGTERM to SIGKILL, if no worker has failed and all save a checkpoint
TAIL_LINES = 100
TRACEBACK = "Traceback (most recent call last):"
# TensorFlow writes these lines when it is imported, before it reads TF_CPP_MIN_LOG_LEVEL. Every worker writes them.
NOTICES = (
    r"WARNING: All log messages before absl::InitializeLog\(\)|I0000 00:00:|To enable the following instructions: "
)
NO_CUDA = r"E0000 00:00:.* failed call to cuInit: "  # on a machine without a GPU, every worker writes it
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # they would end the launcher
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


def launch(script: Sequence[str], workers: int, devices_per_worker: int | None = None) -> int:
    """Runs a script in several processes that train together, and returns when all have ended.

    Each line of their output starts with the worker, such as "[worker 0] ". The messages that TensorFlow writes when it
    starts are hidden; TF_CPP_MIN_LOG_LEVEL=0 shows them. If a worker fails, the launcher stops the others, and repeats
    the last lines of its standard error at the end. The launcher sends SIGTERM and Ctrl-C to the workers, which then
    have two minutes to save a checkpoint. A second signal kills them. If nobody reads the output any more, as after
    `| head`, the workers get SIGTERM too.

    Args:
        script: A Python file, or "-m" and a module, and its arguments.
        workers: The number of processes.
        devices_per_worker: The number of GPUs of each worker; by default, all GPUs are divided equally. Without GPUs:
            the number of logical CPU devices of each worker; by default one.
    Returns: The exit code: 0; the code of the worker that failed first (128 + N after signal N); 143 after SIGTERM; 130
        after Ctrl-C.
    Raises:
        ConfigError: The script does not exist, there are too few GPUs, or a number is below 1.
        OSError: The output could not be written, and no signal came. The workers have ended.
    """
    command, environments = _commands(script, workers, devices_per_worker)
    hidden = None  # the lines of standard error that are not shown
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0":
        hidden = re.compile(NOTICES if _gpu_names() else f"{NOTICES}|{NO_CUDA}")
    started: list[_Worker] = []
    received: list[int] = []
    taken = on_signals(ENDING, lambda number, frame: received.append(number))
    with selectors.DefaultSelector() as pipes, taken, _guard() as guard:
        try:
            for index, environment in enumerate(environments):
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,
                )
                worker = _Worker(index, process, hidden)
                started.append(worker)
                guard.write(b"%d\n" % worker.process.pid)
                for pipe in worker.pipes:
                    os.set_blocking(pipe.fileno(), False)
                    pipes.register(pipe, selectors.EVENT_READ, worker)
            return _watch(started, pipes, received)
        finally:
            for worker in started:
                worker.kill()
                for pipe in worker.pipes:
                    pipe.close()


@dataclass
class _Worker:
    """One process, its unfinished lines of output, and the last lines of its standard error."""

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
        """Kills the worker and all processes of its group."""
        self.stopped = self.stopped or self.process.poll() is None
        signal_group(self.process, signal.SIGKILL)
        self.process.wait()

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return self.process.stdout, self.process.stderr

    @property
    def exit_code(self) -> int | None:
        code = self.process.poll()
        return None if code is None else exit_code(code)

    def relay(self, pipe: IO[bytes], unread: dict[IO[str], OSError], *, to_the_end: bool = False) -> bool:
        """Prints the complete lines from a pipe, unless nobody reads the output. Returns whether more may come.

        Notes the first error of an output in `unread`; the worker goes on, and must not wait for a full pipe.
        """
        name, output = ("stdout", sys.stdout) if pipe is self.process.stdout else ("stderr", sys.stderr)
        chunk = pipe.read(65_536)  # None: there is nothing to read now
        *lines, rest = (self.unfinished.get(name, b"") + (chunk or b"")).split(b"\n")
        ended = chunk == b"" or (to_the_end and chunk is None)
        if ended and rest:
            lines, rest = [*lines, rest], b""
        self.unfinished[name] = rest
        shown = []
        for line in lines:
            text = line.decode(errors="replace")
            if name == "stderr":
                if self.hidden and self.hidden.match(text):
                    continue
                self.errors.append(text)
                if TRACEBACK in text:
                    self.traceback_at = time.monotonic()
            shown.append(encodable(f"[worker {self.index}] {text}\n", output))
        if output not in unread:
            try:
                output.writelines(shown)
                output.flush()
            except OSError as error:
                unread[output] = error
        return not ended

    def last_errors(self) -> list[str]:
        """Returns the last traceback, or the last lines of standard error if there is none."""
        lines = list(self.errors)
        starts = [place for place, line in enumerate(lines) if TRACEBACK in line]
        return lines[starts[-1] :] if starts else lines[-20:]


def _commands(script: Sequence[str], workers: int, devices: int | None) -> tuple[list[str], list[dict[str, str]]]:
    """Checks the arguments. Returns the command of all workers, and the environment of each worker."""
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
    bootstrap = ["-m", "tfopt.scripts.worker", str(devices)] if devices and not gpus else []
    environments = []
    with contextlib.ExitStack() as stack:  # all ports are open at the same time, so that no port is used twice
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(workers)]
        addresses = tuple(f"127.0.0.1:{server.getsockname()[1]}" for server in servers)
    for index in range(workers):
        own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * share : (index + 1) * share])} if gpus else {}
        cluster = {"TF_CONFIG": tf_config(Cluster(addresses, index, "tfopt launch"))}
        environments.append({**os.environ, "PYTHONUNBUFFERED": "1", **cluster, **own})
    return [PYTHON, *bootstrap, *words], environments


def _gpu_names() -> list[str]:
    """Returns the GPUs that TensorFlow sees, as CUDA_VISIBLE_DEVICES names them."""
    count = len(tf.config.list_physical_devices("GPU"))
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (named or [str(number) for number in range(count)])[:count]


@contextlib.contextmanager
def _guard() -> Iterator[IO[bytes]]:
    """Starts a shell that reads process groups, and kills them when its input ends."""
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
        guard.kill()  # the workers have ended; other processes may get their numbers
        guard.wait()
        guard.stdin.close()


def _watch(workers: Sequence[_Worker], pipes: selectors.BaseSelector, received: Sequence[int]) -> int:
    """Prints output and passes on signals until all workers have ended. Returns the exit code."""
    unread: dict[IO[str], OSError] = {}
    sent = 0  # how many of the received signals the workers got
    failed_at: float | None = None
    kill_at: float | None = None
    while any(worker.exit_code is None for worker in workers):
        for key, _ in pipes.select(timeout=0.1):
            if not key.data.relay(key.fileobj, unread):
                pipes.unregister(key.fileobj)
        now = time.monotonic()
        if failed_at is None and any(worker.exit_code for worker in workers):
            failed_at = now
        wait_s: float | None = None  # from the signal that the workers are sent now
        if len(received) > sent:
            wait_s = 0.0 if sent else SAVE_S  # a second signal kills them
            sent = len(received)
        elif unread and kill_at is None:
            wait_s = SAVE_S
        elif failed_at is not None and kill_at is None and now > failed_at + SETTLE_S:
            wait_s = STOP_S
        if wait_s is not None:
            kill_at = now + wait_s
            for worker in workers:
                worker.send(signal.SIGINT if received and received[0] == signal.SIGINT else signal.SIGTERM)
        if kill_at is not None and now >= kill_at:
            for worker in workers:
                worker.kill()
    for worker in workers:
        worker.kill()  # also the processes that it started, which may keep its pipes open
    for key in list(pipes.get_map().values()):
        while key.data.relay(key.fileobj, unread, to_the_end=True):
            pass
    if unread and not received:
        raise next(iter(unread.values()))
    return _result(workers, received)


def _result(workers: Sequence[_Worker], received: Sequence[int]) -> int:
    expected = 0
    if received:
        expected = INTERRUPTED if received[0] == signal.SIGINT else TERMINATED
    # If the launcher received a signal, a worker failed unless it ended by that signal. If not, the workers that the
    # launcher stopped did not fail.
    failed = [
        worker for worker in workers if worker.exit_code not in (0, expected) and (received or not worker.stopped)
    ]
    if not failed:
        if received:
            sys.stderr.write(f"tfopt: the workers have ended after {signal.Signals(received[0]).name}\n")
        return expected
    # A killed worker writes no traceback, and the others fail because they lost it. So it comes first.
    blamed = min(failed, key=lambda worker: worker.traceback_at or 0.0)
    code, said = blamed.exit_code or 0, blamed.last_errors()
    ended = ENDED_FROM_OUTSIDE.get(code - 128)
    ended = f"failed with exit code {code}" if ended is None else f"{ended}; its exit code is {code}"
    sys.stderr.write(f"tfopt: worker {blamed.index} {ended}.{' It ended with:' if said else ''}\n")
    lines = (f"[worker {blamed.index}] {line}\n" for line in said)
    sys.stderr.writelines(encodable(line, sys.stderr) for line in lines)
    sys.stderr.flush()
    return code
