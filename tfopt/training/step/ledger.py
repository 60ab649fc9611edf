"""The record of a model's training step: traces, compilations with the shapes that caused them, loss scales."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import keras

from tfopt.errors import UnsupportedModelError, warn
from tfopt.report import Record

ATTRIBUTE = "_tfopt_runtime"
"""The attribute of a model that holds its `Runtime`, and so its ledger."""

# One or two additional compilations are normal: the last batch of an epoch may be smaller. From this number on, warn.
STORM = 5


@dataclass(frozen=True, kw_only=True)
class Build(Record):
    """One trace of the step's Python code into a graph, or one compilation of it by XLA."""

    kind: str  # "trace" or "compilation"
    shapes: str  # of the inputs that caused it
    seconds: float | None = None  # None if unknown; for a compilation, the time of the call without its traces


@dataclass(frozen=True, kw_only=True)
class LossScale(Record):
    """A change of the dynamic loss scale. It falls after gradients overflowed; such a step changes no weights."""

    step: int  # after which the change was read
    before: float
    after: float


class Ledger:
    """The record of a model's training step. `tfopt.ledger(model)` returns it.

    Attributes:
        builds: Traces and compilations, in order.
        loss_scales: Changes of the loss scale, in order.
        fallback: Why the training continued without XLA, or None.
        resumed_from: The step that the last `fit` was resumed from; 0 if it started from the beginning.
        one_by_one: The class of the callback that acts on each batch, for which the last `fit` had one step per call
            into TensorFlow; None if there was none, or if the steps per execution were asked for.

    Example:
        >>> ledger = Ledger()
        >>> ledger.traced("x (None, 8)", seconds=0.5)
        >>> ledger.called(seconds=0.75, steps=1)
        >>> for _ in range(3):
        ...     ledger.called(seconds=0.01, steps=2)
        >>> print(ledger)
        1 trace, 0.50 s; 0 compilations
        5.00 ms per step after the first call
    """

    def __init__(self) -> None:
        self.builds: list[Build] = []
        self.loss_scales: list[LossScale] = []
        self.fallback: str | None = None
        self.resumed_from = 0
        self.one_by_one: str | None = None
        self._compilations: list[tuple[str, float]] = []  # shapes, and the seconds of the call that compiled for them
        self._calls: list[float] = []  # seconds per step of the calls without a trace or a compilation
        self._new_shapes: list[str] = []  # of the call that is running
        self._trace_seconds = 0.0  # of the call that is running
        self._warned = False

    def traced(self, shapes: str, seconds: float) -> None:
        """Records a trace."""
        self._trace_seconds += seconds
        self.builds.append(Build(kind="trace", shapes=shapes, seconds=seconds))
        self._warn_of_storm("trace", "traced", "give the inputs one dtype and rank")

    def met_shapes(self, shapes: str) -> None:
        """Records the input shapes of the running call, if XLA has not compiled the step for them yet."""
        if shapes not in self._new_shapes and all(shapes != known for known, _ in self._compilations):
            self._new_shapes.append(shapes)

    def called(self, seconds: float, steps: int) -> None:
        """Records the end of a call that ran so many steps."""
        building = bool(self._trace_seconds or self._new_shapes)
        for shapes in self._new_shapes:
            taken = (seconds - self._trace_seconds) / len(self._new_shapes)
            self._compilations.append((shapes, taken))
            self.builds.append(Build(kind="compilation", shapes=shapes, seconds=max(taken, 0.0)))
            remedy = "set drop_remainder=True, pad the inputs to one shape, or to a few (bucketing)"
            self._warn_of_storm("compilation", "compiled", remedy)
        if not building and steps:
            self._calls.append(seconds / steps)
        self._new_shapes, self._trace_seconds = [], 0.0

    def gave_up_xla(self, cause: str) -> None:
        """Records that the training continues without XLA."""
        self.fallback = cause
        self._new_shapes = []

    def scaled(self, step: int, before: float, after: float) -> None:
        """Records a change of the loss scale."""
        self.loss_scales.append(LossScale(step=step, before=before, after=after))

    def of_kind(self, kind: str) -> Sequence[Build]:
        """Returns the traces, or the compilations."""
        return [build for build in self.builds if build.kind == kind]

    @property
    def compile_seconds(self) -> float:
        """Seconds of all compilations: the time of the calls that compiled, less the usual time of a step."""
        step_s = (self.step_time_ms or 0.0) / 1000
        return sum(max(seconds - step_s, 0.0) for _, seconds in self._compilations)

    @property
    def trace_seconds(self) -> float:
        """Seconds of all traces."""
        return sum(build.seconds or 0.0 for build in self.of_kind("trace"))

    @property
    def step_time_ms(self) -> float | None:
        """Median milliseconds of a step, in calls without a trace or a compilation; None before the first such call."""
        return statistics.median(self._calls) * 1000 if self._calls else None

    def __str__(self) -> str:
        traces, compilations = self.of_kind("trace"), self.of_kind("compilation")
        first = f"{_count(traces, 'trace')}, {self.trace_seconds:.2f} s; {_count(compilations, 'compilation')}"
        lines = [f"{first}, {self.compile_seconds:.2f} s" if compilations else first]
        lines += [f"  compiled for {build.shapes}" for build in compilations]
        if self.resumed_from:
            lines.append(f"resumed after step {self.resumed_from}")
        if self.fallback is not None:
            lines.append(f"XLA was given up: {self.fallback}")
        if self.one_by_one is not None:
            lines.append(f"one step per call, because {self.one_by_one} acts on each batch")
        if self.step_time_ms is not None:
            lines.append(f"{self.step_time_ms:.2f} ms per step after the first call")
        lines += [f"loss scale {each.before:g} -> {each.after:g} after step {each.step}" for each in self.loss_scales]
        return "\n".join(lines)

    def _warn_of_storm(self, kind: str, word: str, remedy: str) -> None:
        builds = self.of_kind(kind)
        if len(builds) < STORM or self._warned:
            return
        self._warned = True
        shapes = ", ".join(build.shapes for build in builds[-STORM:])
        warn(
            f"The training step was {word} {len(builds)} times, for the inputs {shapes}. Each time costs seconds: "
            f"{remedy}."
        )


def _count(builds: Sequence[Build], noun: str) -> str:
    return f"{len(builds)} {noun}{'' if len(builds) == 1 else 's'}"


def ledger(model: keras.Model) -> Ledger:
    """Returns the record of a model's training step: traces, compilations, loss scale.

    Args:
        model: A model compiled by `tfopt.compile`.
    Raises:
        UnsupportedModelError: `tfopt.compile` did not compile the model, or the model has its own `train_step`.
    Example:
        >>> import numpy as np
        >>> from tfopt.training import compile, plan
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> _ = compile(model, plan(), loss="mse")
        >>> history = model.fit(np.zeros((8, 4)), np.zeros((8, 1)), verbose=0)
        >>> len(ledger(model).of_kind("trace")), ledger(model).fallback
        (1, None)
    """
    found = getattr(model, ATTRIBUTE, None)
    if found is None:
        own = getattr(type(model), "train_step", None) not in (None, keras.Model.train_step)
        why, remedy = "which is not", "Compile it with tfopt.compile."
        if own:
            why, remedy = "which has its own train_step", "For a ledger, put the loss into compute_loss instead."
        raise UnsupportedModelError(
            f"model must be trained by tfopt's step. Received: {getattr(model, 'name', model)!r}, {why}. {remedy}"
        )
    return found.ledger
