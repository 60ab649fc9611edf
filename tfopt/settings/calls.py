"""Functions that settings name: a registered name, or in Python the function itself, with its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from tfopt.errors import ConfigError, unknown_name


def check_call(
    kind: str, named: Any, registry: Mapping[str, Any], arguments: Mapping[str, Any], positional: tuple[None, ...]
) -> None:
    """Checks that a name is registered and that the function takes the arguments."""
    if isinstance(named, str) and named not in registry:
        raise unknown_name(kind, named, registry)
    function = registry[named] if isinstance(named, str) else named
    if not callable(function) or hasattr(function, "get_weights"):  # a model can be called, but builds nothing
        raise ConfigError(
            f"{kind} must be a name or a function. Received: {kind}={named!r}. "
            f"The names are {', '.join(map(repr, sorted(registry)))}."
        )
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        accepted = ", ".join(list(signature.parameters)[len(positional) :]) or "no arguments"
        raise ConfigError(
            f"arguments must fit the {kind} {named!r}, which takes: {accepted}. "
            f"Received: arguments={dict(arguments)} ({error}). Correct their names."
        ) from error


def call_named(
    kind: str, named: Any, registry: Mapping[str, Any], arguments: Mapping[str, Any], *positional: Any
) -> Any:
    """Calls a function, or the registered function of a name, whose errors become errors in the arguments."""
    if not isinstance(named, str):
        return named(*positional, **arguments)
    try:
        return registry[named](*positional, **arguments)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        given = f" for {positional}" if positional else ""
        raise ConfigError(
            f"arguments must have values that {kind} {named!r} accepts{given}. "
            f"Received: arguments={dict(arguments)} ({' '.join(str(error).split())}). Correct the values."
        ) from error
