"""The command `tfopt bench`, which measures models side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tfopt.atomic.own_files import check_replaceable
from tfopt.cli.exit_codes import CHECK_FAILED, SUCCESS
from tfopt.cli.preparation import start_tensorflow
from tfopt.cli.printing import say
from tfopt.errors import ConfigError
from tfopt.settings.flags import parse
from tfopt.terminal import working


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Measures models side by side in fresh processes, and names the fastest and the smallest on this machine.

    A model that cannot be measured is listed with the reason, the others go on, and the exit code is 1.
    """

    models: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="DIR|FILE")]
    """Artifacts of any format, SavedModels, and files such as model.onnx or model.keras. A .keras file is exported with
    Keras' own export, and that SavedModel is measured."""
    batch_sizes: tuple[int, ...] = (1,)
    """Numbers of examples in each timed call, for example 1 8."""
    threads: tuple[int, ...] = (0,)
    """Numbers of intra-op threads, for example 0 1. 0 is the default of each runtime, in LiteRT one for each core."""
    inputs: str | None = None
    """Examples for the timed calls: a .npy file for models with one input, or a .npz file with an array for each input.
    By default they are drawn, for an artifact as its manifest says."""
    open_size: int | None = None
    """Size of every axis that a model leaves open, besides the batch. By default that of an artifact's manifest, and 64
    for other models."""
    data: str | None = None
    """Labelled examples for the score, as in tfopt verify."""
    task: str | None = None
    """Task whose score is computed on the examples, as in tfopt verify."""
    metric: str | None = None
    """Score to compute on the examples, instead of the task's, as in tfopt verify."""
    baseline: str | None = None
    """The one of the models whose score the others are compared with. By default the first artifact with float weights
    or .keras file, or the first model if there is neither."""
    gate: str | None = None
    """Least share of the baseline's score that a model must have to be named, for example 99% or 99.9%."""
    seconds: float = 0.15
    """How long each model is timed in one of nine rounds, or of 27 if nine leave undecided which is the fastest."""
    trusted: bool = False
    """Run models that touch files or the network, and .keras files with code. Without it, these are refused."""
    html: str | None = None
    """Write a page with plots to this file."""
    json: bool = False
    """Print JSON."""


def bench_command(words: list[str]) -> int:
    options = parse(BenchOptions, words, "tfopt bench")
    gate = None if options.gate is None else share_in(options.gate)
    page = None if options.html is None else _page(options.html)
    start_tensorflow()
    from tfopt.cli.example_data import ExampleData, find_example_data, read_arrays
    from tfopt.exporting import benchmark

    given = ExampleData() if options.data is None else find_example_data(options.data)
    metric = given.metric(options.metric, options.task)
    with working(f"measuring {len(options.models)} models in fresh processes") as now:
        report = benchmark(
            options.models,
            batch_sizes=options.batch_sizes,
            threads=options.threads,
            inputs=None if options.inputs is None else read_arrays(options.inputs),
            open_size=options.open_size,
            data=given.part("test"),
            metric=metric,
            baseline=options.baseline,
            gate=gate,
            seconds=options.seconds,
            trusted=options.trusted,
            on_step=now,
        )
    say(report.to_json() if options.json else report)
    if page is not None:
        from tfopt.reporting.benchmark_page import write_benchmark_html

        write_benchmark_html(report, page)
        say(f"page: {page}", error=options.json)
    return SUCCESS if report.ok else CHECK_FAILED


def share_in(text: str) -> float:
    """Returns a share that is written in per cent or as a number.

    Example:
        >>> share_in("99.9%"), share_in("0.99")
        (0.999, 0.99)
    """
    try:
        number = float(text.removesuffix("%"))
    except ValueError as error:
        raise ConfigError(
            f"gate must be a share of the baseline's score. Received: gate={text!r}. Write for example 99%."
        ) from error
    if number > 1 and not text.endswith("%"):
        raise ConfigError(
            f"gate must be a share of the baseline's score. Received: gate={text!r}. Write {text}%, or a number up to "
            "1."
        )
    return round(number / 100, 9) if text.endswith("%") else number


def _page(file: str) -> Path:
    """Returns the path of the page. Raises ConfigError if it cannot be written there."""
    from tfopt.reporting.saved_report import is_page

    path = Path(file)
    if not path.parent.is_dir():
        raise ConfigError(f"html must lie in an existing directory. Received: html={file!r}. Make {path.parent}.")
    check_replaceable(path, is_page)
    return path
