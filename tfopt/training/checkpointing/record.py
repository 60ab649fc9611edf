"""What a checkpoint records in JSON beside the variables: what the training was compiled with, and random generators.

Variables do not tell the optimizer, the loss and the metrics: those of Adam have the shapes of AdamW's, and two means
are alike. So a checkpoint holds them in words, and a training that resumes compares these with its own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.optimizers import inner_optimizer
from tfopt.compat.tensorflow import eager_generator, eager_seed, global_generator, keras_generator
from tfopt.training.checkpointing.state import local_replicas

_COUNTER = re.compile(r"_\d+$")  # Keras numbers names, differently in another process
_NO_SETTINGS = ("name", "built", "learning_rate")


def compiled_with(model: keras.Model) -> dict[str, Any]:
    """Returns the optimizer, its settings, the loss and the metrics of a compiled model whose metrics are built.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(momentum=0.5), "mse")
        >>> words = compiled_with(model)
        >>> words["optimizer"], words["settings"]["momentum"], words["loss"], words["metrics"]
        ('SGD', 0.5, 'mean_squared_error', ['loss'])
    """
    optimizer = inner_optimizer(model.optimizer)
    settings = {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_")
        and name not in _NO_SETTINGS
        and (value is None or isinstance(value, bool | int | float | str))
    }
    # Keras keeps the metrics of `compile` in one.
    metrics = [each for one in model.metrics for each in getattr(one, "metrics", None) or [one]]
    return {
        "optimizer": type(optimizer).__name__,
        "settings": settings,
        "loss": _loss_in_words(getattr(model, "loss", None)),
        "metrics": [_COUNTER.sub("", each.name) for each in metrics],
    }


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, str]:
    """Returns what differs, in words: the keys are those of `compiled_with`.

    Example:
        >>> differences({"loss": "mean_absolute_error", "settings": {}}, {"loss": "mean_squared_error", "settings": {}})
        {'loss': 'the loss is mean_absolute_error and was mean_squared_error'}
    """
    found = {}
    for key in now.keys() & before.keys():
        one, other = now[key], before[key]
        if one == other:
            continue
        if key == "settings":
            changed = [name for name in one.keys() & other.keys() if one[name] != other[name]]
            if changed:
                found[key] = ", ".join(f"{name} is {one[name]} and was {other[name]}" for name in sorted(changed))
        else:
            verb = ("are", "were") if key == "metrics" else ("is", "was")
            found[key] = f"the {key} {verb[0]} {_shown(one)} and {verb[1]} {_shown(other)}"
    return found


def _loss_in_words(loss: Any) -> Any:
    if isinstance(loss, Mapping):
        return {str(name): _loss_in_words(each) for name, each in loss.items()}
    if isinstance(loss, list | tuple):
        return [_loss_in_words(each) for each in loss]
    found = keras.losses.get(loss) if isinstance(loss, str) else loss
    name = getattr(found, "name", None) or getattr(found, "__name__", None)
    return _COUNTER.sub("", name) if isinstance(name, str) else None if loss is None else type(loss).__name__


def _shown(words: Any) -> str:
    return ", ".join(map(str, words)) if isinstance(words, list) else str(words)


def read_random() -> dict[str, Any]:
    """Returns the state of the global random generators, in a form that JSON can hold.

    These are the generators of Python, of NumPy, of Keras (for layers and functions without their own seed), the one
    that gives TensorFlow the seeds of eager operations and, if there is one, `tf.random.get_global_generator()`. The
    seeds of layers are variables of the model. Not included are operations of TensorFlow with a state inside their
    kernel, such as `tf.random.uniform` in a compiled step. `keras.random` and `tf.random.stateless_*` have no such
    state.
    """
    kind, keys, *rest = np.random.get_state()
    of_keras, generator = keras_generator(make=False), global_generator()
    seed = eager_seed()  # None without tf.random.set_seed; then eager operations cannot be repeated
    return {
        "python": _copied(random.getstate(), list),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "keras": next(iter(local_replicas(of_keras.state.value).values())).numpy().tolist() if of_keras else None,
        "tensorflow": [int(generator.algorithm), generator.state.numpy().tolist()] if generator else None,
        "tensorflow_eager": None if seed is None else [int(seed), _copied(eager_generator().getstate(), list)],
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
        eager_generator().setstate(tuple(_copied(drawn, tuple)))
    # Last, because making Keras' generator draws a number from Python's.
    random.setstate(tuple(_copied(state["python"], tuple)))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))


def _copied(state: Sequence[Any], kind: type) -> list[Any]:
    """Returns the state of a generator of Python, whose middle part JSON has as a list, and Python as a tuple."""
    version, internal, gauss = state
    return [version, kind(internal), gauss]
