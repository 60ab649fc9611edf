"""Functions that settings name: a registered name, `package.module:function`, or in Python the function itself.

A name with a colon is code of the user's own. It is imported when it is needed, and not when the settings are made.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tfopt.errors import ConfigError, TfoptError, unknown_name
from tfopt.terminal import without_colors

CODE = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)")
# Names such as keras:DenseNet121 are models of these libraries.
LIBRARIES = ("keras", "keras_hub")
# What tfopt passes to the functions of a setting, before their arguments.
POSITIONAL = {"builder": ("input_shape", "outputs")}


def is_code(named: Any) -> bool:
    """Returns whether a setting names code of the user's own.

    Example:
        >>> is_code("my_package.my_module:build"), is_code("simple_cnn"), is_code("keras:DenseNet121")
        (True, False, False)
    """
    match = CODE.fullmatch(named) if isinstance(named, str) else None
    return match is not None and match[1] not in LIBRARIES


def import_code(kind: str, name: str) -> Any:
    """Returns the object that `package.module:name` names.

    Raises:
        ConfigError: There is no such module, its own imports fail, it ends the process, or it has no such name.
    Example:
        >>> import_code("source", "math:sqrt")(9.0)
        3.0
    """
    module, _, path = name.partition(":")
    found: Any = import_module(kind, module, name)
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise ConfigError(
            f"{kind} must name a module that Python can import, and a name in it. Received: {kind}={name!r} ({error}). "
            "Correct the name."
        ) from error
    return found


def import_module(kind: str, name: str, given: str | None = None) -> ModuleType:
    """Returns a module of the user by its name, which `given` holds.

    Raises:
        ConfigError: There is no such module, its own imports fail, or it ends the process.
    Example:
        >>> import_module("source", "math").sqrt(9.0)
        3.0
    """
    try:
        return importlib.import_module(name)
    except SystemExit as error:
        raise _ended(kind, given or name, error) from error
    except ImportError as error:
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{kind} must name a module whose own imports work. Received: {kind}={(given or name)!r} ({error}). "
                "Install what it needs, or correct its imports."
            ) from error
        raise _not_found(kind, given or name, error) from error
    except (TypeError, ValueError) as error:
        if all(part.isidentifier() for part in name.split(".")):
            raise
        raise _not_found(kind, given or name, error) from error


def _not_found(kind: str, name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{kind} must name a module that Python can import. Received: {kind}={name!r} ({error}). Correct the name, or "
        "add the module's directory to PYTHONPATH."
    )


def check_call(
    kind: str, named: Any, registry: Mapping[str, Any], arguments: Mapping[str, Any], positional: tuple[None, ...]
) -> None:
    """Checks that a name is registered and that the function takes the arguments.

    Code of the user's own is checked when it is imported.
    """
    if not is_code(named):
        _check_function(kind, named, _registered(kind, named, registry), registry, arguments, positional)


def call_named(
    kind: str, named: Any, registry: Mapping[str, Any], arguments: Mapping[str, Any], *positional: Any
) -> Any:
    """Calls the function of a name, or a function.

    An error of a registered function becomes an error in the arguments. An error of other code stays as it is.
    """
    if is_code(named):
        function = import_code(kind, named)
        _check_function(kind, named, function, registry, arguments, (None,) * len(positional))
    else:
        function = _registered(kind, named, registry)
    own = is_code(named) or not isinstance(named, str)
    try:
        return function(*positional, **arguments)
    except SystemExit as error:
        if not own:
            raise
        raise _ended(kind, named, error) from error
    except (TypeError, ValueError, ArithmeticError) as error:
        if own or isinstance(error, TfoptError):
            raise
        given = f" for {positional}" if positional else ""
        words = " ".join(without_colors(str(error)).split())
        raise ConfigError(
            f"arguments must have values that {kind} {named!r} accepts{given}. "
            f"Received: arguments={dict(arguments)} ({words}). Correct the values."
        ) from error


def _ended(kind: str, named: Any, error: SystemExit) -> ConfigError:
    return ConfigError(
        f"{kind} must not end the process. Received: {kind}={named!r}, which calls sys.exit({error.code!r}). Put what "
        "only a script does below if __name__ == '__main__'."
    )


def _registered(kind: str, named: Any, registry: Mapping[str, Any]) -> Any:
    if not isinstance(named, str):
        return named
    if named not in registry:
        raise unknown_name(kind, named, registry)
    return registry[named]


def _check_function(
    kind: str,
    named: Any,
    function: Any,
    registry: Mapping[str, Any],
    arguments: Mapping[str, Any],
    positional: tuple[None, ...],
) -> None:
    if not callable(function) or hasattr(function, "get_weights"):  # a model can be called, but builds nothing
        what = f", which is of type {type(function).__name__}" if is_code(named) else ""
        raise ConfigError(
            f"{kind} must be a name or a function. Received: {kind}={named!r}{what}. "
            f"The names are {', '.join(map(repr, sorted(registry)))}."
        )
    signature = inspect.signature(function)
    try:
        signature.bind_partial(*positional)
    except TypeError as error:
        raise ConfigError(
            f"{kind} must be a function of ({', '.join(POSITIONAL[kind])}, **arguments). Received: {kind}={named!r}, "
            f"which takes {signature}. Add the parameters."
        ) from error
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        accepted = ", ".join(list(signature.parameters)[len(positional) :]) or "no arguments"
        raise ConfigError(
            f"arguments must fit the {kind} {named!r}, which takes: {accepted}. "
            f"Received: arguments={dict(arguments)} ({error}). Correct their names."
        ) from error
