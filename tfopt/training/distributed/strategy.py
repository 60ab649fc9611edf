"""Chooses the strategy that divides a training over devices and processes. Refuses those that Keras 3 cannot use.

An optimizer or metric that was made outside the strategy gets variables on every replica.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import keras
import tensorflow as tf

from tfopt.compat.optimizers import make_anew, set_strategy
from tfopt.errors import ConfigError
from tfopt.hardware import Hardware
from tfopt.models.unbuilt_copy import unbuilt_copy
from tfopt.training.config import TrainingConfig
from tfopt.training.distributed.cluster import find_cluster, multi_worker_strategy

TRAINABLE = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)
REDUCTIONS = {"nccl": tf.distribute.NcclAllReduce, "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce}


def choose_strategy(config: TrainingConfig, hardware: Hardware) -> tuple[Any, str, str]:
    """Returns the strategy (None for one device, and for a pipeline), its name, and the reason.

    A multi-worker strategy joins the cluster, and so waits for the other workers.

    Raises:
        ConfigError: Keras 3 cannot train under the strategy, or this machine or cluster lacks what it needs.
    """
    if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not config.strategy:
        raise ConfigError(
            "A plan must be made outside a strategy's scope: strategies do not nest. "
            f"Received: a call within {type(tf.distribute.get_strategy()).__name__}. Call tfopt.plan before the scope, "
            "and set strategy to the strategy."
        )
    if keras.distribution.distribution() is not None:
        raise ConfigError(
            "keras.distribution must not be set: on TensorFlow, Keras accepts it and trains on one device. Received: "
            f"{keras.distribution.distribution()!r}. Call keras.distribution.set_distribution(None) and set "
            "strategy='mirrored'."
        )
    if not isinstance(config.strategy, str):
        _check_trainable(config.strategy)
        return config.strategy, type(config.strategy).__name__, "as given"
    gpus = len(hardware.gpus)
    cluster = find_cluster() if config.strategy in ("auto", "multi_worker") else None
    if config.strategy == "multi_worker" and cluster is None:
        raise ConfigError(
            "strategy='multi_worker' needs a cluster. Received: neither TF_CONFIG nor a Slurm step of several tasks. "
            "Start the script with `tfopt launch --workers N SCRIPT`, `srun`, or set TF_CONFIG."
        )
    if cluster is not None and (config.strategy == "multi_worker" or len(cluster.workers) > 1):
        communication = _communication(config, "multi_worker", ("auto", "nccl", "ring"))
        strategy = multi_worker_strategy(cluster, communication)
        replicas = strategy.num_replicas_in_sync
        reason = f"worker {cluster.index} of {len(cluster.workers)}, from {cluster.source}"
        return strategy, f"multi_worker, {_count(replicas, 'replica')}", reason
    if config.strategy == "mirrored" or (config.strategy == "auto" and gpus > 1):
        strategy = mirrored_strategy(_communication(config, "mirrored", ("auto", "nccl", "hierarchical_copy")))
        reason = "as asked" if config.strategy == "mirrored" else f"{gpus} GPUs"
        if strategy.num_replicas_in_sync == 1:
            reason = f"{reason}; with one device it gains nothing"
        return strategy, f"mirrored, {_count(strategy.num_replicas_in_sync, 'replica')}", reason
    if config.communication != "auto":
        _communication(config, config.strategy, ("auto",))
    if config.strategy == "pipeline":
        devices = pipeline_devices(config, hardware)
        return None, f"pipeline, {_count(len(devices), 'stage')}", f"as asked; over {', '.join(devices)}"
    if config.strategy == "none":
        return None, "none", "as asked"
    return None, "none", f"one GPU, {hardware.gpus[0].name}" if gpus else "no GPU; one CPU device"


def pipeline_devices(config: TrainingConfig, hardware: Hardware) -> tuple[str, ...]:
    """Returns the devices of a pipeline's stages, in order."""
    devices = config.pipeline_devices or tuple(f"GPU:{index}" for index in range(len(hardware.gpus)))
    if len(devices) < 2:
        raise ConfigError(
            "pipeline_devices must name at least two devices. Received: "
            f"pipeline_devices={config.pipeline_devices} and {_count(len(hardware.gpus), 'GPU')}. "
            "Name them, or set strategy='none'."
        )
    return devices


@functools.cache
def mirrored_strategy(communication: Literal["auto", "nccl", "hierarchical_copy"]) -> tf.distribute.MirroredStrategy:
    """Returns the strategy over all GPUs, or over all logical CPUs if there is no GPU.

    A process has only one. Two strategies would give their collective operations the same numbers, and TensorFlow
    would confuse them. (No default: the cache would keep one strategy for no argument and another for "auto".)
    """
    reduction = REDUCTIONS.get(communication)
    # With TF_CONFIG set, TensorFlow's default would be the devices of the whole cluster. So they are named here.
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return tf.distribute.MirroredStrategy(
        [device.name for device in devices], cross_device_ops=None if reduction is None else reduction()
    )


def is_multi_worker(strategy: tf.distribute.Strategy | None) -> bool:
    """Returns whether a strategy spans several processes."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def on_replicas(given: Any, strategy: tf.distribute.Strategy | None) -> Any:
    """Returns an optimizer or metric whose variables are on every replica. Names and functions stay as they are.

    It is the same object with new variables where that is possible. An optimizer that is built for another model, and
    an object that holds a `tf.Variable`, are made again from their configuration. Call it in the strategy's scope.

    Raises:
        ConfigError: It must be made again, and would lose a setting.
    """
    if strategy is None or not isinstance(given, keras.optimizers.Optimizer | keras.metrics.Metric):
        return given
    created_here = strategy.extended.variable_created_in_scope
    outside = [variable for variable in given.variables if not created_here(variable.value)]
    raw = [each for each in keras.tree.flatten([*vars(given).values()]) if isinstance(each, tf.Variable)]
    if all(map(created_here, raw)) and not outside:
        return given
    if raw or (isinstance(given, keras.optimizers.Optimizer) and given.built):
        return unbuilt_copy(given, from_config=True)
    for variable in outside:
        make_anew(variable)
    if isinstance(given, keras.optimizers.Optimizer):
        set_strategy(given, strategy)
    return given


def _check_trainable(strategy: tf.distribute.Strategy) -> None:
    if isinstance(strategy, TRAINABLE):
        return
    name = type(strategy).__name__
    reason = "tfopt was not tested with it"
    if name.startswith("ParameterServerStrategy"):
        reason = "it needs a coordinator that distributes steps, which Keras 3 does not have"
    raise ConfigError(
        f"strategy must be one that Keras 3 trains under: {reason}. Received: strategy={name}. "
        "Use strategy='multi_worker' for several processes, 'mirrored' for the GPUs of one."
    )


def _communication(config: TrainingConfig, strategy: str, known: tuple[str, ...]) -> Any:
    if config.communication not in known:
        raise ConfigError(
            f"communication must be {' or '.join(map(repr, known))} with strategy={strategy!r}. "
            f"Received: communication={config.communication!r}. Leave it out, or set the strategy that it is for."
        )
    return config.communication


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
