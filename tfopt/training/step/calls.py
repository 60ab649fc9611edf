"""Reads and changes the arguments of a call to `fit`, `evaluate` or `predict`, even if the model overrides the method.

An override may name some of Keras' arguments, take the others as `*args` and `**kwargs`, and have its own arguments.
So the call is bound to the signature of the override and keeps its form. Arguments are found by their names in Keras.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras


class MethodCall:
    """A call to a method of keras.Model, or to its override in the model's class.

    Args:
        model: The model.
        name: The name of the method.
        args, kwargs: The caller's arguments.
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
