"""The command `tfopt tune`, which finds settings of a training by measurement: now the batch size."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from tfopt.cli.exit_codes import SUCCESS
from tfopt.cli.preparation import look_beside, read_recipe, start_tensorflow
from tfopt.cli.printing import say
from tfopt.cli.programs import split_at_script
from tfopt.errors import ConfigError
from tfopt.settings.flags import parse
from tfopt.terminal import working
from tfopt.tuning.config import BatchSizeConfig

if TYPE_CHECKING:
    from tfopt.tuning.report import BatchSizeReport


@dataclass(frozen=True, kw_only=True)
class TuneOptions(BatchSizeConfig):
    """Finds settings of a training by measurement on this machine, for a recipe or for an unmodified script.

    Write NAME, FILE.toml, SCRIPT.py [ARGS...] or -m MODULE [ARGS...] after the options. --only batch-size finds the
    largest batch that fits, each in a process of its own, and the smallest that is within 5% of the best speed.
    """

    only: Annotated[Literal["batch-size"] | None, arg(metavar="batch-size")] = None
    """What to tune."""
    directory: str | None = None
    """Directory for the trials, their logs and the report. By default, nothing is kept."""
    toml: bool = False
    """Print only the settings, as TOML that `tfopt run NAME FILE.toml` lays over a recipe."""
    json: bool = False
    """Print JSON."""


def tune_command(words: list[str]) -> int:
    own, asked = split_at_script(words, TuneOptions)
    options = parse(TuneOptions, own, "tfopt tune")
    if not asked:
        raise ConfigError(
            f"A recipe or a script must follow the options. Received: {' '.join(words)}. Write "
            "tfopt tune --only batch-size NAME."
        )
    if options.only is None:
        raise ConfigError("only must be given. Received: only=None. Write tfopt tune --only batch-size NAME.")
    report = _batch_size(asked, options)
    say(report.to_json() if options.json else report.to_toml() if options.toml else report)
    return SUCCESS


def _batch_size(asked: list[str], options: TuneOptions) -> BatchSizeReport:
    config = BatchSizeConfig(**{each.name: getattr(options, each.name) for each in fields(BatchSizeConfig)})
    target, *rest = asked
    if target == "-m" or target.endswith(".py"):
        start_tensorflow()
        from tfopt.tuning.find_batch_size import find_script_batch_size

        with working(f"finding the batch size of {target}") as now:
            return find_script_batch_size(target, rest, config, directory=options.directory, on_step=now)
    if rest:
        raise ConfigError(f"A recipe takes no further words. Received: {' '.join(rest)}. Put the options before it.")
    recipe = read_recipe(target)
    start_tensorflow()
    look_beside()
    from tfopt.tuning.find_batch_size import find_batch_size

    with working(f"finding the batch size of {recipe.name}") as now:
        return find_batch_size(recipe, config=config, directory=options.directory, on_step=now)
