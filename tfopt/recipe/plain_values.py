"""Settings as plain values, which TOML can hold, and the errors in values that were read."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import pydantic

from tfopt.errors import ConfigError, unknown_name
from tfopt.settings.flags import nested_config
from tfopt.settings.validation import error_for, field_types


def plain_values(value: Any, path: str) -> Any:
    """Returns settings as plain values. A setting that is None is left out.

    Raises:
        ConfigError: A setting holds a Python object, such as a function.
    """
    if dataclasses.is_dataclass(value):
        entries = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
        known = {name: item for name, item in entries.items() if item is not None}
        return {name: plain_values(item, f"{path}.{name}".lstrip(".")) for name, item in known.items()}
    if isinstance(value, Mapping):
        return {name: plain_values(item, f"{path}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item, path) for item in value]
    if isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, PurePath):
        return str(value)
    raise ConfigError(
        f"{path} must be a name or a plain value, because TOML holds nothing else. Received: {path}={value!r}. "
        "Give its registered name instead."
    )


def check_names(cls: type, values: Mapping[str, Any], path: str) -> None:
    """Raises ConfigError if a name in nested tables is no setting of a dataclass."""
    known = typing.get_type_hints(cls)
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
