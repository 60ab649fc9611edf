"""Checks the values of a configuration against the types of its fields.

The type of a field declares its rule. pydantic checks the value, and the error message is made from the same type:

    target_sparsity: Annotated[float, Interval(ge=0, lt=1), Remedy("Sparsity is a fraction.")] = 0.75

    target_sparsity must be in [0, 1). Received: target_sparsity=90. Sparsity is a fraction.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import stat
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin
from weakref import WeakKeyDictionary

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt, MinLen
from pydantic import TypeAdapter, ValidationError

from tfopt.errors import ConfigError, unknown_name

Found = TypeVar("Found")

LONGEST_VALUE = 100
LARGEST = 2**63 - 1  # whole numbers of TensorFlow have 64 bits
NOT_STORED = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def once_for_each_class(function: Callable[[type], Found]) -> Callable[[type], Found]:
    """Calls a function once for each class: Python compiles the annotations of a class whenever they are asked for.

    Example:
        >>> names = once_for_each_class(lambda cls: [each.name for each in dataclasses.fields(cls)])
        >>> names(Remedy), names(Remedy) is names(Remedy)
        (['sentence'], True)
    """
    found: WeakKeyDictionary[type, Found] = WeakKeyDictionary()

    @functools.wraps(function)
    def of(cls: type) -> Found:
        if cls not in found:
            found[cls] = function(cls)
        return found[cls]

    return of


@dataclass(frozen=True)
class Remedy:
    """The remedy in the error of one field: a sentence, or a function from the value to a sentence."""

    sentence: str | Callable[[Any], str]


def check_fields(config: Any) -> None:
    """Raises ConfigError unless the value of each field of a dataclass follows the type of the field.

    A NumPy number becomes a number, a list a tuple and a path a string. A bool is not a number. A field that takes a
    name or a function is left to `check_name`, whose error lists the names.

    Example:
        >>> @dataclass
        ... class Settings:
        ...     share: Annotated[float, Ge(0), Lt(1)] = 0.5
        >>> check_fields(Settings(90))
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: share must be in [0, 1). Received: share=90.
    """
    for name, hint in _checked_fields(type(config)):
        checked = check_value(name, getattr(config, name), hint)
        if isinstance(checked, int | float | str | tuple):
            object.__setattr__(config, name, checked)  # a configuration is frozen once it is made


def check_value(name: str, value: Any, hint: Any) -> Any:
    """Returns a value as a plain Python value. Raises ConfigError unless it follows a type.

    Example:
        >>> check_value("steps", 3.0, int | float), check_value("steps", [1, 2], tuple[int, ...])
        (3.0, (1, 2))
        >>> check_value("steps", "many", Literal["auto"] | Annotated[int, Ge(1)])
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: steps must be 'auto' or a whole number of at least 1. Received: steps='many'.
    """
    try:
        checked = _adapter(hint).validate_python(_plain(value), strict=True)
    except ValidationError as error:
        raise error_for(name, value, hint) from error
    if any(
        isinstance(each, int) and abs(each) > LARGEST for each in (checked if isinstance(checked, tuple) else [checked])
    ):
        raise ConfigError(
            f"{name} must be at most 2^63 - 1, the largest that TensorFlow holds. Received: {name}={value}."
        )
    return checked


def check_type(name: str, value: object, expected: type, remedy: str = "") -> None:
    """Raises ConfigError unless the value of an argument has the expected type.

    Example:
        >>> check_type("config", 0.5, dict, "Pass dict(share=0.5).")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: config must be a dict. Received: config=0.5. Pass dict(share=0.5).
    """
    if not isinstance(value, expected):
        shown = repr(value)
        if len(shown) > LONGEST_VALUE:  # the values inside say nothing about a wrong type, and hide the remedy
            shown = f"{type(value).__name__}(...)"
        article = "an" if expected.__name__[0] in "AEIOU" else "a"
        rule = f"{name} must be {article} {expected.__name__}"
        raise ConfigError(f"{rule}. Received: {name}={shown}. {remedy}".rstrip())


def check_name(kind: str, value: Any, known: Iterable[str], *, or_a: str = "", accepts: Callable[[Any], bool]) -> None:
    """Raises ConfigError unless a value is a known name, or an object that is accepted instead of a name.

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
        raise ConfigError(
            f"{kind} must be a name or {or_a}. Received: {kind}={_shown(value)}. "
            f"The names are {', '.join(map(repr, sorted(names)))}."
        )


def check_stored(what: str, path: str | Path) -> None:
    """Raises ConfigError if a path names a pipe, a socket or a device.

    Reading a pipe waits for a writer, without end if there is none, and cannot be repeated. A missing path is no error
    here: who opens it says so.

    Example:
        >>> check_stored("A table", "/dev/null")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: A table must be a file on disk. Received: '/dev/null', a device. ...
    """
    try:
        kind = NOT_STORED.get(stat.S_IFMT(Path(path).expanduser().stat().st_mode))
    except (OSError, ValueError):  # a path with a zero byte
        return
    if kind is not None:
        raise ConfigError(
            f"{what} must be a file on disk. Received: {str(path)!r}, {kind}. Write its content to a file, and "
            "name that."
        )


def error_for(name: str, value: Any, hint: Any) -> ConfigError:
    """Returns the error for a value that does not follow a type."""
    bare, metadata = _divided(hint)
    value = _plain(value)
    if isinstance(value, str) and get_origin(bare) is Literal:
        return unknown_name(name.rpartition(".")[2], value, map(str, get_args(bare)))
    remedies = [each.sentence for each in metadata if isinstance(each, Remedy)]
    sentences = [sentence if isinstance(sentence, str) else sentence(value) for sentence in remedies]
    if isinstance(value, str) and get_origin(bare) is tuple and "strings" in rule(bare):
        sentences.append(f"Did you mean ({value!r},)?")
    received = f"{name} must be {rule(hint)}. Received: {name}={_shown(value)}."
    return ConfigError(" ".join([received, *filter(None, sentences)]))


def rule(hint: Any) -> str:
    """Returns the rule of a type in words.

    Example:
        >>> rule(bool), rule(Annotated[float, Gt(0)]), rule(tuple[str, ...] | None)
        ('True or False', 'a positive number', 'a tuple of strings or None')
        >>> rule(tuple[Annotated[float, Gt(0), Le(1)], ...]), rule(Annotated[float | None, Gt(0), Le(1)])
        ('a tuple of numbers in (0, 1]', 'in (0, 1] or None')
    """
    bare, metadata = _divided(hint)
    options = get_args(bare)
    if isinstance(bare, UnionType) or get_origin(bare) is Union:
        rules = [_rule_of_number(each, metadata) if each in (int, float) else rule(each) for each in options]
        words = [word for each in rules for word in each.split(" or ")]
        return _either(["a name" if word == "a string" and "a function" in words else word for word in words])
    if get_origin(bare) is Literal:
        return _either([repr(option) for option in options])
    if get_origin(bare) is Callable:
        return "a function"
    if get_origin(bare) is tuple:
        kind = rule(options[0]).removeprefix("a ").replace("string", "strings").replace("number", "numbers")
        kind = kind.replace("name or a function", "strings or functions")
        count = "two " if len(options) == 2 and options[1] is not ... else ""
        kind = count + ("numbers " if kind.startswith("in ") else "") + kind
        return f"a tuple of {kind}{' and not empty' if any(isinstance(each, MinLen) for each in metadata) else ''}"
    if get_origin(bare) in (Mapping, dict):
        return "a table" + ("" if options[1] is Any else f" of values {rule(options[1])}")
    if bare in (int, float):
        return _rule_of_number(bare, metadata)
    if bare is str and any(isinstance(each, MinLen) for each in metadata):
        return "a string that is not empty"
    plain = {bool: "True or False", str: "a string", NoneType: "None"}
    return plain.get(bare) or f"a {getattr(bare, '__name__', bare)}"


@once_for_each_class
def field_types(config: type) -> Mapping[str, Any]:
    """Returns the type of each field of a dataclass, with its annotations."""
    hints = typing.get_type_hints(config, include_extras=True)
    return MappingProxyType({each.name: hints[each.name] for each in dataclasses.fields(config)})


@once_for_each_class
def _checked_fields(config: type) -> tuple[tuple[str, Any], ...]:
    return tuple((name, hint) for name, hint in field_types(config).items() if "a name or a function" not in rule(hint))


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
    """Returns a bound as text, a large power of two as 2**exponent."""
    exponent = bound.bit_length() - 1 if isinstance(bound, int) else 0
    return f"2**{exponent}" if exponent > 15 and bound == 2**exponent else str(bound)


def _divided(hint: Any) -> tuple[Any, list[Any]]:
    """Returns a type without its annotations, and the annotations."""
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


def _shown(value: Any) -> str:
    """Returns a value as text, cut where a long one would hide the rest of the message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _plain(value: Any) -> Any:
    """Returns a NumPy number as Python's, a list as a tuple and a path as a string; any other value as it is."""
    if isinstance(value, bool):
        return value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else value
