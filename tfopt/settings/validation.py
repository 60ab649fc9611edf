"""Checks the values of a configuration against the types of its fields.

A field declares its rule once, in its type. pydantic checks the value, and the error is written from the same type:

    target_sparsity: Annotated[float, Interval(ge=0, lt=1), Remedy("Sparsity is a fraction.")] = 0.75

    target_sparsity must be in [0, 1). Received: target_sparsity=90. Sparsity is a fraction.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt, MinLen
from pydantic import TypeAdapter, ValidationError

from tfopt.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class Remedy:
    """What the error adds for one field: a sentence, or a function from the value to one."""

    sentence: str | Callable[[Any], str]


def check_fields(config: Any) -> None:
    """Raises ConfigError unless each field of a dataclass holds what its type declares.

    NumPy's numbers, a list for a tuple and a path for a string are accepted. A number is never a bool.

    Example:
        >>> @dataclass
        ... class Settings:
        ...     share: Annotated[float, Ge(0), Lt(1)] = 0.5
        >>> check_fields(Settings(90))
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: share must be in [0, 1). Received: share=90.
    """
    for name, hint in field_types(type(config)).items():
        check_value(name, getattr(config, name), hint)


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raises ConfigError unless a value is what a type declares.

    Example:
        >>> check_value("steps", "many", Literal["auto"] | Annotated[int, Ge(1)])
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: steps must be 'auto' or a whole number of at least 1. Received: steps='many'.
    """
    try:
        _adapter(hint).validate_python(_plain(value), strict=True)
    except ValidationError as error:
        raise error_for(name, value, hint) from error


def check_type(name: str, value: object, expected: type) -> None:
    """Raises ConfigError unless a value is of the type that an argument takes.

    Example:
        >>> check_type("config", 0.5, dict)
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: config must be a dict. Received: config=0.5.
    """
    if not isinstance(value, expected):
        raise ConfigError(f"{name} must be a {expected.__name__}. Received: {name}={value!r}.")


def check_name(kind: str, value: Any, known: Iterable[str], *, or_a: str = "", accepts: Callable[[Any], bool]) -> None:
    """Raises ConfigError unless a value is a known name, or an object that is accepted in its place.

    Args:
        kind: The setting.
        value: Its value.
        known: The names.
        or_a: What else may be given, for example "function".
        accepts: Whether such an object is one.
    Example:
        >>> check_name("criterion", abs, ("magnitude",), or_a="function", accepts=callable)
        >>> check_name("criterion", "magnitud", ("magnitude",), or_a="function", accepts=callable)
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: Unknown criterion 'magnitud'. Expected one of: 'magnitude'. Did you mean 'magnitude'?
    """
    names = tuple(known)
    if isinstance(value, str):
        if value not in names:
            raise unknown_name(kind, value, names)
    elif not accepts(value):
        raise ConfigError(f"{kind} must be a name or {or_a}. Received: {kind}={value!r}.")


def error_for(name: str, value: Any, hint: Any) -> ConfigError:
    """Returns the error for a value that is not what a type declares."""
    bare, metadata = _divided(hint)
    if get_origin(bare) is Literal and all(isinstance(option, str) for option in get_args(bare)):
        return unknown_name(name.rpartition(".")[2], str(value), get_args(bare))
    remedies = [each.sentence for each in metadata if isinstance(each, Remedy)]
    sentences = [sentence if isinstance(sentence, str) else sentence(value) for sentence in remedies]
    if get_origin(bare) is tuple and isinstance(value, str):
        sentences.append(f"Did you mean ({value!r},)?")
    return ConfigError(
        " ".join([f"{name} must be {rule(hint)}. Received: {name}={value!r}.", *filter(None, sentences)])
    )


def rule(hint: Any) -> str:
    """Returns in words what values a type declares.

    Example:
        >>> rule(bool), rule(Annotated[float, Gt(0)]), rule(tuple[str, ...] | None)
        ('True or False', 'a positive number', 'a tuple of strings or None')
    """
    bare, metadata = _divided(hint)
    options = get_args(bare)
    if isinstance(bare, UnionType) or get_origin(bare) is Union:
        words = [word for option in options for word in rule(option).split(" or ")]
        return _either(["a name" if word == "a string" and "a function" in words else word for word in words])
    if get_origin(bare) is Literal:
        return _either([repr(option) for option in options])
    if get_origin(bare) is Callable:
        return "a function"
    if get_origin(bare) is tuple:
        kind = rule(options[0]).removeprefix("a ").replace("string", "strings").replace("whole number", "whole numbers")
        return f"a tuple of {kind}{' and not empty' if any(isinstance(each, MinLen) for each in metadata) else ''}"
    if get_origin(bare) in (Mapping, dict):
        return "a table"
    if bare in (int, float):
        return _rule_of_number(bare, metadata)
    plain = {bool: "True or False", str: "a string", NoneType: "None"}
    return plain.get(bare) or f"a {getattr(bare, '__name__', bare)}"


def field_types(config: type) -> dict[str, Any]:
    """Returns the type of each field of a dataclass, with what is annotated to it."""
    hints = typing.get_type_hints(config, include_extras=True)
    return {each.name: hints[each.name] for each in dataclasses.fields(config)}


def _either(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _rule_of_number(bare: type, metadata: list[Any]) -> str:
    kind = "a whole number" if bare is int else "a number"
    low = next((each for each in metadata if isinstance(each, (Ge, Gt))), None)
    high = next((each for each in metadata if isinstance(each, (Le, Lt))), None)
    match low, high:
        case None, None:
            return kind
        case Gt(0), None | Lt(math.inf):
            return kind.replace("a ", "a positive ")
        case Ge(lowest), None | Lt(math.inf):
            return f"{kind} of at least {lowest}"
    left = f"({low.gt}" if isinstance(low, Gt) else f"[{low.ge}" if isinstance(low, Ge) else "(-inf"
    right = f"{_power(high.lt)})" if isinstance(high, Lt) else f"{high.le}]" if isinstance(high, Le) else "inf)"
    return f"{'a whole number ' if bare is int else ''}in {left}, {right}"


def _power(bound: Any) -> str:
    """Writes 2**32 as people do."""
    exponent = bound.bit_length() - 1 if isinstance(bound, int) else 0
    return f"2**{exponent}" if exponent > 15 and bound == 2**exponent else str(bound)


def _divided(hint: Any) -> tuple[Any, list[Any]]:
    """Returns a type without its annotations, and these."""
    if get_origin(hint) is not Annotated:
        return hint, []
    bare, *metadata = get_args(hint)
    flat = []
    for each in metadata:
        flat += list(each) if isinstance(each, GroupedMetadata) else [each]
    return bare, flat


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else value
