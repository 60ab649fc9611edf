"""Reads and writes the state of the global random generators."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.compat.tensorflow import eager_generator, eager_seed, global_generator, keras_generator
from tfopt.training.checkpointing.state import local_replicas


def read_random() -> dict[str, Any]:
    """Returns the state of the global random generators, in a form that JSON can hold.

    These are the generators of Python, of NumPy, of Keras (for layers and functions without their own seed), the one
    that gives TensorFlow the seeds of eager operations and, if there is one, `tf.random.get_global_generator()`. The
    seeds of layers are variables of the model. Not included are operations of TensorFlow with a state inside their
    kernel, such as `tf.random.uniform` in a compiled step. `keras.random` and `tf.random.stateless_*` have no such
    state.

    Example:
        >>> state = read_random()
        >>> first = random.random()
        >>> write_random(state)
        >>> random.random() == first
        True
    """
    kind, keys, *rest = np.random.get_state()
    of_keras, generator = keras_generator(make=False), global_generator()
    seed = eager_seed()  # None without tf.random.set_seed; then eager operations cannot be repeated
    return {
        "python": _listed(random.getstate()),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "keras": next(iter(local_replicas(of_keras.state.value).values())).numpy().tolist() if of_keras else None,
        "tensorflow": [int(generator.algorithm), generator.state.numpy().tolist()] if generator else None,
        "tensorflow_eager": None if seed is None else [int(seed), _listed(eager_generator().getstate())],
    }


def write_random(state: Mapping[str, Any]) -> None:
    """Sets the global random generators to a state from `read_random`.

    A generator that is not in the state is not changed. A generator that does not exist yet is made, under the current
    strategy.
    """
    if state["keras"] is not None:
        generator = keras_generator(make=True)
        for replica in local_replicas(generator.state.value).values():
            replica.assign(state["keras"])
    if state["tensorflow"] is not None:
        algorithm, values = state["tensorflow"]
        tf.random.set_global_generator(tf.random.Generator.from_state(values, algorithm))
    if state["tensorflow_eager"] is not None:
        seed, drawn = state["tensorflow_eager"]
        tf.random.set_seed(seed)
        eager_generator().setstate(_tupled(drawn))
    # Last, because making Keras' generator draws a number from Python's.
    random.setstate(_tupled(state["python"]))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))


def _listed(state: tuple[Any, ...]) -> list[Any]:
    version, internal, gauss = state
    return [version, list(internal), gauss]


def _tupled(state: Sequence[Any]) -> tuple[Any, ...]:
    version, internal, gauss = state
    return version, tuple(internal), gauss
