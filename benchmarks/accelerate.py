"""The step time of five unmodified scripts under `tfopt accelerate`, over that without.

    python benchmarks/accelerate.py

The scripts are those of tests/scripts/examples. Each run is a fresh process; plain and accelerated runs alternate, and
so does the side that begins. A run times every epoch of every fit but the first, which traces and compiles, with all
work between the steps; of the script with a loop of its own, the whole script. The fastest epoch of a run counts, as in
timeit: other programs on the machine only make epochs longer. Each round gives one ratio of two neighbouring runs. The
result is the median of the ratios, with the interval that holds the true median with 95% probability whatever the
distribution (order statistics), or the range of few rounds. The processor time of all threads is compared in the same
way. So are the first epochs. Results go to benchmarks/results/accelerate.json. The run takes a quarter of an hour on
two cores.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tyro

RESULTS = Path(__file__).parent / "results"
EXAMPLES = Path(__file__).parents[1] / "tests" / "scripts" / "examples"
SCRIPTS = ("sequential", "functional", "with_arguments", "own_train_step", "custom_loop")
ENDS = {"custom_loop": 3}  # exit codes
SIDES = ("plain", "accelerated")


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = 9
    """Number of timed runs of each side."""
    epochs: int = 25
    """Epochs of each fit."""
    only: tuple[str, ...] = SCRIPTS
    """Scripts."""
    quick: bool = False
    """Run one round of two epochs as a test, not as a measurement."""
    out: Path = RESULTS / "accelerate.json"
    """Path of the results file."""
    side: str | None = None
    """Used by the benchmark itself: run one script on this side, and print its times."""


def main(options: Options) -> dict[str, Any]:
    if options.quick:
        options = Options(rounds=1, epochs=3, only=options.only, out=options.out)
    from tfopt.atomic.files import write_text
    from tfopt.hardware import detect

    results = {
        "what": "time of the fastest epoch after the first under tfopt accelerate over that of the plain script; fresh "
        f"processes in turns, medians over {options.rounds} rounds with the 95% interval of the median",
        "hardware": detect().to_dict(),
        "load": os.getloadavg()[0],
        "scripts": [compared(name, options) for name in options.only],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(options.out, json.dumps(results, indent=1) + "\n")
    return results


def compared(name: str, options: Options) -> dict[str, Any]:
    from tfopt.timing import estimate, in_turns

    runs = in_turns([partial(fresh_process, name, side, options.epochs) for side in SIDES], options.rounds)
    result: dict[str, Any] = {"script": name}
    for what in ("step", "processor", "start"):
        times = [[run[f"{what}_ms"] for run in each] for each in runs]
        ratio = estimate([accelerated / plain for plain, accelerated in zip(*times, strict=True)])
        result[f"{what}_ratio"] = round(ratio.median, 3)
        result[f"{what}_ratio_interval"] = [round(ratio.least, 3), round(ratio.most, 3)]
        for side, values in zip(SIDES, times, strict=True):
            result[f"{what}_ms_{side}"] = round(median(values), 4)
    print(result, file=sys.stderr, flush=True)
    return result


def fresh_process(name: str, side: str, epochs: int) -> dict[str, Any]:
    words = [sys.executable, __file__, "--side", side, "--only", name, "--epochs", str(epochs)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    times: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return times


def timed(name: str, side: str, epochs: int) -> dict[str, float]:
    """Runs a script here. Returns the milliseconds of a step, and of the epochs that begin a fit."""
    import keras

    from tfopt.scripts import run_script
    from tfopt.scripts.accelerate import AccelerateHook

    class Plain:
        def compile(self, model: Any, original: Any, args: Any, kwargs: Any) -> None:
            original(*args, **kwargs)

        def fit(self, model: Any, original: Any, args: Any, kwargs: Any) -> Any:
            return original(*args, **kwargs)

    hook = Plain() if side == "plain" else AccelerateHook()
    first: list[float] = []
    later: list[float] = []
    busy: list[float] = []

    class Epochs(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.is_first, self.begin, self.processor = True, time.perf_counter(), time.process_time()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            now, processor = time.perf_counter(), time.process_time()
            steps = self.params["steps"] or 1
            if self.is_first:
                first.append(now - self.begin)
            else:
                later.append((now - self.begin) / steps)
                busy.append((processor - self.processor) / steps)
            self.is_first, self.begin, self.processor = False, now, processor

    class Timed:
        def compile(self, model: Any, original: Any, args: Any, kwargs: Any) -> None:
            hook.compile(model, original, args, kwargs)

        def fit(self, model: Any, original: Any, args: Any, kwargs: Any) -> Any:
            call = inspect.signature(original).bind(*args, **kwargs)
            call.arguments["callbacks"] = [*(call.arguments.get("callbacks") or []), Epochs()]
            return hook.fit(model, original, call.args, call.kwargs)

    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        begin, processor = time.perf_counter(), time.process_time()
        code = run_script(str(EXAMPLES / f"{name}.py"), [str(Path(directory, "weights.npz")), str(epochs)], Timed())
        whole, whole_busy = time.perf_counter() - begin, time.process_time() - processor
    if code != ENDS.get(name, 0):
        raise SystemExit(f"{name} ended with exit code {code}")
    if not later:  # a loop of its own
        per_epoch = 1e3 / epochs
        return {"step_ms": whole * per_epoch, "processor_ms": whole_busy * per_epoch, "start_ms": whole * per_epoch}
    return {"step_ms": min(later) * 1e3, "processor_ms": min(busy) * 1e3, "start_ms": sum(first) * 1e3}


if __name__ == "__main__":
    given = tyro.cli(Options)
    if given.side is not None:
        print(json.dumps(timed(given.only[0], given.side, given.epochs)))
    else:
        print(json.dumps(main(given), indent=1))
