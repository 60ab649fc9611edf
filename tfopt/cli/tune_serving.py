"""The command `tfopt tune DIR...`, which finds what a server should set for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from tfopt.atomic.directories import MARK
from tfopt.cli.exit_codes import CHECK_FAILED, SUCCESS, CheckError
from tfopt.cli.preparation import start_tensorflow
from tfopt.cli.printing import say
from tfopt.errors import ArtifactError, ConfigError
from tfopt.terminal import working

if TYPE_CHECKING:
    from tfopt.cli.tune import TuneOptions

ENDINGS = (".keras", ".onnx", ".tflite", ".xml", ".pb")
OF_SERVING = ("write", "trusted")
SHARED = (*OF_SERVING, "max_batch_size", "json")
LARGEST = 64  # examples in a call


def is_model(word: str) -> bool:
    """Whether a word names a model to serve, and no recipe or script.

    Example:
        >>> is_model("/"), is_model("digits_cnn"), is_model("train.py"), is_model("model.onnx")
        (True, False, False, True)
    """
    from tfopt.recipes import RECIPES

    path = Path(word)
    return path.suffix in ENDINGS or (path.is_dir() and word not in RECIPES)


def check_no_serving_options(options: TuneOptions) -> None:
    """Raises ConfigError if an option is given that belongs to models to serve."""
    _check_unset(options, OF_SERVING, "models to serve, as in tfopt tune DIR")


def tune_models(models: Sequence[str], options: TuneOptions) -> int:
    others = [each.name for each in fields(options) if each.name not in SHARED]
    _check_unset(options, others, "trainings, as in tfopt tune NAME")
    late = next((word for word in models if word.startswith("--")), None)
    if late is not None:
        raise ConfigError(f"The options must stand before the models. Received: {late} after {models[0]}. Move it.")
    start_tensorflow()
    from tfopt.exporting import tune_serving
    from tfopt.tuning.throughput import sizes_to_time

    try:
        with working(f"finding what servers should set for {', '.join(models)}") as now:
            report = tune_serving(
                models,
                batch_sizes=sizes_to_time(options.max_batch_size or LARGEST),
                write=options.write,
                trusted=options.trusted,
                on_step=now,
            )
    except ArtifactError as error:
        exist = all(Path(each).exists() for each in models)
        if exist and any(Path(each, MARK).is_file() for each in models):  # it was an artifact, and is damaged
            raise CheckError(error) from error
        raise
    say(report.to_json() if options.json else report)
    return SUCCESS if report.ok else CHECK_FAILED


def _check_unset(options: TuneOptions, names: Sequence[str], whose: str) -> None:
    defaults = {each.name: each.default for each in fields(options)}
    for name in names:
        value = getattr(options, name)
        if value != defaults[name]:
            raise ConfigError(
                f"{name} is for {whose}. Received: {name}={value!r} with other words. Leave it out, or name what it is "
                "for."
            )
