"""The commands of `tfopt`: each function takes the words after the name of its command and returns the exit code."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfopt.cli.data.commands import data_command
from tfopt.cli.exit_codes import CHECK_FAILED, SUCCESS, WRONG_USE, CheckError
from tfopt.cli.init_command import init_command
from tfopt.cli.lists.advice import print_advice
from tfopt.cli.lists.model_commands import models_command
from tfopt.cli.lists.recipe_commands import recipes_command
from tfopt.cli.options import DevicesOptions, VerifyOptions
from tfopt.cli.own_code import look_beside, read_recipe
from tfopt.cli.parsing import parse_words, start_tensorflow
from tfopt.cli.printing import ProgressConsole, print_json, say
from tfopt.cli.programs.doctor import doctor_command
from tfopt.cli.programs.monitor import monitor_any_command
from tfopt.cli.programs.scripts import accelerate_command, launch_command
from tfopt.cli.report_command import report_command
from tfopt.errors import ArtifactError, ConfigError
from tfopt.terminal import working

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

    recipe = read_recipe(*names)
    if form is not None:
        recipe = recipe.quick() if form == "quick" else recipe.form(form)
    recipe, rest = _switch_stages(recipe, rest)
    recipe = parse_words(Recipe, rest, f"tfopt run {' '.join(names)}", recipe)
    start_tensorflow()
    look_beside()  # a flag may name code too
    from tfopt.runner import run

    result = run(recipe, console=ProgressConsole(stderr=as_json))
    if as_json:
        say(result.report.to_json())
    return SUCCESS if result.ok else CHECK_FAILED


def devices_command(words: list[str]) -> int:
    options = parse_words(DevicesOptions, words, "tfopt devices")
    start_tensorflow()
    if options.advise is not None:
        print_advice(options)
        return SUCCESS
    from tfopt.hardware import detect

    hardware = detect()
    say(hardware.to_json() if options.json else hardware)
    return SUCCESS


def export_command(words: list[str]) -> int:
    from tfopt.exporting.options import ExportOptions

    options = parse_words(ExportOptions, words, "tfopt export")
    start_tensorflow()
    from tfopt.atomic.directories import MARK
    from tfopt.cli.data.example_data import find_example_data
    from tfopt.exporting import export

    data = None if options.calibration_data is None else find_example_data(options.calibration_data).part("train")
    labelled = None if options.evaluation_data is None else find_example_data(options.evaluation_data).part("test")
    baseline = options.baseline
    in_place = Path(options.source).resolve() == Path(options.out).resolve()
    if baseline is None and options.precision != "float32" and Path(options.source, MARK).is_file() and not in_place:
        baseline = options.source
    with working(f"exporting {options.source} as {options.precision}"):
        artifact = export(
            options.source, options.out, options, calibration_data=data, evaluation_data=labelled, baseline=baseline
        )
    if options.json:
        print_json(artifact.to_dict())
        return SUCCESS
    if artifact.report is not None:
        say(artifact.report)
    say(f"exported {artifact.path}, {artifact.precision}, {artifact.bytes_on_disk:,} bytes")
    return SUCCESS


def verify_command(words: list[str]) -> int:
    options = parse_words(VerifyOptions, words, "tfopt verify")
    start_tensorflow()
    from tfopt.cli.data.example_data import ExampleData, find_example_data
    from tfopt.exporting import verify
    from tfopt.exporting.manifest import check_is_artifact

    check_is_artifact(Path(options.artifact))  # a directory that is no artifact is wrong use, not a failed check
    given = ExampleData() if options.data is None else find_example_data(options.data)
    metric = given.metric(options.metric, options.task)
    try:
        with working(f"measuring {options.artifact} in a fresh process") as now:
            receipt = verify(
                options.artifact,
                baseline=options.baseline,
                data=given.part("test"),
                metric=metric,
                batch_size=options.batch_size,
                signature=options.signature,
                trusted=options.trusted,
                on_step=now,
            )
    except ArtifactError as error:
        raise CheckError(error) from error
    say(receipt.to_json() if options.json else receipt)
    return SUCCESS if receipt.ok else CHECK_FAILED


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": run_command,
    "recipes": recipes_command,
    "init": init_command,
    "models": models_command,
    "devices": devices_command,
    "export": export_command,
    "verify": verify_command,
    "report": report_command,
    "launch": launch_command,
    "doctor": doctor_command,
    "monitor": monitor_any_command,
    "accelerate": accelerate_command,
    "data": data_command,
}


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
    """Turns off each stage named by --no-STAGE, and turns on each stage that is off and has a flag in the words."""
    from tfopt.settings.flags import expand, stages

    known = stages(type(recipe))
    off = {name for name in known if f"--no-{name}" in words}
    words = [word for word in words if word not in {f"--no-{name}" for name in off}]
    recipe = replace(recipe, **dict.fromkeys(off))
    for name, config in known.items():
        if (
            name not in off
            and getattr(recipe, name) is None
            and any(word.startswith(f"--{name}.") for word in expand(type(recipe), words))
        ):
            recipe = replace(recipe, **{name: config()})
    return recipe, words
