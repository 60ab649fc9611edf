"""The settings of a recipe as nested tables: all of them, those that differ from the defaults, and those to show."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

from tfopt.data.sources import SOURCES
from tfopt.errors import ConfigError
from tfopt.models import BUILDERS
from tfopt.report import Record
from tfopt.settings.calls import CODE
from tfopt.settings.flags import nested_config
from tfopt.settings.validation import field_types
from tfopt.tasks.task import TASKS

# The settings that may name code of the user's own.
NAMING_CODE = ("builder", "source", "task")
# The setting that names a function, and the setting with its arguments.
ARGUMENTS_OF = {"builder": "arguments", "source": "arguments", "optimizer": "optimizer_arguments"}
# The settings that are shown even if they have their default, because they say what is trained.
ALWAYS = ("builder", "source", "target_sparsity")


class Setting(NamedTuple):
    """One setting of a configuration, or a group of them: a configuration in it."""

    config: Any  # the configuration
    name: str  # its field
    path: str  # path from the outermost configuration, for example "training.epochs"
    value: Any  # its value
    default: Any  # its default
    is_group: bool  # whether it holds settings of its own


def walk(config: Any, path: str = "") -> Iterator[Setting]:
    """Yields each setting of a configuration and of those in it, a group before its settings.

    Example:
        >>> from tfopt.pruning import PruningConfig
        >>> from tfopt.recipe import Recipe
        >>> [each.path for each in walk(Recipe(name="mine", pruning=PruningConfig())) if each.is_group]
        ['model', 'data', 'data.augment', 'training', 'pruning']
    """
    types_of = field_types(type(config))
    for entry in dataclasses.fields(config):
        value, place = getattr(config, entry.name), f"{path}{entry.name}"
        default = entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
        is_group = dataclasses.is_dataclass(value) and nested_config(types_of[entry.name]) is not None
        yield Setting(config, entry.name, place, value, default, is_group)
        if is_group:
            yield from walk(value, f"{place}.")


def nested(settings: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns nested tables for settings by their paths.

    Example:
        >>> nested([("name", "mine"), ("training.epochs", 3)])
        {'name': 'mine', 'training': {'epochs': 3}}
    """
    tables: dict[str, Any] = {}
    for path, value in settings:
        *groups, name = path.split(".")
        table = tables
        for group in groups:
            table = table.setdefault(group, {})
        table[name] = value
    return tables


def plain_settings(config: Any) -> dict[str, Any]:
    """Returns all settings as nested tables of values that TOML can hold. A setting that is None is left out.

    Raises:
        ConfigError: A setting holds a Python object without a name, such as a function defined in a function.
    """
    return _tables(config, lambda each: each.value is not None, lambda each: _plain(each.value, each.path, _toml_name))


def changed_settings(config: Any) -> dict[str, Any]:
    """Returns the settings that differ from the defaults, as nested tables.

    A stage that is on has a table, even if all its settings are defaults. Where arguments are set, their function is
    named too.

    Example:
        >>> from tfopt.recipe import Recipe
        >>> from tfopt.training import TrainingConfig
        >>> changed_settings(Recipe(name="mine", training=TrainingConfig(epochs=3)))
        {'name': 'mine', 'training': {'epochs': 3}}
    """
    return _tables(
        config,
        lambda each: each.value != each.default or bool(getattr(each.config, ARGUMENTS_OF.get(each.name, ""), None)),
        lambda each: each.value,
    )


def shown_settings(config: Any) -> dict[str, Any]:
    """Returns the settings that differ from the defaults, and the main ones, as nested tables of plain values.

    A stage that is on has a table, even an empty one. A Python object, such as a function, is given by its name.

    Example:
        >>> from tfopt.recipe import ModelConfig, Recipe
        >>> shown_settings(Recipe(name="mine", model=ModelConfig(arguments={"dropout": 0.3})))["model"]
        {'builder': 'simple_cnn', 'arguments': {'dropout': 0.3}}
    """

    def is_shown(each: Setting) -> bool:
        is_default = each.value == each.default and type(each.value) is type(each.default)  # 1 is not True
        return each.value is not None and (each.name in ALWAYS or not is_default)

    return _tables(config, is_shown, lambda each: _plain(each.value, each.path, _shown_name))


def flat(tables: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each setting of nested tables with its path. The setting of an empty table is the table itself.

    Example:
        >>> list(flat({"model": {"builder": "mlp"}, "quantization": {}}))
        [('model.builder', 'mlp'), ('quantization', {})]
    """
    for name, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


@dataclass(frozen=True, kw_only=True)
class Difference(Record):
    """A setting in which two recipes differ."""

    setting: str  # path of the setting, for example "training.epochs"
    first: Any  # its value in the first recipe; None if the stage is off, or if an argument is not given
    second: Any  # its value in the second recipe


def differences(first: Any, second: Any) -> list[Difference]:
    """Returns the settings in which two recipes differ, in the order of the settings.

    Example:
        >>> from tfopt.recipe import Recipe
        >>> from tfopt.training import TrainingConfig
        >>> one = Recipe(name="one")
        >>> other = Recipe(name="one", training=TrainingConfig(epochs=3))
        >>> differences(one, other)
        [Difference(setting='training.epochs', first=30, second=3)]
    """
    one, other = _by_path(first), _by_path(second)
    return [
        Difference(setting=name, first=one.get(name), second=other.get(name))
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name)
    ]


def _by_path(config: Any) -> dict[str, Any]:
    """Returns each setting, and each argument of a function, by its path. A group, such as a stage, is on."""
    found: dict[str, Any] = {}
    for each in walk(config):
        if isinstance(each.value, Mapping) and each.value:
            found |= flat(each.value, f"{each.path}.")
        else:
            found[each.path] = "on" if each.is_group else each.value
    return found


def _tables(config: Any, choose: Callable[[Setting], bool], form: Callable[[Setting], Any]) -> dict[str, Any]:
    """Returns the chosen settings in a form, as nested tables. A stage that is on has a table, even an empty one."""
    return nested(
        (each.path, {} if each.is_group else form(each))
        for each in walk(config)
        if (each.default is None if each.is_group else choose(each))
    )


def _plain(value: Any, path: str, name_of: Callable[[Any, str], str]) -> Any:
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item, f"{path}.{name}", name_of) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, path, name_of) for item in value]
    return str(value) if isinstance(value, PurePath) else name_of(value, path)


def _shown_name(value: Any, path: str) -> str:
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or repr(value))


def _toml_name(value: Any, path: str) -> str:
    """Returns the name of a function: the registered one, or package.module:name."""
    if path.rpartition(".")[2] in NAMING_CODE:
        for name, known in {**BUILDERS, **SOURCES, **TASKS}.items():
            if known is value:
                return name
        module, place = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if module and place and module not in ("__main__", "builtins") and CODE.fullmatch(f"{module}:{place}"):
            found: Any = sys.modules.get(module)
            for part in place.split("."):
                found = getattr(found, part, None)
            if found is value:
                return f"{module}:{place}"
    raise ConfigError(
        f"{path} must be a name or a plain value, because TOML holds nothing else. Received: {path}={value!r}. "
        "Give its registered name, or define it in a module, so that it has the name package.module:name."
    )
