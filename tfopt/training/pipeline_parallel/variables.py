"""Moves variables and optimizer slots to the devices of their stages.

A keras.Variable holds a tf.Variable, which cannot change its device. To move it, a new tf.Variable is made on the other
device. Keras makes slots on the default device and computes updates there, even for variables on another device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.optimizers import (
    find_slots_anew,
    inner_optimizer,
    make_anew,
    own_variables,
    trained_variables,
    update_hooks,
    value_of,
)
from tfopt.errors import UnsupportedModelError


def move(variable: keras.Variable, device: str) -> None:
    """Moves a variable to a device. The keras.Variable stays the same object, with a new tf.Variable inside.

    Example:
        >>> weight = keras.Variable([1.0, 2.0])
        >>> move(weight, "CPU:0")
        >>> weight.numpy().tolist(), weight.value.device[-5:]
        ([1.0, 2.0], 'CPU:0')
    """
    if _same_device(value_of(variable).device, device):
        return
    with tf.device(device):
        make_anew(variable)


def place_slots(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Builds an optimizer if it is not built yet, and moves its slots to the devices of their variables.

    Raises:
        UnsupportedModelError: The optimizer has a slot of which the variable is unknown.
    """
    if not optimizer.built:
        with tf.device("CPU:0"):  # in host memory until they are moved: the first GPU could not hold all of them
            optimizer.build(variables)
    for each in _with_inner(optimizer):
        _place_own_slots(each)


@contextmanager
def updates_in_place(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Within the scope, the optimizer computes the update and weight decay of a variable on that variable's device."""
    with ExitStack() as hooks:
        for each in _with_inner(optimizer):
            hooks.enter_context(update_hooks(each, _update_in_place, _decay_in_place))
        yield


def _update_in_place(update_step: Any) -> Any:
    def placed(gradient: Any, variable: Any, learning_rate: Any) -> Any:
        with tf.device(variable.device):
            return update_step(gradient, variable, learning_rate)

    return placed


def _decay_in_place(apply_weight_decay: Any) -> Any:
    def placed(variables: Sequence[keras.Variable]) -> None:
        for variable in variables:
            with tf.device(variable.value.device):
                apply_weight_decay([variable])

    return placed


def _with_inner(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    inner = inner_optimizer(optimizer)
    return [optimizer] if inner is optimizer else [optimizer, inner]


def _place_own_slots(optimizer: Any) -> None:
    """Moves an optimizer's own slots. Keras keeps them in lists with the length and order of its variables."""
    variables = trained_variables(optimizer)
    placed = set()
    for slots in vars(optimizer).values():
        if slots is variables or not isinstance(slots, list) or len(slots) != len(variables):
            continue
        for slot, variable in zip(slots, variables, strict=True):
            # Adafactor has whole numbers in place of the slots that it does not use.
            if isinstance(slot, keras.Variable) and tf.as_dtype(slot.dtype).is_floating:
                move(slot, variable.value.device)
                placed.add(id(slot))
    astray = [slot.path for slot in own_variables(optimizer) if slot.ndim > 0 and id(slot) not in placed]
    if astray:
        raise UnsupportedModelError(
            "Every slot of the optimizer must belong to one variable, to be moved to its device. Received: "
            f"optimizer={type(optimizer).__name__} with {astray}. Use one of Keras' own, such as Adam or SGD."
        )
    # The optimizer finds a variable's slots by the identity of its tf.Variable, which `move` replaced.
    find_slots_anew(optimizer)


def _same_device(one: str, other: str) -> bool:
    first, second = (tf.DeviceSpec.from_string(name) for name in (one, other))
    return (first.device_type, first.device_index) == (second.device_type, second.device_index)
