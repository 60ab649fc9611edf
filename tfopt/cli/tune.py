"""The command `tfopt tune`, which finds settings of a training by measurement: for its speed, or its batch size.

tune_serving.py has what it does with models to serve.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt
from tyro.conf import arg

from tfopt.cli.exit_codes import SUCCESS
from tfopt.cli.preparation import look_beside, read_recipe, start_tensorflow
from tfopt.cli.printing import say
from tfopt.cli.programs import split_at_script
from tfopt.cli.tune_serving import check_no_serving_options, is_model, tune_models
from tfopt.errors import ConfigError
from tfopt.settings.flags import parse
from tfopt.terminal import working
from tfopt.tuning.config import BatchSizeConfig, TuneConfig

if TYPE_CHECKING:
    from tfopt.recipe import Recipe
    from tfopt.tuning.report import BatchSizeReport
    from tfopt.tuning.tune_report import TuneReport

OF_SPEED = {each.name for each in fields(TuneConfig)}


@dataclass(frozen=True, kw_only=True)
class TuneOptions(BatchSizeConfig):
    """Finds settings of a training by measurement on this machine, for a recipe or an unmodified script.

    Write NAME, FILE.toml, SCRIPT.py [ARGS...] or -m MODULE [ARGS...] after the options. Without --only, it finds faster
    settings: each trial trains in a process of its own, in turns with the start. For a script, they are the flags of
    tfopt accelerate. --only batch-size finds the largest batch that fits, each in a process of its own, and the
    smallest that is within 5% of the best speed.
    """

    only: Annotated[Literal["batch-size"] | None, arg(metavar="batch-size")] = None
    """What to tune. By default, the speed settings."""
    max_trials: Annotated[int, Ge(1)] | None = None  # type: ignore[assignment]  # the two searches differ in it
    """Largest number of trials. By default 12 of batches, which is the most, and of speed settings as time allows."""
    minutes: Annotated[float, Gt(0)] = 10.0
    """Minutes of the search for speed settings."""
    other_batches: bool = False
    """Whether the search for speed settings may try larger batches, which change the training."""
    loss_tolerance: Annotated[float, Gt(0)] = 0.05
    """How far a trial's loss may be above that of the start after the same few steps, as a share."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the proposals of the search for speed settings."""
    directory: str | None = None
    """Directory for the trials, their logs and the report; with it, a stopped search for speed settings goes on. By
    default, nothing is kept."""
    write: bool = True
    """With DIR... in place of NAME, which are artifacts, SavedModels or files such as model.onnx, it finds what servers
    should set for them: the batch size (of 1, 2, 4, up to --max-batch-size, or 64), the calls at the same time and the
    threads, and of several models the fastest. Write that into the manifests of artifacts."""
    trusted: bool = False
    """Run models to serve that touch files or the network. Without it, these are refused."""
    toml: bool = False
    """Print only the settings, as TOML that `tfopt run NAME FILE.toml` lays over a recipe."""
    json: bool = False
    """Print JSON."""


def tune_command(words: list[str]) -> int:
    own, asked = split_at_script(words, TuneOptions)
    options = parse(TuneOptions, own, "tfopt tune")
    if asked and not _is_script(asked[0]) and any(map(is_model, asked)):
        return tune_models(asked, options)
    check_no_serving_options(options)
    if not asked:
        raise ConfigError(
            f"A recipe or a script must follow the options. Received: {' '.join(words)}. Write tfopt tune NAME."
        )
    report = _settings(asked, options) if options.only is None else _batch_size(asked, options)
    say(report.to_json() if options.json else report.to_toml() if options.toml else report)
    return SUCCESS


def _settings(asked: list[str], options: TuneOptions) -> TuneReport:
    for each in fields(BatchSizeConfig):
        if each.name not in OF_SPEED and getattr(options, each.name) != each.default:
            raise ConfigError(
                f"{each.name} must be given with --only batch-size. Received: {each.name}="
                f"{getattr(options, each.name)!r}. Add it, or leave {each.name} out."
            )
    config = TuneConfig(**{name: getattr(options, name) for name in OF_SPEED})
    target, *rest = asked
    if _is_script(target):
        if options.toml:
            raise ConfigError(
                "--toml must be left out with a script, whose settings are flags of tfopt accelerate. Received: "
                f"{target}. The report has the command, as --json has."
            )
        start_tensorflow()
        from tfopt.tuning.search import tune_script

        with working(f"finding faster settings of {target}") as now:
            return tune_script(target, rest, config, directory=options.directory, on_step=now)
    recipe = _recipe(target, rest)
    from tfopt.tuning.search import tune

    with working(f"finding faster settings of {recipe.name}") as now:
        return tune(recipe, config=config, directory=options.directory, on_step=now)


def _batch_size(asked: list[str], options: TuneOptions) -> BatchSizeReport:
    given = {each.name: getattr(options, each.name) for each in fields(BatchSizeConfig)}
    config = BatchSizeConfig(**{name: value for name, value in given.items() if (name, value) != ("max_trials", None)})
    target, *rest = asked
    if _is_script(target):
        start_tensorflow()
        from tfopt.tuning.find_batch_size import find_script_batch_size

        with working(f"finding the batch size of {target}") as now:
            return find_script_batch_size(target, rest, config, directory=options.directory, on_step=now)
    recipe = _recipe(target, rest)
    from tfopt.tuning.find_batch_size import find_batch_size

    with working(f"finding the batch size of {recipe.name}") as now:
        return find_batch_size(recipe, config=config, directory=options.directory, on_step=now)


def _is_script(target: str) -> bool:
    return target == "-m" or target.endswith(".py")


def _recipe(target: str, rest: list[str]) -> Recipe:
    if rest:
        raise ConfigError(f"A recipe takes no further words. Received: {' '.join(rest)}. Put the options before it.")
    recipe = read_recipe(target)
    start_tensorflow()
    look_beside()
    return recipe
