"""Private names of TensorFlow, and the global random generators of both."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfopt.compat.checks import imported, private


def eager_seed() -> int | None:
    """Returns the seed of `tf.random.set_seed`: `_seed` of the eager context; None if it was not called."""
    return private(_eager_context(), "_seed")


def eager_generator() -> Any:
    """Returns the random.Random that seeds eager operations: `_rng` of the eager context; it has no public state."""
    return private(_eager_context(), "_rng")


def _eager_context() -> Any:
    return imported("tensorflow.python.eager.context", "context", takes=())()


def global_generator() -> tf.random.Generator | None:
    """Returns TensorFlow's generator if there is one: `tf.random.get_global_generator()` would make it."""
    return imported("tensorflow.python.ops.stateful_random_ops", "global_generator")


def keras_generator(*, make: bool) -> Any:
    """Returns Keras' global seed generator: keras.src.random.seed_generator. None if there is none and `make` is False.

    A layer without a seed of its own draws from it; there is no public access.
    """
    if make:
        return imported("keras.src.random.seed_generator", "global_seed_generator", takes=())()
    name = imported("keras.src.random.seed_generator", "GLOBAL_SEED_GENERATOR")
    get = imported("keras.src.backend.common.global_state", "get_global_attribute")
    return get(name)


def is_op_determinism_enabled() -> bool:
    """Returns whether `tf.config.experimental.enable_op_determinism` was called; there is no getter."""
    name = "is_op_determinism_enabled"
    return bool(imported("tensorflow.python.framework.config", name, takes=())())


def expand_hostlist(hostlist: str) -> list[str]:
    """Returns the names in Slurm's abbreviated list of nodes; the public resolver sorts them."""
    return list(_slurm("expand_hostlist", "hostlist")(hostlist))


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Returns the numbers in Slurm's abbreviated list of tasks, one for each node."""
    return list(_slurm("expand_tasks_per_node", "tasks_per_node")(tasks_per_node))


def _slurm(name: str, *takes: str) -> Any:
    return imported("tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver", name, takes=takes)


def spec_of_first_replica(spec: Any) -> Any:
    """Returns the spec of the first replica's part: `_value_specs`, which is hidden in a spec of all replicas."""
    per_replica = imported("tensorflow.python.distribute.values", "PerReplicaSpec")
    return private(spec, "_value_specs")[0] if isinstance(spec, per_replica) else spec
