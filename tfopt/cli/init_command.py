"""The command `tfopt init`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated

import tyro

from tfopt.cli.exit_codes import SUCCESS
from tfopt.cli.parsing import parse_words
from tfopt.cli.printing import print_json, print_rows, say


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Writes the start of a project of your own to DIR: train.py with a model and examples, and recipe.toml with the
    settings. Both run as they are.
    """

    directory: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """Directory of the project. It must not have these files yet."""
    json: bool = False
    """Print JSON: the paths of the files."""


def init_command(words: list[str]) -> int:
    options = parse_words(InitOptions, words, "tfopt init")
    from tfopt.recipe.new_project import write_project

    script, recipe = write_project(options.directory)
    if options.json:
        print_json([str(script), str(recipe)])
        return SUCCESS
    print_rows([(str(script), "a model and examples"), (str(recipe), "the settings")])
    say(f"\nRun it: python {shlex.quote(str(script))}")
    say(f"or:     tfopt run {shlex.quote(str(recipe))} --allow-code")
    return SUCCESS
