"""Makes a new optimizer or metric with the settings of another, which keeps its variables.

A deep copy has every setting. It is not possible once an optimizer is built, since its slots belong to the weights of a
model. Keras then makes another one from its configuration. A setting that `get_config` of an own class does not return
is lost in that way, without a word. So the two are compared.
"""

from __future__ import annotations

import contextlib
import copy
from types import FunctionType
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.optimizers import learning_rate_as_given
from tfopt.errors import ConfigError

VARIABLE = (keras.Variable, tf.Variable)
Given = TypeVar("Given", keras.optimizers.Optimizer, keras.metrics.Metric)


def unbuilt_copy(given: Given, *, from_config: bool = False) -> Given:
    """Returns a new optimizer without slots, or a new metric, with the same settings.

    With `from_config`, it is made from its configuration in any case: its variables are then made in the current scope.

    Raises:
        ConfigError: It cannot be made from its configuration, or would lose a setting.
    Example:
        >>> unbuilt_copy(keras.optimizers.SGD(0.5, momentum=0.9)).momentum
        0.9
    """
    if not from_config and not (isinstance(given, keras.optimizers.Optimizer) and given.built):
        # It may hold something that cannot be copied, such as a lock or a file.
        with contextlib.suppress(TypeError, ValueError, AttributeError, RuntimeError, copy.Error):
            copied: Given = _copied(given, {})
            return copied
    config = given.get_config()
    if "learning_rate" in config and isinstance(
        schedule := learning_rate_as_given(given), keras.optimizers.schedules.LearningRateSchedule
    ):
        config["learning_rate"] = schedule  # it has no variables, so both can use it
    try:
        made: Given = type(given).from_config(config)
    except (TypeError, ValueError, KeyError, NotImplementedError) as error:
        raise _refused(given, f"which cannot be made again: {' '.join(str(error).split())}") from error
    lost = _lost(given, made)
    if lost:
        raise _refused(given, f"which would lose {', '.join(lost)}")
    return made


def _copied(given: Any, memo: dict[int, Any]) -> Any:
    """Returns a deep copy. `copy.deepcopy` alone would go through the configuration, as Keras pickles its objects."""
    made = memo[id(given)] = object.__new__(type(given))
    for inner in keras.tree.flatten([*vars(given).values()]):
        if isinstance(inner, keras.optimizers.Optimizer | keras.metrics.Metric):
            if id(inner) not in memo:
                _copied(inner, memo)
        elif hasattr(inner, "get_config") or isinstance(inner, tf.distribute.Strategy):
            memo[id(inner)] = inner  # such as a schedule: it has no state, so both can use it
    vars(made).update(copy.deepcopy(vars(given), memo))
    return made


def _lost(given: Any, made: Any) -> list[str]:
    """Returns the attributes of an object of an own class that another one has with another value."""
    if type(given).__module__.split(".")[0] == "keras":
        return []
    plain: Any = keras.metrics.Metric() if isinstance(given, keras.metrics.Metric) else keras.optimizers.Optimizer(0.1)
    state = {name for name in vars(plain) if name.startswith("_") and name != "_learning_rate"} | {"built", "name"}
    return [
        f"{name}={value!r}"
        for name, value in vars(given).items()
        if name not in state and not _same(value, vars(made).get(name))
    ]


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, list | tuple | dict) and any(isinstance(each, VARIABLE) for each in keras.tree.flatten(one)):
        return True
    if isinstance(one, keras.Variable) and isinstance(other, keras.Variable):
        return bool(np.array_equal(one.numpy(), other.numpy()))
    if type(one) is not type(other):
        return False
    if isinstance(one, FunctionType):
        cells = ([cell.cell_contents for cell in each.__closure__ or ()] for each in (one, other))
        return one.__code__ is other.__code__ and _same(*cells)
    if isinstance(one, np.ndarray | tf.Tensor):
        return bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) or (hasattr(one, "__dict__") and _same(vars(one), vars(other)))


def _refused(given: Any, reason: str) -> ConfigError:
    kind = type(given)
    return ConfigError(
        f"{kind.__name__} must be made again with the same settings, from get_config. Received: {given.name!r}, "
        f"{reason}. Return every argument of {kind.__name__}.__init__ in get_config; under a strategy, it is enough to "
        "create it within plan.scope()."
    )
