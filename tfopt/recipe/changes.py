"""Lays other settings over a recipe: its forms, a TOML file with a base, the composition of two recipes."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from tfopt.errors import ConfigError, unknown_name
from tfopt.settings.flags import nested_config
from tfopt.settings.validation import field_types

T = TypeVar("T")

FORMS = "forms"
# The setting that names a function, and the setting with its arguments.
ARGUMENTS_OF = {"builder": "arguments", "source": "arguments", "optimizer": "optimizer_arguments"}


def with_changes(config: T, changes: Mapping[str, Any], path: str = "") -> T:
    """Returns a configuration with other settings, given as nested tables like those of a TOML file.

    A table changes the settings that it names. It turns a stage on that was off. False turns a stage off. `arguments`
    are added to those of the same function. Another function has none of the earlier ones. `forms` are added too.

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
    for name, value in changes.items():
        if name not in types_of:
            raise unknown_name("setting", f"{path}{name}", [f"{path}{known}" for known in types_of])
        current, nested = getattr(config, name), nested_config(types_of[name])
        if nested is not None:
            found[name] = _stage(f"{path}{name}", current, value, types_of[name], nested)
        elif name == FORMS and isinstance(value, Mapping):
            found[name] = {**current, **value}
        elif name in ARGUMENTS_OF.values() and isinstance(value, Mapping):
            found[name] = {**found.get(name, current), **value}
        else:
            found[name] = value
    try:
        return dataclasses.replace(config, **found)  # type: ignore[type-var]
    except ConfigError as error:
        if not str(error).startswith(tuple(found)):
            raise
        raise ConfigError(f"{path}{error}") from error  # the error names the setting without its path


def changes_from_defaults(config: Any) -> dict[str, Any]:
    """Returns the settings in which a configuration differs from the defaults, as nested tables.

    A stage that is on has a table, even if all its settings are defaults. Where arguments are set, their function is
    named too.

    Example:
        >>> from tfopt.recipe import Recipe
        >>> from tfopt.training import TrainingConfig
        >>> changes_from_defaults(Recipe(name="mine", training=TrainingConfig(epochs=3)))
        {'name': 'mine', 'training': {'epochs': 3}}
    """
    found: dict[str, Any] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        default = entry.default_factory() if callable(entry.default_factory) else entry.default
        if dataclasses.is_dataclass(value) and nested_config(field_types(type(config))[entry.name]) is not None:
            inner = changes_from_defaults(value)
            if inner or default is None:
                found[entry.name] = inner
        elif default is dataclasses.MISSING or value != default:
            found[entry.name] = value
    for function, arguments in ARGUMENTS_OF.items():
        if arguments in found and hasattr(config, function):  # they belong to this function, and to no other
            found = {function: getattr(config, function), **found}
    return found


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
