"""The commands `tfopt run` and `tfopt init`."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from tfopt.atomic.files import write_text, writing_to
from tfopt.cli.exit_codes import CHECK_FAILED, SUCCESS, WRONG_USE
from tfopt.cli.preparation import look_beside, read_recipe, start_tensorflow
from tfopt.cli.printing import ProgressConsole, print_json, print_rows, say
from tfopt.errors import ConfigError
from tfopt.settings.flags import expand, parse, stages

# The name of each file in a project, and of its text in the folder new_project.
FILES = {"train.py": "train.py.txt", "recipe.toml": "recipe.toml"}
RUN_HELP = """\
usage: tfopt run NAME|FILE.toml... [--quick | --full | --form FORM] [--json] [OPTIONS]

  NAME          a recipe; `tfopt recipes` lists them
  FILE.toml     a recipe of your own
  NAME FILE...  the first recipe with the settings of the others laid over it
  --quick       a short trial run; without a form "quick" it takes few epochs on few examples
  --full        the form "full" of the recipe, on its usual data set
  --form FORM   another form of the recipe
  --json        print the report as JSON on standard output, and the progress on standard error
  --traceback   with an error, show where in the program it occurred
  --no-pruning, --no-quantization   leave a stage out

tfopt run NAME --help lists every setting of the recipe with its value. The last part of a flag is enough, for example
--target-sparsity for --pruning.target-sparsity.
"""


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Writes the start of a project of your own to DIR: train.py with a model and examples, and recipe.toml with the
    settings. Both run as they are.
    """

    directory: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """Directory of the project. It must not have these files yet."""
    json: bool = False
    """Print JSON: the paths of the files."""


def run_command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        say(RUN_HELP, end="")
        return SUCCESS if words else WRONG_USE
    as_json = "--json" in words
    form, words = _asked_form([word for word in words if word != "--json"])
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    rest = words[len(names) :]
    if not names:
        raise ConfigError(f"The recipe must come first. Received: {' '.join(words)}. Write tfopt run NAME [OPTIONS].")
    from tfopt.recipe import Recipe

    recipe, rest = _switch_stages(read_recipe(*names, form=form), rest)
    recipe = parse(Recipe, rest, f"tfopt run {' '.join(names)}", recipe)
    start_tensorflow()
    look_beside()  # a flag may name code too
    from tfopt.runner import run

    result = run(recipe, console=ProgressConsole(stderr=as_json))
    if as_json:
        say(result.report.to_json())
    return SUCCESS if result.ok else CHECK_FAILED


def init_command(words: list[str]) -> int:
    options = parse(InitOptions, words, "tfopt init")
    script, recipe = write_project(options.directory)
    if options.json:
        print_json([str(script), str(recipe)])
        return SUCCESS
    print_rows([(str(script), "a model and examples"), (str(recipe), "the settings")])
    say(f"\nRun it: python {shlex.quote(str(script))}")
    say(f"or:     tfopt run {shlex.quote(str(recipe))} --allow-code")
    return SUCCESS


def write_project(directory: str | Path) -> list[Path]:
    """Writes a script, train.py, and its settings, recipe.toml, and returns their paths. Both run as they are.

    The directory is made if it is missing.

    Raises:
        ConfigError: The directory has a file of that name, or is no directory. Nothing is written then.
        ExportError: The directory cannot be written. Nothing is left then.
    Example:
        >>> import tempfile
        >>> [path.name for path in write_project(tempfile.mkdtemp())]
        ['train.py', 'recipe.toml']
    """
    if not str(directory).strip():
        raise ConfigError(f"directory must be a path. Received: {str(directory)!r}. '.' is the working directory.")
    folder = Path(directory)
    with writing_to(folder), contextlib.ExitStack() as undo:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"directory must be a directory. Received: {folder}, which is a file. Name another one.")
        found = [name for name in FILES if os.path.lexists(folder / name)]
        if found:
            raise ConfigError(
                f"The directory of a new project must not have its files yet. Received: {folder} with "
                f"{', '.join(found)}. Name another directory."
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in FILES.items():
            new = Path(__file__).with_name("new_project").joinpath(text)
            undo.callback((folder / name).unlink, missing_ok=True)  # half a project is in the way of another attempt
            write_text(folder / name, new.read_text(encoding="utf-8"))
        undo.pop_all()
    return [folder / name for name in FILES]


def _asked_form(words: list[str]) -> tuple[str | None, list[str]]:
    """Returns the form that the words ask for, and the other words."""
    asked, others = [], []
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if word in ("--quick", "--full"):
            asked.append(word.removeprefix("--"))
        elif flag == "--form":
            asked.append(value if equals else next(rest, ""))
        else:
            others.append(word)
    if len(asked) > 1:
        raise ConfigError(f"A run has one form at most. Received: {', '.join(asked)}. Give one of them.")
    return (asked[0] if asked else None), others


def _switch_stages(recipe: Any, words: list[str]) -> tuple[Any, list[str]]:
    """Turns off each stage named by --no-STAGE."""
    from tfopt.recipe import with_changes

    known = stages(type(recipe))
    off = {name for name in known if f"--no-{name}" in words}
    words = [word for word in words if word not in {f"--no-{name}" for name in off}]
    for name in off:
        if given := [word for word in expand(type(recipe), words) if word.startswith(f"--{name}.")]:
            raise ConfigError(f"A stage that is left out has no settings. Received: --no-{name} with {given[0]}.")
    return with_changes(recipe, dict.fromkeys(off)), words
