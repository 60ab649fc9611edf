"""Reads from the environment which processes train together, and makes TensorFlow's strategy over them.

Kubeflow, docs/cluster/kubernetes.yaml and `tfopt launch` set TF_CONFIG for each process; Slurm sets its own variables.
TensorFlow's coordination service, on by default, watches the cluster. If a worker dies or hangs, the collective
operations of all others end: at once if its connection breaks, else after ten seconds without a heartbeat. TensorFlow
sets no limit for the wait for workers that never start. This module does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import tensorflow as tf

from tfopt.compat.listening import address_of, bound_socket, listen_only_on, listening_socket
from tfopt.compat.tensorflow import expand_hostlist, expand_tasks_per_node
from tfopt.errors import ConfigError, TfoptError, unknown_name

COMMUNICATIONS = ("auto", "ring", "nccl")
# Long enough for nodes of a cloud, which may start minutes after the first; short enough to end a job that lacks one.
START_TIMEOUT_S = 600.0
# Slurm gives tasks no ports. These are below the range that Linux assigns itself (from 32768). Each job has its own.
_SLURM_PORTS = range(12_000, 32_000)
_SLURM_PORTS_PER_JOB = 16


@dataclass(frozen=True)
class Cluster:
    """The processes that train together, and the place of this process among them.

    The address of each worker is "host:port". Their order is the same in all processes, and the first is the chief.

    Raises:
        ConfigError: There are no workers, two workers have the same address, an address has no port, or the index is
            out of range.
    Example:
        >>> Cluster(("localhost:2222", "localhost:2223"), 1, "TF_CONFIG").is_chief
        False
    """

    workers: tuple[str, ...]
    index: int
    source: str  # where this was read, such as "TF_CONFIG" or "Slurm"

    def __post_init__(self) -> None:
        if not self.workers:
            raise ConfigError("workers must hold at least one address. Received: workers=(). Leave the cluster out.")
        for address in self.workers:
            host, _, port = str(address).rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
                raise ConfigError(
                    f"{self.source}: a worker's address must be host:port. Received: {address!r}. "
                    "Write for example 'node1:2222'."
                )
        if len(set(self.workers)) < len(self.workers):
            raise ConfigError(
                f"{self.source}: each worker must have an address of its own. Received: {', '.join(self.workers)}. "
                "Give workers on one host different ports."
            )
        if isinstance(self.index, bool) or not isinstance(self.index, int) or not 0 <= self.index < len(self.workers):
            raise ConfigError(
                f"{self.source}: the task's index must be in [0, {len(self.workers)}), the number of such workers. "
                f"Received: index={self.index!r}. List every worker in the cluster."
            )

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the checkpoints and logs."""
        return self.index == 0

    @property
    def port(self) -> int:
        """The port of this process."""
        return int(self.workers[self.index].rpartition(":")[2])

    @property
    def listens_on(self) -> str:
        """The loopback address of this process if all workers have one; else "", which means all interfaces.

        Example:
            >>> Cluster(("localhost:2222", "127.0.0.1:2223"), 0, "TF_CONFIG").listens_on
            '127.0.0.1'
            >>> Cluster(("localhost:2222", "node1:2222"), 0, "TF_CONFIG").listens_on
            ''
        """
        addresses = [address_of(worker.rpartition(":")[0]) for worker in self.workers]
        is_local = all(address and ipaddress.ip_address(address).is_loopback for address in addresses)
        return addresses[self.index] if is_local else ""


def find_cluster(environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """Returns the cluster that this process belongs to, or None if there is none.

    It reads TF_CONFIG first, then the variables of a Slurm step with more than one task, which `srun` starts. A batch
    script runs once, however many tasks its job has. So the variables of a Slurm job alone make no cluster.

    Raises:
        ConfigError: TF_CONFIG or Slurm's variables do not describe a cluster that can train together.
    """
    if environment.get("TF_CONFIG", "").strip() not in ("", "{}"):
        return _from_tf_config(environment["TF_CONFIG"])
    if "SLURM_STEP_NODELIST" in environment:
        return _from_slurm(environment)
    return None


def tf_config(cluster: Cluster) -> str:
    """Returns the TF_CONFIG that describes a cluster to one of its workers."""
    return json.dumps({"cluster": {"worker": cluster.workers}, "task": {"type": "worker", "index": cluster.index}})


@functools.cache
def multi_worker_strategy(
    cluster: Cluster,
    communication: Literal["auto", "ring", "nccl"] = "auto",
    start_timeout_s: float = START_TIMEOUT_S,
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Joins the cluster, waits for its other workers and returns the strategy over all of them.

    A process can join once. A second call with the same arguments returns the same strategy. Every GPU that TensorFlow
    sees is a replica. Without GPUs, each worker is one replica, however many logical CPU devices it has. For the
    communication, "ring" uses the network, "nccl" needs GPUs, and "auto" chooses between them.

    Raises:
        ConfigError: TensorFlow has already started in this process, or the communication is unknown.
        TfoptError: The other workers did not answer in time, or this worker cannot use its address.
    Example:
        >>> multi_worker_strategy(Cluster(("a:1", "b:1"), 0, "TF_CONFIG"), "mpi")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: Unknown communication 'mpi'. Expected one of: 'auto', 'nccl', 'ring'.
    """
    if communication not in COMMUNICATIONS:
        raise unknown_name("communication", communication, COMMUNICATIONS)
    gpus = tf.config.get_visible_devices("GPU")
    if communication == "nccl" and not gpus:
        raise ConfigError("communication='nccl' needs a GPU, and TensorFlow sees none. Set communication='auto'.")
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(cluster.workers)}),
        task_type="worker",
        task_id=cluster.index,
        num_accelerators={"GPU": sum(len(tf.config.get_logical_device_configuration(gpu) or [gpu]) for gpu in gpus)},
        rpc_layer="grpc",
    )
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation[communication.upper()]
    )
    meet(cluster, start_timeout_s)
    try:
        with _no_longer_than(start_timeout_s), _signal_handlers_kept():
            strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
    except (RuntimeError, ValueError, tf.errors.OpError) as error:
        raise _why_not_joined(error, cluster) from error
    listen_only_on(cluster.listens_on, cluster.port)
    return strategy


def meet(cluster: Cluster, timeout_s: float) -> None:
    """Returns as soon as the ports of all other workers answer. Until then, this worker's port answers too.

    TensorFlow waits for missing workers without limit. It holds Python's global lock meanwhile, so that no other thread
    can raise an error. So TensorFlow starts only when all workers are there. Then it answers on this worker's port.

    Raises:
        TfoptError: Some worker did not answer in time, or another process uses this worker's port.
    """
    port = cluster.port
    missing = [address for index, address in enumerate(cluster.workers) if index != cluster.index]
    deadline = time.monotonic() + timeout_s
    try:
        # For several hosts on all interfaces: a host's name may resolve to one that the others cannot reach.
        server = listening_socket(cluster.listens_on, port)
    except OSError as error:
        raise _port_in_use(cluster, error) from None
    with server:
        while missing := [address for address in missing if not _answers(address)]:
            if time.monotonic() > deadline:
                raise TfoptError(
                    f"All workers must start within {timeout_s:g} s of each other. Received: worker {cluster.index} of "
                    f"{len(cluster.workers)} ({cluster.source}) has no answer from {', '.join(missing)}. "
                    "Look for an error in their logs, and check that the hosts reach each other on these ports."
                )
            time.sleep(0.2)


@contextlib.contextmanager
def keeping_port(cluster: Cluster) -> Iterator[None]:
    """Keeps other processes from taking the port of this worker, which does not answer yet.

    Raises:
        TfoptError: Another process has taken it, or this one, which has joined the cluster.
    """
    try:
        kept = bound_socket(cluster.listens_on, cluster.port)
    except OSError as error:
        raise _port_in_use(cluster, error) from None
    with kept:
        yield


def lost_worker(error: BaseException) -> bool:
    """Returns whether an error of training means that another worker died, was stopped or became unreachable.

    The causes of the error count too. After such an error, this process cannot continue: all workers must be started
    again, and resume from a checkpoint.
    """
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, tf.errors.UnavailableError | tf.errors.DeadlineExceededError | tf.errors.AbortedError) and (
            # Every failure in a step aborts its collective operations. These texts mean that a connection failed.
            "Collective" in each.message or "/job:worker" in each.message
        ):
            return True
        each = each.__cause__ or each.__context__
    return False


def words_about_worker(error: tf.errors.OpError) -> str:
    """Returns the line of TensorFlow's message that names the lost worker or the connection."""
    lines = [line.strip() for line in str(error.message).splitlines() if line.strip()]
    named = [line for line in lines if "/job:worker" in line or "heartbeat" in line.lower()]
    return [*named, *(line for line in lines if "Collective" in line), *lines, "no message"][0].rstrip(".") + "."


def _why_not_joined(error: Exception, cluster: Cluster) -> Exception:
    words = str(error)
    if "at program startup" in words or "already configured" in words:
        return ConfigError(
            "A worker must join its cluster before TensorFlow computes anything, and only once in a process. "
            f"Received: strategy='multi_worker', worker {cluster.index} of {len(cluster.workers)}, after TensorFlow "
            "had started. Call tfopt.plan first, before making tensors, datasets or models."
        )
    if isinstance(error, tf.errors.OpError):
        own = cluster.workers[cluster.index]
        return TfoptError(
            f"Worker {cluster.index} could not join the cluster. Received: own address {own}, all {cluster.workers}, "
            f"{type(error).__name__} ({' '.join(words.split())}). Check that the port is free and the hosts reach "
            "each other."
        )
    return error


def _port_in_use(cluster: Cluster, error: OSError) -> TfoptError:
    return TfoptError(
        f"Worker {cluster.index} must be able to listen on its own port. Received: port {cluster.port} "
        f"({error.strerror}). End the process that holds it, or give the worker another port."
    )


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """Ends the process and prints a traceback if joining the cluster takes longer.

    That happens if a worker dies after its port answered and before it joined. Python cannot raise an error then (see
    `meet`). The timer of faulthandler is a thread that does not need Python.
    """
    if sys.__stderr__ is None or sys.__stderr__.closed:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restores the handler of SIGTERM: TensorFlow's coordination service installs one that ignores the signal."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _from_tf_config(text: str) -> Cluster:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"TF_CONFIG must be JSON. Received: TF_CONFIG={text!r} ({error}).") from None
    example = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
    jobs = config.get("cluster") if isinstance(config, dict) else None
    task = config.get("task") if isinstance(config, dict) else None
    if not isinstance(jobs, dict) or not isinstance(task, dict) or not {"type", "index"} <= set(task):
        raise ConfigError(
            f"TF_CONFIG must hold a cluster, and a task with type and index. Received: TF_CONFIG={text!r}. "
            f"Write for example {example}."
        )
    others = set(jobs) - {"chief", "worker"} | {task["type"]} - set(jobs)
    if others:
        raise ConfigError(
            f"TF_CONFIG may have only a chief and workers, and the task must be one of them: parameter servers and "
            f"evaluators do not train together with them. Received: {', '.join(sorted(map(repr, others)))}. "
            "Start workers only, and evaluate in them."
        )
    for name, addresses in jobs.items():
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise ConfigError(
                f"TF_CONFIG's {name} must be a list of addresses. Received: {addresses!r}. Write for example {example}."
            )
    chief, workers = jobs.get("chief", []), jobs.get("worker", [])
    # Some launchers write the index as a string.
    index = int(task["index"]) if str(task["index"]).isdecimal() else task["index"]
    Cluster(tuple(jobs[task["type"]]), index, "TF_CONFIG")  # the index counts within its own list
    first = len(chief) if task["type"] == "worker" else 0
    return Cluster((*chief, *workers), first + index, "TF_CONFIG")


def _from_slurm(environment: Mapping[str, str]) -> Cluster | None:
    """Numbers the tasks as Slurm's block distribution does: node by node, in the order of the node list.

    TensorFlow's own resolver sorts the nodes by name, which puts node10 before node9. Tasks would get the addresses of
    others. So only its functions that expand Slurm's abbreviated lists are used.
    """
    try:
        nodes = expand_hostlist(environment["SLURM_STEP_NODELIST"])
        tasks = expand_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        index, node, local = (int(environment[f"SLURM_{name}"]) for name in ("PROCID", "NODEID", "LOCALID"))
        job = int(environment["SLURM_JOB_ID"])
        places = [(n, task) for n, count in zip(range(len(nodes)), tasks, strict=True) for task in range(count)]
    except (KeyError, ValueError) as error:
        given = {name: value for name, value in environment.items() if name.startswith("SLURM_STEP_")}
        raise ConfigError(
            f"Slurm's variables must describe the step's nodes and tasks. Received: {given} ({error}). "
            "Start the script with srun, or set TF_CONFIG."
        ) from None
    if len(places) < 2:
        return None
    if index >= len(places) or places[index] != (node, local):
        raise ConfigError(
            f"Slurm must fill one node after the other. Received: task {index} as number {local} of node {node}. "
            "Add --distribution=block to srun."
        )
    base = _SLURM_PORTS[job * _SLURM_PORTS_PER_JOB % len(_SLURM_PORTS)]
    return Cluster(tuple(f"{nodes[n]}:{base + task}" for n, task in places), index, "Slurm")
