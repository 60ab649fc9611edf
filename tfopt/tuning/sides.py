"""Settings beside others: starts the two processes of a comparison, and makes one result of what they have seen."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tfopt.atomic.files import write_text
from tfopt.trials.process import Outcome, call_apart
from tfopt.tuning.comparison import FEWEST, LOSS_STEPS, Side, ratio
from tfopt.tuning.config import TuneConfig
from tfopt.tuning.limit import find_limit
from tfopt.tuning.tune_report import Comparison
from tfopt.tuning.workload import Workload

FUNCTION, OF_SCRIPT = "tfopt.tuning.comparison:compare", "tfopt.tuning.script:compare"
Tables = Mapping[str, Any]


class Sides:
    """Trains a workload with different settings.

    Args:
        workload: The recipe, the model or the script.
        config: How long to measure, and what memory a process may take.
        folder: Directory of the search; each comparison has one of its own in it.
    """

    def __init__(self, workload: Workload, config: TuneConfig, folder: Path) -> None:
        self._folder, self._config = folder.resolve(), config
        self._workload = dataclasses.replace(workload, folder=str(self._folder))
        self.loss_steps = LOSS_STEPS  # of each epoch whose loss is compared
        self._limit = find_limit(config.memory_limit_bytes, config.margin, hard=False)

    def alone(self, limit_s: float) -> Outcome:
        """Trains as it is, and returns what `tfopt.tuning.comparison.compare` does."""
        (outcome,) = self._train("start", [{}], Side(number=0, sides=1, baton="", turns=3), limit_s)
        return outcome

    def compare(
        self,
        name: str,
        first: Tables,
        second: Tables,
        limit_s: float,
        *,
        turns: int | None = None,
        tolerance: float | None = None,
        bar: float = 0.0,
    ) -> Comparison:
        """Trains with two settings in turns. A side that fails, hangs or takes too much memory ends both, and is the
        outcome; see `Side` for the other arguments.
        """
        asked = Side(
            number=0,
            sides=2,
            baton="",
            steps=self.loss_steps,
            tolerance=tolerance,
            window_s=self._config.window_s,
            turns=turns or self._config.turns,
            limit_s=limit_s / 2,
            bar=bar,
        )
        one, other = self._train(name, [first, second], asked, limit_s)
        seconds = max(one.seconds, other.seconds)
        state = "cut" if seconds >= limit_s < self._config.trial_limit_s else "failed"
        if one.failure or other.failure:
            own = other.failure and not other.given_up
            reason = other.failure if own else f"beside it, the other settings: {one.failure}"
            return Comparison(state=state, seconds=seconds, reason=reason)
        losses = tuple(tuple(each.result["losses"]) for each in (one, other))
        found = Comparison(state="measured", seconds=seconds, losses=losses, peak_bytes=int(other.result["peak_bytes"]))
        over, rates = other.result["over"], (one.result["rates"], other.result["rates"])
        if over == "loss":
            words = " and ".join(f"{each[-1]:.4g}" for each in losses)
            return dataclasses.replace(found, state="loss", reason=f"the losses are {words}")
        if len(rates[1]) < FEWEST:
            state = "cut" if limit_s < self._config.trial_limit_s else "failed"
            reason = f"{limit_s:.0f} s were enough for {len(rates[1])} turns of {FEWEST}"
            return dataclasses.replace(found, state=state, reason=reason)
        return dataclasses.replace(found, state="slower" if over == "slower" else "measured", speedup=ratio(*rates))

    def _train(self, name: str, settings: list[Tables], asked: Side, limit_s: float) -> list[Outcome]:
        """Trains each of the settings in a process of its own. The end of one ends all."""
        folder, ended = self._folder / name, threading.Event()
        function = OF_SCRIPT if self._workload.kind == "script" else FUNCTION
        folder.mkdir(parents=True, exist_ok=True)
        baton = folder / "turns.json"
        empty: list[list[float]] = [[] for _ in settings]
        write_text(baton, json.dumps({"calls": 0, "rates": empty, "losses": empty, "over": ""}))

        def run(number: int) -> Outcome:
            side = dataclasses.replace(asked, number=number, baton=str(baton), settings=settings[number])
            own = folder / str(number)
            arguments = {
                "workload": self._workload.to_dict(),
                "side": side.to_dict(),
                "limit": self._limit.to_dict(),
                "directory": str(own),
            }
            outcome = call_apart(function, arguments, own, limit_s, lambda: "the other has ended" * ended.is_set())
            if outcome.failure:
                ended.set()
            return outcome

        with ThreadPoolExecutor() as pool:
            others = [pool.submit(run, number) for number in range(1, len(settings))]
            try:
                first = run(0)
            except BaseException:  # also Ctrl-C, after which nothing may be left
                ended.set()
                raise
            return [first, *(each.result() for each in others)]
