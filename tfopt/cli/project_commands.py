"""The commands `tfopt init` and `tfopt recipes diff`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from tfopt.cli.exit_codes import SUCCESS
from tfopt.cli.parsing import parse_words
from tfopt.cli.printing import print_json, print_rows


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Writes the start of a project of your own to DIR: train.py with a model and examples, and recipe.toml with the
    settings. Both run as they are.
    """

    directory: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """Directory of the project. It must not have these files yet."""
    json: bool = False
    """Print JSON: the paths of the files."""


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """Lists the settings in which two recipes differ. A and B are recipes of `tfopt recipes` or .toml files."""

    first: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="A")]
    """Name of a recipe, or a .toml file."""
    second: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="B")]
    """Name of another recipe, or a .toml file."""
    json: bool = False
    """Print JSON."""


def init_command(words: list[str]) -> int:
    options = parse_words(InitOptions, words, "tfopt init")
    from tfopt.recipe.new_project import write_project

    script, recipe = write_project(options.directory)
    if options.json:
        print_json([str(script), str(recipe)])
        return SUCCESS
    print_rows([(str(script), "a model and examples"), (str(recipe), "the settings")])
    print(f"\nRun it: python {script}")  # noqa: T201
    print(f"or:     tfopt run {recipe} --allow-code")  # noqa: T201
    return SUCCESS


def diff_command(words: list[str]) -> int:
    options = parse_words(DiffOptions, words, "tfopt recipes diff")
    from tfopt.recipes import diff

    found = diff(options.first, options.second)
    if options.json:
        print_json(
            [{"setting": each.setting, "first": _plain(each.first), "second": _plain(each.second)} for each in found]
        )
        return SUCCESS
    if not found:
        print(f"{options.first} and {options.second} have the same settings")  # noqa: T201
        return SUCCESS
    print_rows([(each.setting, f"{_shown(each.first)} -> {_shown(each.second)}") for each in found])
    return SUCCESS


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | list | tuple | dict | None) else repr(value)


def _shown(value: object) -> str:
    return "off" if value is None else value if isinstance(value, str) else repr(value)
