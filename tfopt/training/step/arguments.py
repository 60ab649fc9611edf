"""Finds the arguments for a model's `compile`, which a class may have its own of."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from tfopt.errors import ConfigError


def compile_arguments(model: keras.Model, given: dict[str, Any], of_plan: dict[str, Any]) -> dict[str, Any]:
    """Returns what is passed to a model's `compile`. An own one receives what it takes, and its defaults stay.

    Args:
        model: The model.
        given: The caller's arguments; None was not given.
        of_plan: The settings of the plan. They can be set on a compiled model, so it does not matter if they are left
            out.
    Raises:
        ConfigError: The own `compile` lacks an argument, or takes none of that name.
    Example:
        >>> class Own(keras.Sequential):
        ...     def compile(self, optimizer, margin=0.5):
        ...         super().compile(optimizer, "mse")
        >>> compile_arguments(Own(), {"optimizer": "sgd", "loss": None, "margin": 1.0}, {"jit_compile": True})
        {'optimizer': 'sgd', 'margin': 1.0}
    """
    kind = type(model)
    if kind.compile is keras.Model.compile:
        return {**given, **of_plan}
    signature = inspect.signature(kind.compile)
    parameters = signature.parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    taken, refused = {}, []
    for name, value in {**given, **of_plan}.items():
        if takes_all or name in parameters:
            required = name in parameters and parameters[name].default is inspect.Parameter.empty
            if value is not None or required:
                taken[name] = value
        elif name in given and value is not None and (name, value) != ("optimizer", "adam"):  # its default
            refused.append(name)
    if refused:
        raise ConfigError(
            f"{', '.join(refused)} must be an argument of {kind.__name__}.compile. Received: compile{signature}. Leave "
            "it out, or let compile take **kwargs and pass them to super().compile."
        )
    try:
        signature.bind(model, **taken)
    except TypeError as error:
        raise ConfigError(
            f"{kind.__name__}.compile must receive its own arguments. Received: {', '.join(taken)} ({error}). Pass it "
            "to tfopt.compile, which hands options on by their names."
        ) from error
    return taken
