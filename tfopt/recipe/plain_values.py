"""Settings as plain values, which TOML can hold, and the errors in values that were read."""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import pydantic

from tfopt.data.sources import SOURCES
from tfopt.errors import ConfigError, unknown_name
from tfopt.models import BUILDERS
from tfopt.settings.calls import CODE, is_code
from tfopt.settings.flags import nested_config
from tfopt.settings.validation import error_for, field_types
from tfopt.tasks.task import TASKS

# The settings that may name code of the user's own.
NAMING_CODE = ("builder", "source", "task")


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
    name = _name_of(value) if path.rpartition(".")[2] in NAMING_CODE else None
    if name is None:
        raise ConfigError(
            f"{path} must be a name or a plain value, because TOML holds nothing else. Received: {path}={value!r}. "
            "Give its registered name, or define it in a module, so that it has the name package.module:name."
        )
    return name


def _name_of(value: Any) -> str | None:
    """Returns the name of a function: the registered one, or package.module:name. None if it has neither."""
    for name, known in {**BUILDERS, **SOURCES, **TASKS}.items():
        if known is value:
            return name
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not path or module in ("__main__", "builtins") or not CODE.fullmatch(f"{module}:{path}"):
        return None
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return f"{module}:{path}" if found is value else None


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
