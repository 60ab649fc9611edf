"""The commands of `tfopt data`: list, measure, convert and serve."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Gt, Le

from tfopt.cli.exit_codes import SUCCESS, WRONG_USE
from tfopt.cli.preparation import arguments_of, look_beside, read_recipe, start_tensorflow
from tfopt.cli.printing import print_json, print_rows, say
from tfopt.errors import ConfigError, unknown_name
from tfopt.settings.flags import Arguments, parse
from tfopt.settings.validation import check_fields

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


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Lists the data sources, each with what it loads and with its arguments and their defaults."""

    json: bool = False
    """Print JSON: every source with its arguments and their defaults."""


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Measures the input pipeline of NAME: the speed of each stage, and how long a training step waits.

    NAME is a data source, a recipe or a .toml file of a recipe.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """Name of a data source or a recipe, a .toml file, or package.module:function of a source of your own."""
    arguments: Arguments = field(default_factory=dict)
    """Arguments of the source, for example image_size=32."""
    batch_size: Annotated[int, Ge(1)] | None = None
    """Examples per batch. By default that of the recipe, or 64."""
    step_time_ms: Annotated[float, Gt(0)] | None = None
    """Time of a training step, in milliseconds. `tfopt run` reports it."""
    seconds: Annotated[float, Gt(0)] = 10.0
    """About how long to measure."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Writes the examples of SOURCE as TFRecord files to DIR. The source `tfrecord` reads them.

    If the command is stopped, the same command goes on after the last finished file.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Name of a data source, or package.module:function of your own."""
    directory: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """Directory of the files."""
    arguments: Arguments = field(default_factory=dict)
    """Arguments of the source, for example directory=photos."""
    shards: Literal["auto"] | Annotated[int, Ge(1)] = "auto"
    """Number of files for each part. auto makes files of about 128 MiB."""
    images: Literal["files", "jpeg", "pixels"] = "files"
    """Form of images: files keeps their content; jpeg is a resized JPEG, which decodes faster; pixels is resized and
    not encoded, which is fastest and takes most room."""
    gzip: bool = False
    """Compress the files. Reading them then takes longer."""
    overwrite: bool = False
    """Remove the files of an earlier command first, also those of other examples."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Serves batches to trainings: a tf.data service with a dispatcher and worker processes.

    It serves until SIGTERM or Ctrl-C. Everyone who reaches its ports can run TensorFlow operations here. By default
    only this machine does; with --host, keep the ports inside a trusted network.
    """

    workers: Annotated[int, Ge(1)]
    """Number of worker processes."""
    port: Annotated[int, Ge(1), Le(65535)] = 5050
    """Port of the dispatcher. The workers have the next ports."""
    host: str = "localhost"
    """Name of this host for trainings and workers on other hosts. The ports are then open to its networks; with an
    address, to that of the address only."""
    dispatcher: str | None = None
    """Address of a dispatcher on another host, for example grpc://data-0:5050. The workers then join it, and their
    ports begin with --port."""

    def __post_init__(self) -> None:
        check_fields(self)


def data_command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        say(DATA_HELP, end="")
        return SUCCESS if words else WRONG_USE
    if words[0] not in COMMANDS:
        raise unknown_name("command", f"data {words[0]}", [f"data {name}" for name in COMMANDS])
    return COMMANDS[words[0]](words[1:])


def list_command(words: list[str]) -> int:
    options = parse(ListOptions, words, "tfopt data list")
    from tfopt.data.sources import SOURCES

    if options.json:
        arguments = {name: arguments_of(source).items() for name, source in SOURCES.items()}
        print_json(
            {
                name: {key: REQUIRED if value is EMPTY else value for key, value in items}
                for name, items in arguments.items()
            }
        )
        return SUCCESS
    rows: list[tuple[str, str]] = []
    for name, source in SOURCES.items():
        words = [
            f"{key} ({REQUIRED})" if default is EMPTY else f"{key}={default!r}"
            for key, default in arguments_of(source).items()
        ]
        rows += [(name, (source.__doc__ or "").strip().splitlines()[0]), ("", ", ".join(words))]
    print_rows(rows)
    return SUCCESS


def measure_command(words: list[str]) -> int:
    options = parse(MeasureOptions, words, "tfopt data measure")
    config, training = _named(options.name, options.arguments)
    start_tensorflow()
    from tfopt.data import measure, pipeline
    from tfopt.data.config import cuts_boxes, pipeline_settings
    from tfopt.hardware import detect
    from tfopt.training.choices import choose_augmentation_place

    config = replace(config, service=None)  # the stages are measured here, wherever they run in a training
    examples = config.load()
    in_stages, cutting = training.strategy == "pipeline", cuts_boxes(config, examples)
    place, _ = choose_augmentation_place(config.augment.where, detect(), in_stages=in_stages, cuts_boxes=cutting)
    batches = pipeline(
        examples,
        batch_size=options.batch_size or training.global_batch_size,
        augment=config.augmentation(examples) if place == "host" else None,
        **pipeline_settings(config),
    )
    report = measure(batches, step_time_ms=options.step_time_ms, seconds=options.seconds)
    say(report.to_json() if options.json else report)
    return SUCCESS


def convert_command(words: list[str]) -> int:
    options = parse(ConvertOptions, words, "tfopt data convert")
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
    options = parse(ServeOptions, words, "tfopt data serve")
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


def _named(name: str, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the settings of the data, and of the training, of a source or a recipe."""
    from tfopt.data.config import DataConfig
    from tfopt.data.sources import SOURCES
    from tfopt.recipes import RECIPES
    from tfopt.settings.calls import is_code
    from tfopt.training.config import TrainingConfig

    look_beside()
    if name in SOURCES or is_code(name):
        return DataConfig(source=name, arguments=arguments), TrainingConfig(global_batch_size=BATCH)
    if name not in RECIPES and Path(name).suffix != ".toml":
        raise unknown_name("source or recipe", name, [*SOURCES, *RECIPES])
    if arguments:
        raise ConfigError(
            f"arguments belong to a source, and a recipe has its own. Received: {name!r} and "
            f"arguments={dict(arguments)}. Change them in the recipe."
        )
    recipe = read_recipe(name)
    return recipe.data, recipe.training


def _show_progress(done: int, total: int) -> None:
    end = "\n" if done >= total else ""
    print(f"\r{done:,} of {total:,} records", end=end, file=sys.stderr, flush=True)  # noqa: T201
