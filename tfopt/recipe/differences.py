"""The settings in which two recipes differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfopt.recipe.recipe import Recipe
from tfopt.report import Record


@dataclass(frozen=True, kw_only=True)
class Difference(Record):
    """A setting in which two recipes differ.

    Attributes:
        setting: Path of the setting, for example "training.epochs".
        first: Its value in the first recipe; None if the stage is off, or if an argument is not given.
        second: Its value in the second recipe.
    """

    setting: str
    first: Any
    second: Any


def differences(first: Recipe, second: Recipe) -> list[Difference]:
    """Returns the settings in which two recipes differ, in the order of the settings.

    Example:
        >>> from tfopt.training import TrainingConfig
        >>> one = Recipe(name="one")
        >>> other = Recipe(name="one", training=TrainingConfig(epochs=3))
        >>> differences(one, other)
        [Difference(setting='training.epochs', first=30, second=3)]
    """
    one, other = _flat(first), _flat(second)
    return [
        Difference(setting=name, first=one.get(name), second=other.get(name))
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name)
    ]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Returns settings by their path. A group of settings, such as a stage that is on, has an entry of its own."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
    elif isinstance(value, Mapping) and value:
        entries = dict(value)
    else:
        return {path: value}
    found = {path: "on"} if path and dataclasses.is_dataclass(value) else {}
    for name, item in entries.items():
        found |= _flat(item, f"{path}.{name}".lstrip("."))
    return found
