"""The batch size of several workers: each searches on its own, then all agree on what every one of them can train.

A trial that runs out of memory would stop a cluster, so the trials of a worker train without the others. How long the
workers take to sum their gradients over the network is therefore unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import keras
import tensorflow as tf

from tfopt.compat.trainer import built_under
from tfopt.errors import TrainingError
from tfopt.recipe import Recipe
from tfopt.training import TrainingConfig
from tfopt.training.distributed.cluster import Cluster, find_cluster, multi_worker_strategy
from tfopt.training.distributed.strategy import is_multi_worker
from tfopt.training.step.runtime import plan_of
from tfopt.trials.process import call_apart, raise_own
from tfopt.tuning.memory import MemoryReport
from tfopt.tuning.throughput import ThroughputReport

EXCHANGE_S = 120.0  # for the start of a process and of TensorFlow in it


def cluster_of(what: keras.Model | Recipe, training: TrainingConfig | None = None) -> Cluster | None:
    """Returns the workers that a training has; None if it has one process.

    Args:
        what: A recipe, or a compiled model.
        training: Settings of a model's training. None means those that it was compiled with.
    """
    cluster = find_cluster()
    if cluster is None or len(cluster.workers) < 2:
        return None
    strategy = _strategy(what, training)
    joins = strategy in ("auto", "multi_worker") or (not isinstance(strategy, str) and is_multi_worker(strategy))
    return cluster if joins else None


def _strategy(what: keras.Model | Recipe, training: TrainingConfig | None) -> str | tf.distribute.Strategy | None:
    if isinstance(what, Recipe):
        return what.training.strategy
    plan = plan_of(what)
    if training is None and plan is not None:
        training = plan.config
    return built_under(what) if training is None else training.strategy


def joined_strategy(what: keras.Model | Recipe) -> tf.distribute.Strategy | None:
    """Returns the strategy over several workers under which a model was built; None if this process joined none."""
    strategy = built_under(what) if isinstance(what, keras.Model) else None
    return strategy if is_multi_worker(strategy) else None


def alone(training: TrainingConfig) -> TrainingConfig:
    """Returns the settings with which one worker trains on its devices, without the others.

    Example:
        >>> alone(TrainingConfig(strategy="multi_worker")).strategy
        'none'
    """
    several = len(tf.config.get_visible_devices("GPU")) > 1  # without GPUs, a worker is one replica
    return replace(training, strategy="mirrored" if several else "none", communication="auto")


def sharing(cluster: Cluster | None) -> int:
    """Returns how many workers share the memory of this host, this one included.

    Example:
        >>> sharing(Cluster(("a:1", "b:1", "b:2"), 1, "TF_CONFIG")), sharing(None)
        (2, 1)
    """
    if cluster is None:
        return 1
    hosts = [address.rpartition(":")[0] for address in cluster.workers]
    return hosts.count(hosts[cluster.index])


def agree(
    found: tuple[MemoryReport, ThroughputReport | None] | None,
    cluster: Cluster,
    strategy: tf.distribute.Strategy | None,
    folder: Path,
    wait_s: float,
) -> tuple[MemoryReport, ThroughputReport | None]:
    """Returns what this worker found with what all workers agree on: the least batch, and of the knees the largest.

    Every worker must call this.

    Args:
        found: What this worker found on its own; None if it failed.
        cluster: The workers.
        strategy: The strategy with which this process has joined them; None if it has not, so that another must.
        folder: Directory for that process.
        wait_s: Seconds to wait for the others, whose searches may take longer.
    Raises:
        TrainingError: Some worker failed, or did not answer.
    """
    own = [0, 0, 0] if found is None else _numbers(*found)
    if strategy is not None:
        rows = everyones(own, strategy)
    else:
        arguments = {"numbers": own, "wait_s": wait_s}
        outcome = call_apart("tfopt.tuning.workers:exchange", arguments, folder, wait_s + EXCHANGE_S)
        if outcome.failure:
            raise_own(outcome.failure)
            raise TrainingError(
                f"All workers must agree on a batch. Received: {' '.join(outcome.failure.split())}, in worker "
                f"{cluster.index} of {len(cluster.workers)}. Look for an error in the output of the others."
            )
        rows = outcome.result
    failed = [str(index) for index, (largest, _, _) in enumerate(rows) if not largest]
    if found is None or failed:
        raise TrainingError(
            f"Every worker must find a batch. Received: none from worker {', '.join(failed)} of {len(rows)}. Its "
            "output has the cause."
        )
    return _agreed(*found, rows)


def exchange(numbers: Sequence[int], wait_s: float) -> list[list[int]]:
    """Joins the cluster of this process, without its GPUs, and returns the numbers of each worker."""
    tf.config.set_visible_devices([], "GPU")
    cluster = find_cluster()
    assert cluster is not None  # the caller has found one
    return everyones(numbers, multi_worker_strategy(cluster, "ring", wait_s))


def everyones(numbers: Sequence[int], strategy: tf.distribute.Strategy) -> list[list[int]]:
    """Returns the numbers of each worker, in the order of the cluster. Every worker must call this."""

    @tf.function
    def gathered() -> tf.Tensor:
        return strategy.gather(strategy.run(lambda: tf.constant([list(numbers)], tf.int64)), axis=0)

    rows = gathered().numpy().tolist()
    return rows[:: len(rows) // _workers(strategy)]  # each of its replicas has given them


def _workers(strategy: tf.distribute.Strategy) -> int:
    resolver = strategy.cluster_resolver
    return 1 if resolver is None else max(resolver.cluster_spec().num_tasks("worker"), 1)


def _numbers(memory: MemoryReport, throughput: ThroughputReport | None) -> list[int]:
    knee = memory.global_batch_size if throughput is None else throughput.knee
    return [memory.per_replica_batch_size, memory.replicas, knee // memory.replicas]


def _agreed(
    memory: MemoryReport, throughput: ThroughputReport | None, rows: Sequence[Sequence[int]]
) -> tuple[MemoryReport, ThroughputReport | None]:
    largest, replicas = min(row[0] for row in rows), sum(row[1] for row in rows)
    agreed = replace(
        memory,
        per_replica_batch_size=largest,
        replicas=replicas,
        workers=tuple(row[0] for row in rows),
    )
    if throughput is None:
        return agreed, None
    curve = tuple(
        replace(each, global_batch_size=each.global_batch_size // memory.replicas * replicas)
        for each in throughput.curve
    )
    knee = min(max(row[2] for row in rows), largest)
    return agreed, replace(throughput, curve=curve, knee=knee * replicas)
