"""Sets methods and functions on a model, a callback or a class, in place of those that Keras defines.

Keras looks up the methods of `fit` on the model itself, and keeps the functions that it makes of them there. So what is
set on an instance is called for this model alone. The model's class does not change, and a saved model does not contain
it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

FUNCTIONS = ("train_function", "test_function", "predict_function")
_MISSING = object()


def forget(model: Any, *functions: str) -> None:
    """Drops functions that Keras made of a model's steps, all of them if none is named, so that it makes them anew.

    A function that was traced before holds what the model was then: its masks, its steps per execution, its optimizer.
    """
    for name in functions or FUNCTIONS:
        setattr(model, name, None)


def wrap(model: keras.Model, call: Callable[..., Any], *names: str) -> None:
    """Lets calls of some methods of a model go to `call`, with the name of the method first, until `unwrap`."""
    for name in names:
        setattr(model, name, functools.wraps(getattr(type(model), name))(functools.partial(call, name)))


def unwrap(model: keras.Model, *names: str) -> None:
    """Removes what was set on a model under these names, if anything was, and what Keras made of it."""
    for name in vars(model).keys() & names:
        delattr(model, name)
    forget(model)


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of an object, a class or a module, which are as before in the end.

    Example:
        >>> class Step:
        ...     size = 1
        >>> step = Step()
        >>> with replaced(step, size=4):
        ...     step.size
        4
        >>> step.size, vars(step)
        (1, {})
    """
    with kept(owner, *values):
        for name, value in values.items():
            setattr(owner, name, value)
        yield


@contextlib.contextmanager
def kept(owner: Any, *names: str) -> Iterator[None]:
    """Gives attributes in the end what they were, or takes them away where there were none."""
    of_class = {name for name in names if isinstance(getattr(type(owner), name, None), property)}
    before = {name: getattr(owner, name) if name in of_class else vars(owner).get(name, _MISSING) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not _MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)


@contextlib.contextmanager
def steps_per_execution(model: keras.Model, steps: int, *functions: str) -> Iterator[None]:
    """Runs so many steps in a call within it. Functions that Keras made for another number are made anew."""
    if steps == model.steps_per_execution:
        yield
        return
    try:
        with replaced(model, steps_per_execution=steps):
            forget(model, *functions)
            yield
    finally:
        forget(model, *functions)


@contextlib.contextmanager
def first_callback(model: keras.Model, callback: keras.callbacks.Callback, given: Any) -> Iterator[Any]:
    """Yields the `callbacks` of a fit with one before the others: it sees the model before they change it.

    Args:
        model: The model of the fit.
        callback: The callback that comes first.
        given: The argument `callbacks` of the fit.
    """
    if not isinstance(given, keras.callbacks.CallbackList):
        yield [callback, *callbacks_of(given)]
        return
    callback.set_model(model)
    callback.set_params(given.params)
    given.callbacks.insert(0, callback)
    try:
        yield given
    finally:
        given.callbacks.remove(callback)


def callbacks_of(given: Any) -> list[Any]:
    """Returns the callbacks of a fit, whatever its argument `callbacks` is.

    Example:
        >>> callbacks_of(None), len(callbacks_of([[keras.callbacks.History()]]))
        ([], 1)
    """
    if isinstance(given, keras.callbacks.CallbackList):
        return list(given.callbacks)
    return [] if given is None else list(keras.tree.flatten(given))
