"""Reads and changes the arguments of a call to `fit`, `evaluate` or `predict`, even if the model overrides the method.
Finds those of a call to its `compile`.

An override may name some of Keras' arguments, take the others as `*args` and `**kwargs`, and have its own arguments.
So the call is bound to the signature of the override and keeps its form. Arguments are found by their names in Keras.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras

from tfopt.errors import ConfigError


class MethodCall:
    """A call to a method of keras.Model, or to its override in the model's class.

    Raises:
        TypeError: The method does not accept these arguments.
    Example:
        >>> class Loud(keras.Sequential):
        ...     def fit(self, *args, **kwargs):
        ...         return args, kwargs
        >>> call = MethodCall(Loud(), "fit", ([1], [2]), {"epochs": 3})
        >>> call.get("y"), call.set("callbacks", [])
        ([2], True)
        >>> call.run()
        (([1], [2]), {'epochs': 3, 'callbacks': []})
    """

    def __init__(self, model: keras.Model, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._method = getattr(type(model), name)
        self._bound = inspect.signature(self._method).bind(model, *args, **kwargs)
        self._parameters = self._bound.signature.parameters
        kinds = {parameter.kind: parameter.name for parameter in self._parameters.values()}
        self._more_args = kinds.get(inspect.Parameter.VAR_POSITIONAL, "")
        self._more_kwargs = kinds.get(inspect.Parameter.VAR_KEYWORD, "")
        # The content of *args: Keras' arguments in Keras' order, without those that the override names.
        of_keras = inspect.signature(getattr(keras.Model, name)).parameters
        self._unnamed = [each for each in of_keras if each not in self._parameters]

    def names(self, name: str) -> bool:
        """Returns whether the argument is a parameter of the method itself."""
        return name in self._parameters

    def get(self, name: str) -> Any:
        """Returns an argument, or None if it was not given."""
        given = self._bound.arguments
        unnamed = zip(self._unnamed, given.get(self._more_args, ()), strict=False)
        return {**dict(unnamed), **given.get(self._more_kwargs, {}), **given}.get(name)

    def set(self, name: str, value: Any) -> bool:
        """Sets an argument. Returns False if the method does not accept it."""
        given = self._bound.arguments
        place = self._unnamed.index(name) if name in self._unnamed else -1
        if name in self._parameters:
            given[name] = value
        elif 0 <= place < len(given.get(self._more_args, ())):
            values = list(given[self._more_args])
            values[place] = value
            given[self._more_args] = tuple(values)
        elif self._more_kwargs:
            given[self._more_kwargs] = {**given.get(self._more_kwargs, {}), name: value}
        else:
            return False
        return True

    def run(self) -> Any:
        """Calls the method."""
        return self._method(*self._bound.args, **self._bound.kwargs)


def compile_arguments(model: keras.Model, given: dict[str, Any], of_plan: dict[str, Any]) -> dict[str, Any]:
    """Returns what is passed to a model's `compile`. An own one receives what it takes, and its defaults stay.

    Of the caller's arguments, None was not given. The settings of the plan may be left out: they can be set later.

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
