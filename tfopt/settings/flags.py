"""Command-line flags, generated from the configuration dataclasses, and the field types that they need."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import itertools
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import tyro
from annotated_types import Ge, Lt

from tfopt.errors import ConfigError
from tfopt.settings.validation import Remedy, once_for_each_class

T = TypeVar("T")

# For a field that takes a registered name or, in Python, the object itself. The command line takes the name only.
BY_NAME = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="NAME",
    instance_from_str=lambda words: words[0],
    is_instance=lambda instance: True,
    str_from_instance=lambda instance: [instance if isinstance(instance, str) else repr(instance)],
)


# For a field that chooses layers by patterns, or in Python also by classes and functions from a layer to True or False.
Layers = Annotated[
    tuple[str | Callable[..., Any], ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="LAYER",
        instance_from_str=tuple,
        is_instance=lambda instance: isinstance(instance, tuple),
        str_from_instance=lambda instance: list(map(str, instance)),
    ),
]


def _parse_arguments(words: list[str]) -> dict[str, Any]:
    """Reads KEY=VALUE words. A value is read as TOML, or as a string if it is not TOML."""
    parsed = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"arguments must be KEY=VALUE. Received: {word!r}. Write for example width=32.")
        try:
            parsed[key] = tomllib.loads(f"value = {value}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            parsed[key] = value
    return parsed


_TABLE = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="KEY=VALUE",
    instance_from_str=_parse_arguments,
    is_instance=lambda instance: isinstance(instance, Mapping),
    str_from_instance=lambda instance: [f"{key}={value}" for key, value in instance.items()],
)

# For a field that holds the keyword arguments of a function that a name selects.
Arguments = Annotated[Mapping[str, Any], _TABLE]

# For a field that holds a share for each layer that a name or a pattern selects.
Shares = Annotated[Mapping[str, Annotated[float, Ge(0), Lt(1)]], _TABLE, Remedy("A share is a fraction, not per cent.")]


def parse(cls: type[T], arguments: Sequence[str], command: str, default: T | None = None) -> T:
    """Makes a dataclass from command-line flags, with the other values of a default.

    The flag of a nested field is for example --training.epochs, or short --epochs. A field of another dataclass or None
    gets that dataclass if a flag of it is given.

    Raises:
        ConfigError: A flag is unknown, or its value is wrong.
        SystemExit: With code 0, after --help.
    Example:
        >>> from tfopt.training import TrainingConfig
        >>> parse(TrainingConfig, ["--epochs", "3"], "tfopt train").epochs
        3
    """
    expanded = expand(cls, arguments)
    in_full = default is None and not {"-h", "--help"}.isdisjoint(expanded)
    asked = {each for each in stages(cls) if in_full or any(word.startswith(f"--{each}.") for word in expanded)}
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(
                tyro.conf.AvoidSubcommands[cls],  # type: ignore[valid-type,misc]
                args=expanded,
                prog=command,
                default=default,
                registry=_rules(asked),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ConfigError(f"{_message(output.getvalue())} See {command} --help.") from None


def expand(cls: type, arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with the full name of every flag.

    The last part of a flag is enough. If several flags have the same last part, the flag of the training is meant.

    Example:
        >>> from tfopt.recipe import Recipe
        >>> expand(Recipe, ["--target-sparsity", "0.9", "--epochs=3"])
        ['--pruning.target-sparsity', '0.9', '--training.epochs=3']
    """
    paths = list(flag_paths(cls))
    by_last_part: dict[str, list[str]] = {}
    for path in paths:
        by_last_part.setdefault(path.rpartition(".")[2], []).append(path)
    expanded = []
    for word in arguments:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name in ("help", *paths) or name.removeprefix("no-") in paths:
            expanded.append(word)
            continue
        candidates = by_last_part.get(name, [])
        if len(candidates) > 1:
            candidates = [path for path in candidates if path.startswith("training.")] or candidates
        if len(candidates) != 1:
            known = candidates or difflib.get_close_matches(name, [*paths, *by_last_part], n=1)
            hint = (
                f" Did you mean {' or '.join('--' + path for path in known)}?" if known else " --help lists them all."
            )
            raise ConfigError(f"A flag must be one of the command's. Received: --{name}.{hint}")
        expanded.append(f"--{candidates[0]}{equals}{value}")
    return expanded


def flag_paths(cls: type, prefix: str = "") -> list[str]:
    """Returns the full names of a dataclass's flags, without the leading dashes.

    Example:
        >>> from tfopt.quantization import QuantizationConfig
        >>> flag_paths(QuantizationConfig)
        ['observer', 'percentile', ...]
    """
    hints, annotated = typing.get_type_hints(cls), typing.get_type_hints(cls, include_extras=True)
    (_, suppressed) = typing.get_args(tyro.conf.Suppress[int])
    paths = []
    for entry in dataclasses.fields(cls):
        if suppressed not in getattr(annotated[entry.name], "__metadata__", ()):
            path = prefix + entry.name.replace("_", "-")
            nested = nested_config(hints[entry.name])
            paths += flag_paths(nested, f"{path}.") if nested else [path]
    return paths


@once_for_each_class
def stages(cls: type) -> Mapping[str, type]:
    """Returns the fields of a dataclass that hold another dataclass or None, each with that dataclass.

    Example:
        >>> from tfopt.recipe import Recipe
        >>> list(stages(Recipe))
        ['shrink', 'pruning', 'clustering', 'quantization', 'distillation']
    """
    optional = {name: hint for name, hint in typing.get_type_hints(cls).items() if type(None) in typing.get_args(hint)}
    return {name: config for name, hint in optional.items() if (config := nested_config(hint)) is not None}


def nested_config(hint: Any) -> type | None:
    """Returns the dataclass in the type of a field, or None if the field holds a plain value."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)), None)


def _rules(asked: Collection[str]) -> tyro.constructors.ConstructorRegistry:
    registry = tyro.constructors.ConstructorRegistry()
    registry.struct_rule(functools.partial(_dataclass, asked=asked))
    return registry


def _dataclass(
    info: tyro.constructors.StructTypeInfo, asked: Collection[str]
) -> tyro.constructors.StructConstructorSpec | None:
    """Makes flags of a dataclass as tyro does, with the stages that are asked for and two corrections of the help.

    tyro breaks a line of help where the source breaks it, and prints nothing for an empty default.
    """
    if not dataclasses.is_dataclass(info.type):
        return None
    hints = typing.get_type_hints(info.type, include_extras=True)
    specs = []
    for entry in dataclasses.fields(info.type):
        default = _default(entry, info.default)
        hint = hints[entry.name]
        if default is None and entry.name in asked and (stage := nested_config(hint)) is not None:
            default = stage()
        if isinstance(default, tuple | Mapping) and not default:
            hint = Annotated[hint, tyro.conf.arg(help_behavior_hint="(default: none)")]
        specs.append(
            tyro.constructors.StructFieldSpec(
                name=entry.name, type=hint, default=default, helptext=field_help(info.type).get(entry.name)
            )
        )
    return tyro.constructors.StructConstructorSpec(instantiate=info.type, fields=tuple(specs))


def _default(entry: dataclasses.Field[Any], instance: Any) -> Any:
    if dataclasses.is_dataclass(instance):
        return getattr(instance, entry.name)
    if entry.default is not dataclasses.MISSING:
        return entry.default
    return tyro.MISSING if entry.default_factory is dataclasses.MISSING else entry.default_factory()


@functools.cache
def field_help(cls: type) -> Mapping[str, str]:
    """Returns the text below each field of a dataclass in its source, as one line."""
    found = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for entry, below in itertools.pairwise(definition.body):
            match entry, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def _message(printed: str) -> str:
    """Returns the sentence from the box that tyro prints: a title, the sentence, a line, and hints."""
    lines = [line.strip(" │╭╮╰╯|+") for line in printed.splitlines()[1:]]
    is_rule = [not line.strip("─-") for line in lines]
    start = is_rule.index(False)
    end = is_rule.index(True, start)
    # The message of our own errors names the setting, so the name of the flag before it is not needed.
    sentence = re.sub(r"^Error parsing [^-][\w.-]*: ", "", " ".join(lines[start:end]))
    return sentence if sentence.endswith((".", "?")) else f"{sentence}."
