"""The batch size of several workers: each searches on its own, then all agree on what every one of them can train.

A trial that runs out of memory would stop a cluster, so the trials of a worker train without the others. How long the
workers take to sum their gradients over the network is therefore unknown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.trainer import built_under
from tfopt.errors import TrainingError
from tfopt.recipe import Recipe
from tfopt.training import TrainingConfig
from tfopt.training.distributed.cluster import (
    Cluster,
    find_cluster,
    lost_worker,
    multi_worker_strategy,
    words_about_worker,
)
from tfopt.training.distributed.strategy import is_multi_worker
from tfopt.training.step.runtime import plan_of
from tfopt.trials.process import call_apart
from tfopt.tuning.memory import MemoryReport
from tfopt.tuning.throughput import ThroughputReport

EXCHANGE_S = 120.0  # for the start of a process and of TensorFlow in it


def cluster_of(what: keras.Model | Recipe, training: TrainingConfig | None = None) -> Cluster | None:
    """Returns the workers that train together with this process, or would; None if it trains without a cluster.

    Args:
        what: A recipe, or a compiled model.
        training: Settings of a model's training. None means those that it was compiled with.
    """
    cluster, strategy = find_cluster(), _strategy(what, training)
    joins = strategy == "multi_worker" or _is_joined(strategy)
    if strategy == "auto":
        joins = cluster is not None and len(cluster.workers) > 1
    return cluster if joins else None


def joined_strategy(what: keras.Model | Recipe, training: TrainingConfig | None) -> tf.distribute.Strategy | None:
    """Returns the strategy with which this process has joined the other workers; None if that is unknown."""
    found = (_strategy(what, training), built_under(what) if isinstance(what, keras.Model) else None)
    return next((each for each in found if _is_joined(each)), None)


def _strategy(what: keras.Model | Recipe, training: TrainingConfig | None) -> Any:
    if isinstance(what, Recipe):
        return what.training.strategy
    plan = plan_of(what)
    if training is None and plan is not None:
        training = plan.config
    return built_under(what) if training is None else training.strategy


def _is_joined(strategy: Any) -> bool:
    return not isinstance(strategy, str) and is_multi_worker(strategy)


def alone(training: TrainingConfig) -> TrainingConfig:
    """Returns the settings with which one worker trains on its devices, without the others.

    Example:
        >>> alone(TrainingConfig(strategy="multi_worker")).strategy
        'none'
    """
    several = len(tf.config.get_visible_devices("GPU")) > 1  # without GPUs, a worker is one replica
    return replace(training, strategy="mirrored" if several else "none", communication="auto")


def sharing(cluster: Cluster) -> int:
    """Returns how many workers share the memory of this host, this one included.

    Example:
        >>> sharing(Cluster(("a:1", "b:1", "b:2"), 1, "TF_CONFIG"))
        2
    """
    hosts = [address.rpartition(":")[0] for address in cluster.workers]
    return hosts.count(hosts[cluster.index])


def agree(
    found: tuple[MemoryReport, ThroughputReport | None],
    cluster: Cluster,
    strategy: tf.distribute.Strategy | None,
    folder: Path,
    wait_s: float,
) -> tuple[MemoryReport, ThroughputReport | None]:
    """Returns what this worker found with what all workers agree on: the least batch, and of the knees the largest.

    Every worker must call this.

    Args:
        found: What this worker found on its own.
        cluster: The workers.
        strategy: The strategy with which this process has joined them. If it is None, a process of its own joins them.
        folder: Directory for that process.
        wait_s: Seconds to wait for the others, whose searches may take longer.
    Raises:
        TrainingError: Another worker failed, or did not answer.
    """
    own, failure = [cluster.index, *_numbers(*found)], ""
    if strategy is None:
        arguments = {"numbers": own, "wait_s": wait_s}
        outcome = call_apart("tfopt.tuning.workers:exchange", arguments, folder, wait_s + EXCHANGE_S)
        rows, failure = outcome.result, outcome.failure
    else:
        try:
            rows = everyones(own, strategy)
        except tf.errors.OpError as error:
            if not lost_worker(error):
                raise
            failure = words_about_worker(error)
    if failure:
        words = " ".join(failure.split()).rstrip(".")
        raise TrainingError(
            f"All workers must find a batch and agree on it. Received, in worker {cluster.index} of "
            f"{len(cluster.workers)}: {words}. Look for an error in the output of the others."
        )
    return agreed(*found, rows)


def exchange(numbers: Sequence[int], wait_s: float) -> list[list[int]]:
    """Joins the cluster of this process, without its GPUs, and returns the numbers of each worker."""
    tf.config.set_visible_devices([], "GPU")
    cluster = find_cluster()
    assert cluster is not None  # the caller has found one
    return everyones(numbers, multi_worker_strategy(cluster, "ring", wait_s))


def everyones(numbers: Sequence[int], strategy: tf.distribute.Strategy) -> list[list[int]]:
    """Returns the numbers of each worker in their order, without the first, its index. Every worker must call this."""

    @tf.function
    def gathered() -> tf.Tensor:
        return strategy.gather(strategy.run(lambda: tf.constant([list(numbers)], tf.int64)), axis=0)

    rows: list[list[int]] = gathered().numpy().tolist()
    with contextlib.suppress(tf.errors.OpError):  # who ends this one knows that all have ended the first
        gathered()
    return [found for _, *found in sorted({row[0]: row for row in rows}.values())]  # each of its replicas gave them


def _numbers(memory: MemoryReport, throughput: ThroughputReport | None) -> list[int]:
    knee = memory.global_batch_size if throughput is None else throughput.knee
    return [memory.per_replica_batch_size, memory.replicas, knee // memory.replicas]


def agreed(
    memory: MemoryReport, throughput: ThroughputReport | None, rows: Sequence[Sequence[int]]
) -> tuple[MemoryReport, ThroughputReport | None]:
    """Returns what one worker found with what all have: each has given its batch, its replicas and its knee."""
    largest, replicas = min(row[0] for row in rows), sum(row[1] for row in rows)
    of_all = replace(memory, per_replica_batch_size=largest, replicas=replicas, workers=tuple(row[0] for row in rows))
    if throughput is None:
        return of_all, None
    times = replicas / memory.replicas  # the speed of as many devices, if all are as fast as those of this worker
    curve = tuple(
        replace(
            each,
            global_batch_size=round(times * each.global_batch_size),
            **{name: times * getattr(each, name) for name in ("examples_per_s", "least", "most")},
        )
        for each in throughput.curve
        if each.global_batch_size <= largest * memory.replicas
    )
    knee = min(max(row[2] for row in rows), largest)
    return of_all, replace(throughput, curve=curve, knee=knee * replicas, undecided=())
