"""Describes all that users of tfopt write or read: names, signatures, commands, TOML keys, files of artifacts.

`python tests/public_interface.py` writes what it is now to public_interface.txt, which test_public_interface.py
compares with. A line that goes, or changes, breaks the programs of users.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import os
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pydantic

RECORD = Path(__file__).with_suffix(".txt")
PACKAGES = ("", ".data", ".exporting", ".models", ".profiling", ".pruning", ".quantization", ".recipes", ".training")
COMMANDS = (
    ["run", "digits_cnn"],
    ["recipes"],
    ["models"],
    ["devices"],
    ["compress"],
    ["export"],
    ["verify"],
    ["bench"],
    ["inspect"],
    ["publish"],
    ["launch"],
    ["accelerate"],
    ["report"],
    ["doctor"],
    ["tune"],
    ["monitor"],
)


def describe() -> str:
    """Returns the description, one line for each thing that users know."""
    sections = {"names": names(), "commands": commands(), "toml": toml(), "manifest": manifest()}
    return "".join(f"[{title}]\n" + "".join(f"{line}\n" for line in lines) for title, lines in sections.items())


def names() -> Iterator[str]:
    first_names: dict[int, str] = {}
    for package in PACKAGES:
        module = importlib.import_module(f"tfopt{package}")
        for name in sorted(module.__all__):
            value, full = getattr(module, name), f"{module.__name__}.{name}"
            if isinstance(value, ModuleType):
                continue
            first = first_names.setdefault(id(value), full)
            yield from [f"{full} is {first}"] if first != full else described(full, value)


def described(name: str, value: object) -> Iterator[str]:
    if isinstance(value, type):
        bases = [base.__name__ for base in value.__mro__[1:] if base.__module__ in ("builtins", "tfopt.errors")]
        yield f"{name}{signature(value)} is {', '.join(bases)}"
        bases_of_tfopt = [each for each in value.__mro__ if each is value or each.__module__ == value.__module__]
        for member in sorted({member for each in bases_of_tfopt for member in vars(each)}):
            if not member.startswith("_") and member not in getattr(value, "__dataclass_fields__", ()):
                attribute = inspect.getattr_static(value, member)
                attribute = getattr(attribute, "__func__", attribute)
                yield f"{name}.{member}{signature(attribute) if callable(attribute) else ''}"
    elif callable(value):
        yield f"{name}{signature(value)}"
    elif isinstance(value, typing.Mapping):
        yield f"{name} has {', '.join(value)}"
    else:
        yield f"{name} is {type(value).__name__}"


def signature(value: object) -> str:
    """Returns the parameters with their defaults. Types are left out: they may be written in several ways."""
    try:
        found = inspect.signature(value)
    except (ValueError, TypeError):
        return ""
    bare = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    return re.sub(r"<function ([\w.<>]+) at 0x[0-9a-f]+>", r"\1", str(inspect.Signature(bare)))


def commands() -> Iterator[str]:
    from tfopt import cli

    yield from cli.HELP.splitlines()
    for words in COMMANDS:
        yield f"$ tfopt {' '.join(words)} --help"
        yield from help_of(words)


def help_of(words: list[str]) -> list[str]:
    """Returns the flags of a command, each with its type and its default, without the sentences that explain it."""
    from tfopt import cli

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    flat = " ".join(textwrap.dedent(text.translate({ord(each): " " for each in "│╭╮╰╯─"})).split())
    flags = re.findall(r"(?<= )(?:-\w, )?--[a-z][\w.-]*(?: (?:\{[^}]*\}|[A-Z][A-Z|{}\[\]. ]*\b))?", flat)
    defaults = re.findall(r"\((?:default|required|optional|repeatable)[^)]*\)", flat)
    return sorted({each.strip() for each in flags}) + sorted(set(defaults))


def toml() -> Iterator[str]:
    import tfopt

    full = tfopt.recipes.digits_cnn.RECIPE
    yield from full.to_toml().splitlines()
    for config in (tfopt.TrainingConfig, tfopt.PruningConfig, tfopt.QuantizationConfig, tfopt.ExportConfig):
        for field in dataclasses.fields(config):
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
            yield f"{config.__name__}.{field.name} = {default!r}"


def manifest() -> Iterator[str]:
    from tfopt.exporting.manifest import Manifest

    schema = pydantic.TypeAdapter(Manifest).json_schema()
    yield from json.dumps(json.loads(json.dumps(schema), object_hook=without_words), indent=1).splitlines()


def without_words(schema: dict) -> dict:
    return {key: value for key, value in schema.items() if key not in ("title", "description")}


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    RECORD.write_text(describe())
