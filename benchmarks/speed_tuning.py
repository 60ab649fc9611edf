"""What `tfopt.tune` gains: the tuned settings over the start, measured once more after the search.

    python benchmarks/speed_tuning.py [--only digits_cnn sequential ...] [--minutes 5] [--keras]

Each recipe is searched from its own settings. With --keras, the recipe's model as Keras compiles it by default is
searched instead, so that the ratio is that over Keras' own training step, on the same input pipeline. The scripts are
some of tests/scripts/examples, which know nothing of tfopt: each starts as it is, under plain Keras. Then the found
settings train in turns with those of the start, in new processes with TURNS turns: that ratio is the result, and not
the one that chose the settings. The losses are those of the two sides after the same steps.

Results go to benchmarks/results/speed_tuning.json. Each takes a minute or two longer than its search.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

if TYPE_CHECKING:
    from tfopt import TuneReport
    from tfopt.tuning.sides import Sides

RESULTS = Path(__file__).parent / "results" / "speed_tuning.json"
RECIPES = ("mlp", "digits_cnn", "lstm", "text_encoder", "resnet_cifar")
SCRIPTS = ("sequential", "functional", "with_arguments")
EXAMPLES = Path(__file__).parents[1] / "tests" / "scripts" / "examples"
TURNS, LIMIT_S = 24, 600.0


@dataclass(frozen=True, kw_only=True)
class Options:
    only: tuple[str, ...] = RECIPES + SCRIPTS
    """Recipes and scripts to tune. The results of the others stay."""
    minutes: float = 5.0
    """Minutes of each search."""
    keras: bool = False
    """Whether to begin with Keras' own training step, and not with the recipe."""


def main(options: Options) -> None:
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            found = tuned(name, options, Path(folder))
        print(name, json.dumps(found), flush=True)
        write("scripts" if name in SCRIPTS else "keras" if options.keras else "recipes", name, found)


def tuned(name: str, options: Options, folder: Path) -> dict[str, Any]:
    from tfopt import TuneConfig
    from tfopt.tuning.search import tune_script
    from tfopt.tuning.sides import Sides
    from tfopt.tuning.workload import of_script

    if name not in SCRIPTS:
        return tuned_recipe(name, options, folder)
    script, words = str(EXAMPLES / f"{name}.py"), [str(folder / "weights.npz")]
    before = peak_kb()
    report = tune_script(script, words, TuneConfig(minutes=options.minutes), directory=folder / "search")
    grown = peak_kb() - before
    sides = Sides(of_script(script, words, folder / "again"), TuneConfig(), folder / "again")
    return compared(report, sides, report.changes, grown)


def tuned_recipe(name: str, options: Options, folder: Path) -> dict[str, Any]:
    import tfopt
    from tfopt.tasks import TASKS
    from tfopt.tuning.sides import Sides
    from tfopt.tuning.workload import workload_of

    what, data = tfopt.recipes.find_recipe(name), None
    if options.keras:
        data = what.data.load()
        model = what.model.build(data.input_shape, data.outputs)
        model.compile("adam", TASKS[what.task].loss(data))
        what = model
    before = peak_kb()
    report = tfopt.tune(what, data, tfopt.TuneConfig(minutes=options.minutes), directory=folder / "search")
    grown = peak_kb() - before
    step = {name: each for name, each in report.changes.items() if name == "step"}
    sides = Sides(workload_of(what, data, folder / "again"), tfopt.TuneConfig(), folder / "again")
    return compared(report, sides, {**report.settings, **step}, grown)


def peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def compared(report: TuneReport, sides: Sides, settings: Mapping[str, Any], grown: int) -> dict[str, Any]:
    again = sides.compare("again", {}, settings, LIMIT_S, turns=TURNS)
    assert again.speedup is not None, again.reason
    return {
        "changes": report.changes,
        "trials": len(report.trials),
        "ended_by": report.ended_by,
        "seconds": round(report.seconds, 1),
        "ratio": {each: round(value, 3) for each, value in vars(again.speedup).items()},
        "losses": again.losses,
        "memory_grown_mb": round(grown / 1024, 1),
    }


def write(part: str, name: str, found: dict[str, Any]) -> None:
    import tensorflow as tf

    from tfopt.atomic.files import write_text
    from tfopt.hardware import detect

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    machine = detect()
    results["tensorflow"] = tf.__version__
    results["device"] = f"{machine.processor}, {machine.logical_cores} logical cores, {platform.system()}"
    cases = {**results.get(part, {}).get("cases", {}), name: found}
    results[part] = {
        "median": statistics.median(each["ratio"]["median"] for each in cases.values()),
        "worst": min(each["ratio"]["median"] for each in cases.values()),
        "cases": cases,
    }
    write_text(RESULTS, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
