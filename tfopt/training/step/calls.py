"""Reads and changes the arguments of a call to `fit`, `evaluate` or `predict`, also where a model overrides these.

An override may name any of Keras' arguments, take the rest as `*args` and `**kwargs`, and have arguments of its own. So
the call is bound to the override's signature and keeps its form; only the names that arguments have in Keras are found
in it.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras


class MethodCall:
    """A call to a method of a model's class that overrides, or is, a method of keras.Model.

    Args:
        model: What it is called on.
        name: The method's name.
        args, kwargs: As given by the caller.
    Raises:
        TypeError: The method does not take these arguments.
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
        # What *args holds: Keras' arguments in Keras' order, without those that the override names.
        of_keras = inspect.signature(getattr(keras.Model, name)).parameters
        self._unnamed = [each for each in of_keras if each not in self._parameters]

    def names(self, name: str) -> bool:
        """Returns whether the method itself names the argument."""
        return name in self._parameters

    def get(self, name: str) -> Any:
        """Returns an argument, or None if it was not given."""
        given = self._bound.arguments
        unnamed = zip(self._unnamed, given.get(self._more_args, ()), strict=False)
        return {**dict(unnamed), **given.get(self._more_kwargs, {}), **given}.get(name)

    def set(self, name: str, value: Any) -> bool:
        """Sets an argument, where the caller gave it or by its name. Returns False if the method does not take it."""
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
