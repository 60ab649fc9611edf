"""The commands of `tfopt data`: each function takes the words after its name and returns the exit code."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfopt.cli.data.options import ConvertOptions, ListOptions, MeasureOptions, ServeOptions
from tfopt.cli.exit_codes import SUCCESS, WRONG_USE
from tfopt.cli.own_code import look_beside, read_recipe
from tfopt.cli.parsing import arguments_of, parse_words, start_tensorflow
from tfopt.cli.printing import print_json, print_rows, say
from tfopt.errors import ConfigError, unknown_name

DATA_HELP = """\
usage: tfopt data COMMAND [OPTIONS]

  list                 list the data sources
  measure NAME         measure the input pipeline of a source or a recipe: each stage, and the wait of a training step
  convert SOURCE DIR   write the examples of a source as TFRecord files, which are read faster
  serve --workers N    prepare batches for trainings, in worker processes (tf.data service)

tfopt data COMMAND --help shows the options of a command.
"""
BATCH = 64
EMPTY = inspect.Parameter.empty
REQUIRED = "required"


def data_command(words: list[str]) -> int:
    """Runs `tfopt data ...`."""
    if not words or words[0] in ("-h", "--help"):
        say(DATA_HELP, end="")
        return SUCCESS if words else WRONG_USE
    if words[0] not in COMMANDS:
        raise unknown_name("command", f"data {words[0]}", [f"data {name}" for name in COMMANDS])
    return COMMANDS[words[0]](words[1:])


def list_command(words: list[str]) -> int:
    options = parse_words(ListOptions, words, "tfopt data list")
    from tfopt.data.sources import SOURCES

    if options.json:
        arguments = {name: arguments_of(source).items() for name, source in SOURCES.items()}
        print_json(
            {
                name: {key: REQUIRED if value is EMPTY else _plain(value) for key, value in items}
                for name, items in arguments.items()
            }
        )
        return SUCCESS
    rows: list[tuple[str, str]] = []
    for name, source in SOURCES.items():
        rows.append((name, (source.__doc__ or "").strip().splitlines()[0]))
        rows.append(("", ", ".join(_words(*argument) for argument in arguments_of(source).items())))
    print_rows(rows)
    return SUCCESS


def measure_command(words: list[str]) -> int:
    options = parse_words(MeasureOptions, words, "tfopt data measure")
    config, batch_size = _named(options.name, options.arguments)
    start_tensorflow()
    from tfopt.data import measure, pipeline

    config = replace(config, service=None)  # the stages are measured here, wherever they run in a training
    examples = config.load()
    host = config.augment.where != "device"
    batches = pipeline(
        examples,
        batch_size=options.batch_size or batch_size,
        augment=config.augmentation(examples) if host else None,
        **config.pipeline_arguments(),
    )
    report = measure(batches, step_time_ms=options.step_time_ms, seconds=options.seconds)
    say(report.to_json() if options.json else report)
    return SUCCESS


def convert_command(words: list[str]) -> int:
    options = parse_words(ConvertOptions, words, "tfopt data convert")
    from tfopt.data.config import DataConfig

    config = DataConfig(source=options.source, arguments=options.arguments)
    look_beside()
    start_tensorflow()
    from tfopt.data import convert

    report = convert(
        config.load(),
        options.directory,
        shards=options.shards,
        images=options.images,
        compression="GZIP" if options.gzip else "",
        overwrite=options.overwrite,
        progress=None if options.json or not sys.stderr.isatty() else _show_progress,
    )
    say(report.to_json() if options.json else report)
    return SUCCESS


def serve_command(words: list[str]) -> int:
    options = parse_words(ServeOptions, words, "tfopt data serve")
    start_tensorflow()
    from tfopt.data.service.serve import serve

    return serve(
        workers=options.workers,
        port=options.port,
        host=options.host,
        dispatcher=options.dispatcher,
        say=functools.partial(say, flush=True),
    )


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    "list": list_command,
    "measure": measure_command,
    "convert": convert_command,
    "serve": serve_command,
}


def _named(name: str, arguments: Mapping[str, Any]) -> tuple[Any, int]:
    """Returns the settings of the data, and the batch size, of a source or a recipe."""
    from tfopt.data.config import DataConfig
    from tfopt.data.sources import SOURCES
    from tfopt.recipes import RECIPES
    from tfopt.settings.calls import is_code

    look_beside()
    if name in SOURCES or is_code(name):
        return DataConfig(source=name, arguments=arguments), BATCH
    if name not in RECIPES and Path(name).suffix != ".toml":
        raise unknown_name("source or recipe", name, [*SOURCES, *RECIPES])
    if arguments:
        raise ConfigError(
            f"arguments belong to a source, and a recipe has its own. Received: {name!r} and "
            f"arguments={dict(arguments)}. Change them in the recipe."
        )
    recipe = read_recipe(name)
    return recipe.data, recipe.training.global_batch_size


def _words(name: str, default: Any) -> str:
    return f"{name} ({REQUIRED})" if default is EMPTY else f"{name}={default!r}"


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | list | tuple | dict | None) else repr(value)


def _show_progress(done: int, total: int) -> None:
    end = "\n" if done >= total else ""
    print(f"\r{done:,} of {total:,} records", end=end, file=sys.stderr, flush=True)  # noqa: T201
