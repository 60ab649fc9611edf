"""Checks that a private name of Keras or TensorFlow is still there and is still used as tfopt expects.

A private name may be renamed in any release. Some uses then fail silently: an attribute that is set under the old name
is simply not read, and a method that is put under the old name is not called. So each use goes through a function of
this module, which raises an error that names what is missing and the versions that were tested.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any

from tfopt.errors import UnsupportedVersionError

TESTED = {"tensorflow": "2.21", "keras": "3.15"}


def private(owner: Any, name: str, *, takes: Sequence[str] | None = None) -> Any:
    """Returns a private attribute of an object, a class or a module. A function must take `takes`, `self` left out.

    Raises:
        UnsupportedVersionError: There is no such attribute, or it takes other arguments.
    Example:
        >>> private(dict, "get", takes=("key", "default"))
        <method 'get' of 'dict' objects>
    """
    try:
        value = getattr(owner, name)
    except AttributeError as error:
        raise _unsupported(f"{_name_of(owner)}.{name} must exist") from error
    if takes is not None and (found := _arguments(value)) != list(takes):
        raise _unsupported(f"{_name_of(owner)}.{name} must take ({', '.join(takes)})", f"({', '.join(found)})")
    return value


def set_private(owner: Any, name: str, value: Any) -> None:
    """Sets a private attribute, which must exist before: nothing would read one that does not."""
    private(owner, name)
    setattr(owner, name, value)


def imported(module: str, name: str, *, takes: Sequence[str] | None = None) -> Any:
    """Returns what a private module defines under a name."""
    return private(private_module(module), name, takes=takes)


def private_module(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _unsupported(f"The module {module} must exist") from error


def check_reads(function: Any, *names: str) -> None:
    """Checks that a function of Keras or TensorFlow reads or calls what tfopt puts under a name, or it has no effect.

    Example:
        >>> def fit(model):
        ...     return model.initial_epoch
        >>> check_reads(fit, "initial_epoch")
    """
    function = inspect.unwrap(function)
    found = {name for code in _codes(function.__code__) for name in code.co_names}
    for name in names:
        if name not in found:
            raise _unsupported(f"{function.__module__}.{function.__qualname__} must use {name}")


def _arguments(function: Any) -> list[str]:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # no function, or one without a signature
        return ["no signature"]
    return names[1:] if names[:1] == ["self"] else names


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of a function and of the functions and lambdas inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _name_of(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"


def _unsupported(rule: str, received: str = "none") -> UnsupportedVersionError:
    tested = " and ".join(f"{package} {version}" for package, version in TESTED.items())
    installed = " and ".join(f"{package} {importlib.metadata.version(package)}" for package in TESTED)
    pins = " ".join(f"'{package}=={version}.*'" for package, version in TESTED.items())
    return UnsupportedVersionError(
        f"{rule}, as in {tested}, with which tfopt was tested. Received: {received}, in {installed}. "
        f"Install the tested versions: pip install {pins}."
    )
