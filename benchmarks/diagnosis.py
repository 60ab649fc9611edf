"""Does the diagnosis find the cause, and is its estimated gain what mending the cause gives?

    python benchmarks/diagnosis.py

Sixteen training runs with one planted cause each, and four without one, are watched in a fresh process each. Then each
planted run and the same run without its cause train in turns, in another process, which nothing watches. The time of an
example is that of the fastest epoch of a fit: at the start of some epochs the old iterator of tf.data waits half a
second for its thread that tunes, with the cause or without it. The measured gain is the median over the turns, because
the machine changes its speed between them. Results go to benchmarks/results/diagnosis.json.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

RESULTS = Path(__file__).parent / "results"
WITHIN = 0.3


@dataclass(frozen=True, kw_only=True)
class Options:
    only: tuple[str, ...] = ()
    """Names of runs; empty for all."""
    rounds: int = 5
    """Number of times that each planted run and its mended twin train."""
    out: Path = RESULTS / "diagnosis.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    import keras
    import tensorflow as tf
    from diagnosis_runs import HEALTHY, NEEDS_GPU, PLANTED

    from tfopt.atomic.files import write_text
    from tfopt.hardware import detect

    hardware = detect()
    planted = {name: _planted(name, options, name in NEEDS_GPU) for name in PLANTED if _asked(name, options)}
    healthy = {name: _watched(name, options) for name in HEALTHY if _asked(name, options)}
    results = {
        "what": "causes planted in training runs, found by tfopt's diagnosis; gains are shares of the time per example",
        "device": f"{hardware.processor}, {hardware.logical_cores} cores",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "load_average_before": round(os.getloadavg()[0], 2),
        "first": sum(each["first"] == name for name, each in planted.items()),
        "planted": planted,
        "healthy_without_a_planted_cause_first": sum(each["first"] not in PLANTED for each in healthy.values()),
        "healthy": healthy,
    }
    options.out.parent.mkdir(exist_ok=True)
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def _asked(name: str, options: Options) -> bool:
    return not options.only or name in options.only


def _planted(name: str, options: Options, needs_gpu: bool) -> dict[str, Any]:
    found = _watched(name, options)
    if needs_gpu:
        return {**found, "measured_gain": None, "why": "the cause does not show on a processor"}
    turns = _process("time", name, str(options.rounds))
    rounds = [[min(epochs) for epochs in pair] for pair in turns]
    before, after = (statistics.median(times) for times in zip(*rounds, strict=True))
    gains = sorted(1 - mended / planted for planted, mended in rounds)
    gain = statistics.median(gains)
    estimated = found["gains"].get(name)
    found |= {"planted_ms": before, "mended_ms": after, "estimated_gain": estimated}
    found |= {"measured_gain": gain, "measured_gains": gains}
    found["within"] = estimated is not None and abs(estimated - gain) <= WITHIN * abs(gain)
    print(f"{name:20} first {found['first']:20} estimated {estimated or 0:.2f} measured {gain:.2f}", flush=True)
    return found


def _watched(name: str, options: Options) -> dict[str, Any]:
    found: dict[str, Any] = _process("watch", name, "1")
    if name.startswith("healthy"):
        print(f"{name:20} first {found['first']}", flush=True)
    return found


def _process(what: str, name: str, rounds: str) -> Any:
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    }
    command = [sys.executable, __file__, "--part", what, name, rounds]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{name}: {ended.stderr[-2000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def _part(what: str, name: str, rounds: str) -> Any:
    from diagnosis_runs import HEALTHY, PLANTED

    from tfopt.timing import in_turns

    if what == "watch":
        return _watch(HEALTHY[name] if name in HEALTHY else lambda: PLANTED[name](False))
    sides = [lambda: _time(lambda: PLANTED[name](False)), lambda: _time(lambda: PLANTED[name](True))]
    return list(zip(*in_turns(sides, int(rounds)), strict=True))


def _watch(run: Any) -> dict[str, Any]:
    from tfopt.diagnosis.diagnose import DoctorHook, report
    from tfopt.scripts.hook import hooked

    doctor = DoctorHook(steps=200)
    with hooked(doctor):
        run()
    found = report(doctor.observation)
    return {
        "first": found.diagnoses[0].cause if found.diagnoses else "none",
        "gains": {each.cause: each.gain for each in found.diagnoses},
        "why": [f"{each.title}: {each.evidence}" for each in found.diagnoses],
        "unexplained_ms": found.breakdown.unexplained_ms,
        "breakdown": {"step": found.breakdown.step_ms, **found.breakdown.parts},
        "unchecked": dict(found.unchecked),
    }


def _time(run: Any) -> list[float]:
    """Returns the milliseconds per example of each epoch after the first."""
    import keras

    epochs: list[float] = []
    original = keras.Model.fit

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begin = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            epochs.append(time.perf_counter() - self.begin)

    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        return original(model, *args, **{**kwargs, "callbacks": [*kwargs.get("callbacks", ()), Clock()]})

    keras.Model.fit = fit
    gc.collect()
    gc.disable()  # as timeit does: to collect the models of the runs before takes a second in some epoch
    try:
        examples = run()
    finally:
        gc.enable()
        keras.Model.fit = original
    return [1e3 * seconds / examples for seconds in epochs[1:] or epochs]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        print(json.dumps(_part(*sys.argv[2:])))
    else:
        main(tyro.cli(Options))
