"""The options of `tfopt data`; the sentence below a field is its help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Gt, Le

from tfopt.settings.flags import Arguments
from tfopt.settings.validation import check_fields


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


DATA_OPTIONS: Mapping[str, Any] = {
    "list": ListOptions,
    "measure": MeasureOptions,
    "convert": ConvertOptions,
    "serve": ServeOptions,
}
