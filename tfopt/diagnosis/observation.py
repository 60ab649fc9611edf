"""What was seen of a training: the time of each call of the training step, and what happened between the calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import keras

from tfopt.report import Utilization


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """One call of the training function, which runs one step or, with `steps_per_execution`, several."""

    fit: int  # number of the `fit`
    starts_epoch: bool  # whether it is the first of an epoch
    steps: int  # number of steps
    period_s: float  # seconds from the end of the call before, or from the start of the epoch, to the end of this call
    call_s: float  # seconds in the call
    wait_s: float | None  # seconds of the wait for the batches; None if it was not timed
    in_hand: bool  # whether its batches were taken before it began
    # Whether the call before got its batches from here, so that this call waits more or less than usual.
    after_taken: bool
    traces: int  # number of times that the Python code of the step was traced
    shapes: tuple[tuple[int, ...], ...] | None  # shapes of the first batch; None if the call took it by itself
    resident_bytes: int | None = None  # resident memory of the process after the call; None if it was not read

    @property
    def is_left_alone(self) -> bool:
        """Whether it ran as it does when nothing watches."""
        return self.wait_s is None and not self.in_hand and not self.after_taken


@dataclass(kw_only=True)
class Predictions:
    """What was seen of the calls of `predict`, of all models."""

    resident_bytes: list[int] = field(default_factory=list)  # resident memory of the process after each call
    functions: int = 0  # number of calls that had to make the function that predicts: of a new or compiled model
    traces: int = 0  # number of times that this function was traced


@dataclass(kw_only=True)
class Observation:
    """The training that was watched."""

    limit: int  # number of steps to watch, and more where a call has several steps or where epochs are short
    stops: bool = False  # whether a fit ends after these steps
    where: str = ""  # the line of a script with the first `fit`; empty if it is unknown
    model: keras.Model | None = None  # the model of the last `fit`; None before the first
    data: Any = None  # the first argument of that `fit`
    batch: Any = None  # the last full batch
    spec: Any = None  # the types and shapes of the batches
    batches_per_epoch: int | None = None  # number of batches of an epoch; None if unknown
    epochs: int = 0  # number of epochs that `fit` was asked for on this data, over the last fits
    length_is_known: bool = True  # whether the training is as long as these epochs
    fits: int = 0  # number of fits
    compilations: int = 0  # number of calls of `compile` on the model after its first `fit`
    calls: list[StepCall] = field(default_factory=list)  # the watched calls, in order
    callbacks_s: dict[str, float] = field(default_factory=dict)  # seconds in the methods of each callback, by its class
    # The part of `callbacks_s` at the ends of epochs, by the class of the callback.
    epoch_ends_s: dict[str, float] = field(default_factory=dict)
    # Seconds in which callbacks copied weights to the host between the steps, not at the ends of epochs.
    copies_s: float = 0.0
    copied_bytes: int = 0  # bytes of these copies
    load: Utilization | None = None  # the load of the GPUs meanwhile; None without a GPU
    predictions: Predictions = field(default_factory=Predictions)  # also those after the watched steps

    @property
    def steps(self) -> int:
        return sum(call.steps for call in self.calls)

    @property
    def after_epochs_s(self) -> float:
        """Seconds of all callbacks at the ends of epochs, which are in no call's period."""
        return sum(self.epoch_ends_s.values())

    @property
    def is_enough(self) -> bool:
        """Whether all steps to watch were watched, in enough calls, and enough starts of short epochs."""
        if self.steps < self.limit or len(self.calls) < min(self.limit, CALLS):
            return False
        starts = sum(call.starts_epoch for call in self.calls)
        return starts < 2 or starts >= STARTS or self.steps >= LONGER * self.limit

    def builds(self, usual_s: float) -> list[StepCall]:
        """Returns the calls in which the step was built again: all that traced or compiled, without the very first.

        XLA compiles inside a call, and does not say so. If the shapes vary, a call that takes far longer than usual has
        compiled, unless its shapes were seen before. `usual_s` is the usual time of a step without its wait.
        """
        varied = len({call.shapes for call in self.calls} - {None}) > 1
        known: set[Any] = {self.calls[0].shapes} if self.calls else set()
        found = []
        for call in self.calls[1:]:
            is_new = varied and (call.shapes is None or call.shapes not in known)
            known.add(call.shapes)
            if call.traces or (is_new and call.call_s > max(SLOW_CALL * usual_s * call.steps, COMPILES_S)):
                found.append(call)
        return found

    @property
    def settled(self) -> list[StepCall]:
        """The calls without those of the first epoch, in which caches and buffers fill, if enough others are there."""
        epoch, later = 0, []
        for call in self.calls:
            epoch += call.starts_epoch
            if epoch > 1:
                later.append(call)
        return later if len(later) >= SETTLED else self.calls

    @property
    def step_in_hand_s(self) -> float:
        """Seconds of the last step whose batches were taken before it began; 0 if there is none yet."""
        return next((each.call_s / each.steps for each in reversed(self.calls) if each.shapes is not None), 0.0)


# One start of an epoch may take ten times as long as another: so many are watched, in at most so many times the steps.
STARTS, LONGER = 6, 3
# With several steps in a call, so many calls are watched at least: four times each place of a cycle.
CALLS = 24
# Calls after the first epoch that are enough to leave the first epoch out.
SETTLED = 12
# A call that takes longer than so many usual ones, and than so many seconds, has compiled.
SLOW_CALL, COMPILES_S = 5, 0.02
