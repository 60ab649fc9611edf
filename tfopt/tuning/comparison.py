"""Two trainings side by side, each in a process of its own, which take turns: A B, B A, A B, ...

Whatever else the machine does meets both alike, and neither sees the other's global settings, memory or caches. The
processes build and trace at the same time, train the same few steps from the same weights, for the loss, and then pass
a file on: only who has it trains.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfopt.atomic.files import write_text
from tfopt.report import Record
from tfopt.timing import Estimate, estimate
from tfopt.tuning.limit import Used, kept, of_json
from tfopt.tuning.timed import TimedFit, Training
from tfopt.tuning.trial import begin_training, set_devices
from tfopt.tuning.workload import Workload

FEWEST = 6  # turns: the interval of fewer is all of them, and says little
LOSS_STEPS = 10
ALIKE = 0.02  # a ratio that is known to be within this of one needs no more turns
LOOK_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Side(Record):
    """What one of the processes does.

    Attributes:
        number, sides: Its number, and that of all.
        baton: The file that is passed on.
        settings: Settings that the training is changed by: nested tables; of a script, those that `command` takes.
        steps: Number of steps of each of the two epochs whose losses are compared.
        tolerance: How far the loss may be above that of the first side, as a share; more ends the comparison. None
            allows any.
        window_s: Seconds of steps in a turn.
        turns: Largest number of turns.
        limit_s: Seconds after which no turn begins.
        bar: A ratio of speeds that is known to be below this needs no more turns.
    """

    number: int
    sides: int
    baton: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int = LOSS_STEPS
    tolerance: float | None = None
    window_s: float = 0.5
    turns: int = 12
    limit_s: float = math.inf
    bar: float = 0.0


def compare(
    workload: dict[str, Any], side: dict[str, Any], limit: dict[str, Any] | None, directory: str
) -> dict[str, Any]:
    """Trains a recipe or a model as one side.

    Args:
        workload, side, limit: The fields of a Workload, a Side and a Limit.
        directory: Directory of the process.
    Returns: The examples of a second in each turn, the losses, why the turns have ended, the peak of the memory, and
        the facts.
    """
    what, asked = Workload(**workload), Side(**side)
    set_devices(what)
    with kept(of_json(limit), Path(directory)) as used, contextlib.ExitStack() as scopes:
        training, _ = begin_training(what, asked.settings, scopes)
        facts = None if training.facts is None else training.facts.to_dict()
        return {**compared(training, asked, used), "facts": facts}


def compared(training: Training, asked: Side, used: Used) -> dict[str, Any]:
    """Trains as one side, and returns what `compare` does, without the facts."""
    fit = TimedFit(training, training.batch)
    fit.steps_s(asked.steps, 2)
    final = _take_turns(fit, asked)
    return {
        "rates": final["rates"][asked.number],
        "losses": fit.losses[:2],
        "over": final["over"],
        "peak_bytes": used.peak(),
    }


def _take_turns(fit: TimedFit, asked: Side) -> dict[str, Any]:
    """Trains in turns with the other sides. Returns what the file holds at the end."""
    losses, end = fit.losses[:2], time.monotonic() + asked.limit_s

    def call(state: dict[str, Any]) -> None:
        """Takes a turn, and says whether it was the last."""
        turn = state["calls"] // asked.sides
        if turn == 0:
            fit.prepare(asked.window_s)
            state["losses"][asked.number] = losses
        else:
            state["rates"][asked.number].append(fit.rate())
        state["calls"] += 1
        if state["calls"] % asked.sides == 0:
            state["over"] = _over(state, asked, end)

    return _until_over(Path(asked.baton), asked.number, asked.sides, call)


def _until_over(baton: Path, number: int, sides: int, call: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    while True:
        state: dict[str, Any] = json.loads(baton.read_text(encoding="utf-8"))
        if state["over"]:
            return state
        if whose(state["calls"], sides) == number:
            call(state)
            write_text(baton, json.dumps(state))
        else:
            time.sleep(LOOK_S)


def whose(calls: int, sides: int) -> int:
    """Returns the number of the side whose turn it is after so many calls.

    Example:
        >>> [whose(calls, 2) for calls in range(6)]
        [0, 1, 1, 0, 0, 1]
    """
    turn, place = divmod(calls, sides)
    return place if turn % 2 == 0 else sides - 1 - place


def _over(state: Mapping[str, Any], asked: Side, end: float) -> str:
    """Returns why the turns are over; nothing if they go on."""
    turns = len(state["rates"][0])
    if turns == 0:
        first, *others = state["losses"]
        if any(not reaches_loss(first, each, asked.tolerance) for each in others):
            return "loss"
        return ""
    if turns >= asked.turns:
        return "turns"
    if time.monotonic() > end:
        return "time"
    if asked.sides == 2 and turns >= FEWEST:
        found = ratio(*state["rates"])
        if found.most < asked.bar:
            return "slower"
        if found.least > 1 - ALIKE and found.most < 1 + ALIKE:
            return "alike"
    return ""


def ratio(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Returns the speed of the second side as a share of the first one's, within turns.

    Example:
        >>> ratio([10.0, 5.0], [20.0, 10.0]).median
        2.0
    """
    return estimate([two / one for one, two in zip(first, second, strict=False)])


def reaches_loss(first: Sequence[float], second: Sequence[float], tolerance: float | None) -> bool:
    """Returns whether the second training has learnt as much as the first: its last loss is not further above than a
    share of the first loss. A lower one is no fault: dropout draws other numbers under XLA, for example.

    Example:
        >>> reaches_loss([2.0, 1.0], [2.0, 1.05], 0.05), reaches_loss([2.0, 1.0], [2.0, 1.5], 0.05)
        (True, False)
        >>> reaches_loss([2.0, 1.0], [2.0, math.nan], None), reaches_loss([2.0, 1.0], [9.0, 5.0], None)
        (False, True)
    """
    if not all(map(math.isfinite, [*first, *second])):
        return False
    return tolerance is None or not first or not second or second[-1] - first[-1] <= tolerance * abs(first[0])
