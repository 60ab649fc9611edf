"""Lays other settings over a recipe (its forms, a TOML file with a base, another recipe), and checks tables of them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import pydantic

from tfopt.errors import ConfigError, unknown_name
from tfopt.recipe.tables import ARGUMENTS_OF, NAMING_CODE
from tfopt.settings.calls import is_code
from tfopt.settings.flags import nested_config, stages
from tfopt.settings.validation import error_for, field_types

T = TypeVar("T")

FORMS = "forms"


def with_changes(config: T, changes: Mapping[str, Any], path: str = "") -> T:
    """Returns a configuration with other settings, given as nested tables like those of a TOML file.

    A table changes the settings that it names. It turns a stage on that was off. False turns a stage off, in the forms
    too. `arguments` are added to those of the same function. Another function has none of the earlier ones. `forms` are
    added too.

    Args:
        config: A configuration, such as a Recipe.
        changes: The settings that change, by name.
        path: Path of the configuration in error messages, with a dot at its end.
    Raises:
        ConfigError: A setting is unknown, or its value is wrong.
    Example:
        >>> from tfopt.recipe import Recipe
        >>> recipe = with_changes(Recipe(name="mine"), {"training": {"epochs": 3}, "quantization": {}})
        >>> recipe.training.epochs, recipe.quantization is None
        (3, False)
    """
    if not isinstance(changes, Mapping):
        raise ConfigError(
            f"changes must be a table of settings. Received: {changes!r}. "
            "Pass for example {'training': {'epochs': 3}}."
        )
    types_of = field_types(type(config))
    found: dict[str, Any] = {
        arguments: {}
        for function, arguments in ARGUMENTS_OF.items()
        if function in changes and changes[function] != getattr(config, function, None)
    }
    off = {name for name in stages(type(config)) if changes.get(name, ...) in (None, False)}
    if off and FORMS in types_of:
        forms = getattr(config, FORMS).items()
        found[FORMS] = {form: {name: each[name] for name in each if name not in off} for form, each in forms}
    for name, value in changes.items():
        if name not in types_of:
            raise unknown_name("setting", f"{path}{name}", [f"{path}{known}" for known in types_of])
        current, nested = getattr(config, name), nested_config(types_of[name])
        if nested is not None:
            found[name] = _stage(f"{path}{name}", current, value, types_of[name], nested)
        elif name in (FORMS, *ARGUMENTS_OF.values()) and isinstance(value, Mapping):
            found[name] = {**found.get(name, current), **value}
        else:
            found[name] = value
    try:
        return dataclasses.replace(config, **found)  # type: ignore[type-var]
    except ConfigError as error:
        if not str(error).startswith(tuple(found)):
            raise
        raise ConfigError(f"{path}{error}") from error  # the error names the setting without its path


def check_no_code(values: Mapping[str, Any], path: str = "") -> None:
    """Raises ConfigError if a setting in nested tables names code of the user's own, which reading may not allow."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            check_no_code(value, f"{path}{name}.")
        elif name in NAMING_CODE and is_code(value):
            raise ConfigError(
                f"{path}{name} must be a registered name unless you allow the file to run code. Received: "
                f"{path}{name}={value!r}. Read the file, then add --allow-code, or pass allow_code=True."
            )


def check_names(cls: type, values: Mapping[str, Any], path: str) -> None:
    """Raises ConfigError if a name in nested tables is no setting of a dataclass."""
    known = field_types(cls)
    for name, value in values.items():
        if name not in known:
            raise unknown_name("setting", f"{path}{name}", [f"{path}{entry.name}" for entry in dataclasses.fields(cls)])
        nested = nested_config(known[name])
        if nested is not None and isinstance(value, Mapping):
            check_names(nested, value, f"{path}{name}.")


def config_error(cls: type, error: pydantic.ValidationError) -> ConfigError:
    """Returns the first error that pydantic found, as a ConfigError."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    path, hint = _setting(cls, first["loc"])
    if first["type"] == "missing":
        return ConfigError(f"{path} must be given. Received: {first['input']!r}. Add the setting {path}.")
    if nested_config(hint) is not None:
        return ConfigError(
            f"{path} must be a table. Received: {path}={first['input']!r}. Write the settings below [{path}]."
        )
    return error_for(path, first["input"], hint)


def _stage(path: str, current: Any, value: Any, hint: Any, nested: type) -> Any:
    """Returns the settings of a nested table after a change."""
    if isinstance(value, Mapping):
        return with_changes(nested() if current is None else current, value, f"{path}.")
    if (value is None or value is False) and _is_optional(hint):
        return None
    if isinstance(value, nested):
        return value
    off = ", or False to turn it off" if _is_optional(hint) else ""
    raise ConfigError(f"{path} must be a table of settings{off}. Received: {path}={value!r}.")


def _is_optional(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)


def _setting(cls: type, location: tuple[int | str, ...]) -> tuple[str, Any]:
    """Returns the path and the type of a setting. A location of pydantic also names places inside a plain field."""
    names: list[str] = []
    config, hint = cls, Any
    for name in map(str, location):
        names.append(name)
        hint = field_types(config)[name]
        nested = nested_config(hint)
        if nested is None:
            break
        config = nested
    return ".".join(names), hint
