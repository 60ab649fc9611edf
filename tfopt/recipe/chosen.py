"""The settings of a recipe that differ from the defaults, to show it in the terminal and in a notebook."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

# The settings that are shown even if they have their default, because they say what is trained.
ALWAYS = ("builder", "source", "target_sparsity")


def chosen_settings(config: Any) -> dict[str, Any]:
    """Returns the settings that differ from the defaults, and the main ones, as nested tables of plain values.

    A stage that is on has a table, even an empty one. A Python object, such as a function, is given by its name.

    Example:
        >>> from tfopt.recipe import ModelConfig, Recipe
        >>> chosen_settings(Recipe(name="mine", model=ModelConfig(arguments={"dropout": 0.3})))["model"]
        {'builder': 'simple_cnn', 'arguments': {'dropout': 0.3}}
    """
    found = {}
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), _default(field)
        is_default = value == default and type(value) is type(default)
        if value is None or (is_default and field.name not in ALWAYS and not dataclasses.is_dataclass(value)):
            continue
        found[field.name] = chosen_settings(value) if dataclasses.is_dataclass(value) else _plain(value)
        if is_default and found[field.name] == {}:
            del found[field.name]
    return found


def flat(tables: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yields each setting of nested tables with its path and its value as text.

    Example:
        >>> list(flat({"model": {"builder": "mlp"}, "quantization": {}}))
        [('model.builder', 'mlp'), ('quantization', 'on')]
    """
    for name, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{name}.")
        elif isinstance(value, Mapping):
            yield f"{path}{name}", "on"
        else:
            yield f"{path}{name}", "off" if value is False else str(value)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or repr(value))
