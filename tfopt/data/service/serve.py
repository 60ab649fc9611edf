"""Runs a tf.data service on this host: a dispatcher, and workers that are started again when they end.

A client waits for a worker that has ended until there is one at the same address again; TensorFlow knows no other way
to go on. So each worker has a port of its own, and a new process takes the port of the one that has ended.

`python -m tfopt.data.service.serve DISPATCHER ADDRESS PARENT` is one worker. It ends when the process that started it,
PARENT, has ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

from tfopt.child_processes import end
from tfopt.compat.listening import address_of, listen_only_on, listening_socket
from tfopt.errors import ConfigError
from tfopt.signals import on_signals

POLL_S = 0.3
LAST_PORT = 65_535
# A worker that ends so often, each time so soon, has a lasting problem.
MOST_STARTS, SOON_S = 5, 20.0
END_S = 5.0
HEARTBEAT_MS = 500
PR_SET_PDEATHSIG = 1  # of prctl
STOPS = (signal.SIGTERM, signal.SIGINT)


class _Stop(Exception):
    """SIGTERM or Ctrl-C has come."""


def serve(
    *,
    workers: int,
    port: int = 5050,
    host: str = "localhost",
    dispatcher: str | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Serves until SIGTERM or Ctrl-C, and returns 0.

    Args:
        workers: Number of worker processes.
        port: Port of the dispatcher. The workers have the next ports.
        host: Name of this host for the clients and the other hosts. With the default, only this host reaches the
            service; with an address, it listens on that address; with another name, on all interfaces.
        dispatcher: Address of a dispatcher on another host, for example grpc://data-0:5050. None starts one here.
        say: Function that prints a line.
    Raises:
        ConfigError: A port is in use, the host's address is another machine's, a worker does not start, or it ends
            again and again.
    """
    ports = range(port + (dispatcher is None), port + workers + (dispatcher is None))
    if ports.stop > LAST_PORT + 1:
        raise ConfigError(
            f"port must leave room for the workers, which have the next ports, up to {LAST_PORT}. "
            f"Received: port={port}, workers={workers}. Choose a lower port."
        )
    for each in ([port] if dispatcher is None else []) + list(ports):
        _check_free(host, each)
    with on_signals(STOPS, _stop):
        server = None
        running: dict[int, subprocess.Popen[str]] = {}
        try:
            if dispatcher is None:
                server = _dispatcher(host, port)
                dispatcher = f"grpc://{host}:{port}"
            running.update({each: _start(dispatcher, f"{host}:{each}") for each in ports})
            for worker in running.values():
                _wait_until_ready(worker)
            say(f"tf.data service with {workers} workers at {dispatcher}")
            if not address_of(host):
                say(f"tf.data service: open to all networks of this host, ports {ports.start} to {ports.stop - 1}")
            _supervise(running, dispatcher, host, say)
        except _Stop:
            say("tf.data service: ended")
        finally:
            for worker in running.values():
                worker.terminate()
            for worker in running.values():
                end(worker, END_S)
                if worker.stdout is not None:
                    worker.stdout.close()
            del server
    return 0


def _dispatcher(host: str, port: int) -> object:
    import tensorflow as tf

    service = tf.data.experimental.service
    server = service.DispatchServer(service.DispatcherConfig(port=port))
    listen_only_on(address_of(host), port)
    return server


def _start(dispatcher: str, address: str) -> subprocess.Popen[str]:
    """Starts a worker. It does not get the signals of this process's terminal: this process ends it."""
    words = dispatcher.removeprefix("grpc://"), address, str(os.getpid())
    command = [sys.executable, "-m", "tfopt.data.service.serve", *words]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


def _wait_until_ready(worker: subprocess.Popen[str]) -> None:
    assert worker.stdout is not None
    if worker.stdout.readline().strip() != "ready":
        raise ConfigError(
            f"The workers of a tf.data service must start. Received: a worker that ended with code {worker.wait()}. "
            "Its errors are above."
        )


def _supervise(
    running: dict[int, subprocess.Popen[str]], dispatcher: str, host: str, say: Callable[[str], None]
) -> None:
    """Starts each worker again that ends."""
    starts: dict[int, list[float]] = {port: [] for port in running}
    while True:
        time.sleep(POLL_S)
        for port, worker in running.items():
            code = worker.poll()
            if code is None:
                continue
            now = time.monotonic()
            starts[port] = [start for start in starts[port] if now - start < SOON_S * MOST_STARTS] + [now]
            if len(starts[port]) > MOST_STARTS:
                raise ConfigError(
                    f"A worker must not end again and again. Received: {MOST_STARTS} ends of the worker at "
                    f"port {port}, the last with code {code}. Look at its errors above, and at the memory of this host."
                )
            say(f"tf.data service: the worker at port {port} ended with code {code} and is started again")
            running[port] = _start(dispatcher, f"{host}:{port}")


def _check_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))  # TensorFlow takes it on all interfaces first
        except OSError as error:
            raise ConfigError(
                f"port must be free, and the next ports for the workers too. Received: port {port} ({error}). "
                "Choose another port."
            ) from error
    try:
        listening_socket(address_of(host), port).close()
    except OSError as error:
        raise ConfigError(
            f"host must be a name or an address of this machine. Received: host={host!r} ({error}). "
            "Leave it out to serve this machine only."
        ) from error


def _stop(number: int, frame: FrameType | None) -> None:
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)  # a second one must not break off the end of the workers
    raise _Stop


def _work(dispatcher: str, address: str, parent: str) -> None:
    """Serves as a worker until the parent process ends."""
    _end_with(int(parent))
    import tensorflow as tf

    service = tf.data.experimental.service
    host, _, port = address.rpartition(":")
    config = service.WorkerConfig(
        dispatcher_address=dispatcher,
        worker_address=address,
        port=int(port),
        heartbeat_interval_ms=HEARTBEAT_MS,
    )
    server = service.WorkerServer(config)
    listen_only_on(address_of(host), int(port))
    print("ready", flush=True)  # noqa: T201 - the parent waits for this line
    while os.getppid() == int(parent):
        time.sleep(0.5)
    del server


def _end_with(parent: int) -> None:
    """Lets the kernel end this process when its parent has ended, where it can.

    A worker waits in its constructor for a dispatcher, for ever and without leaving the interpreter to other threads.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


if __name__ == "__main__":
    _work(*sys.argv[1:])
