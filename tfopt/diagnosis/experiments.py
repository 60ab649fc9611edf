"""Times a model's training step on one batch in memory: as it is, in one graph, with XLA, with more examples.

An experiment trains. So it runs inside `unchanged`, which gives every variable and random generator its value back.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.trainer import built_under
from tfopt.diagnosis.watch import again
from tfopt.errors import TfoptError
from tfopt.training.checkpointing.random_state import read_random, write_random
from tfopt.training.checkpointing.state import read_state, write_state
from tfopt.training.step.runtime import is_trained_by_tfopt

# Steps in one call, so that the time of the call itself no longer counts.
IN_ONE_CALL = 16
# Seconds of one experiment, without its trace, and the fewest calls.
SECONDS, FEWEST = 0.6, 4


class CannotMeasureError(TfoptError):
    """An experiment is not possible with this model or on this machine; the message is the reason."""


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """Gives the variables of a training and the random generators their values back at the end.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> before = model.get_weights()
        >>> with unchanged(model):
        ...     history = model.fit(tf.ones((4, 2)), tf.ones((4, 1)), verbose=0)
        >>> [bool((one == other).all()) for one, other in zip(before, model.get_weights())]
        [True, True]
    """
    state, random = read_state(model), read_random()
    try:
        yield
    finally:
        write_state(model, state)
        write_random(random)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The time of a step in milliseconds, and the processor time of all its threads."""

    ms: float
    cpu_ms: float


class Experiments:
    """The experiments with one model and one batch.

    Args:
        model: A compiled model, of which `fit` was called.
        batch: A batch as the training function takes it.
        spec: The types and shapes of the batches of `fit`.
    """

    def __init__(self, model: keras.Model, batch: Any, spec: Any) -> None:
        self.model, self._batch, self._spec = model, batch, spec
        self.is_distributed = built_under(model) is not None
        self._done: dict[str, Timing] = {}

    def one_call(self) -> Timing:
        """Times a step in a call of its own, as `fit` runs it."""
        return self._timed("one_call", 1, {})

    def in_graph(self) -> Timing:
        """Times a step among many in one call: what the device takes, without Python."""
        if self.is_distributed or self.model.run_eagerly:
            return self.one_call()
        return self._timed("in_graph", IN_ONE_CALL, {})

    def with_xla(self) -> Timing:
        """Times a step that XLA compiled, among many in one call."""
        self._check_xla_can_change()
        return self._timed("xla", IN_ONE_CALL, {"jit_compile": True, "run_eagerly": False})

    def without_xla(self) -> Timing:
        """Times a step without XLA, among many in one call."""
        self._check_xla_can_change()
        return self._timed("no_xla", IN_ONE_CALL, {"jit_compile": False, "run_eagerly": False})

    def as_graph(self) -> Timing:
        """Times a step in a call of its own, as a graph although the model runs eagerly."""
        return self._timed("graph", 1, {"run_eagerly": False})

    def without_metrics(self) -> Timing:
        """Times a step in a call of its own, without the metrics."""
        nothing = {"compute_metrics": lambda *args, **kwargs: {"none": tf.constant(0.0)}}
        return self._timed("no_metrics", 1, nothing)

    def with_examples(self, factor: int) -> Timing:
        """Times a step with so many times the examples of the batch, in a call of its own."""
        if self.is_distributed:
            raise CannotMeasureError("the model runs under a distribution strategy")
        batch = keras.tree.map_structure(lambda each: tf.repeat(each, factor, axis=0), self._batch)
        return self._timed(f"examples {factor}", 1, {}, batch=batch)

    @contextlib.contextmanager
    def ready_step(self) -> Iterator[Callable[[], None]]:
        """Yields a function that runs one step in a call of its own, and has traced it already."""
        with unchanged(self.model), self._set({"steps_per_execution": 1}):
            self.model.make_train_function(force=True)
            function: Callable[[Any], Any] = self.model.train_function
            batches = [self._batch] if self.is_distributed else again([self._batch], self._spec, repeat=True)
            for _ in range(2):
                _finish(function(batches))
            yield lambda: _finish(function(batches))

    def _check_xla_can_change(self) -> None:
        if self.is_distributed:
            raise CannotMeasureError("the model runs under a distribution strategy")
        if is_trained_by_tfopt(self.model):
            raise CannotMeasureError("tfopt.compile has set the step; the plan says why XLA is on or off")

    def _timed(self, name: str, steps: int, settings: dict[str, Any], batch: Any = None) -> Timing:
        if name not in self._done:
            with unchanged(self.model), self._set({"steps_per_execution": steps, **settings}):
                self._done[name] = self._measure(steps, self._batch if batch is None else batch, batch is not None)
        return self._done[name]

    def _measure(self, steps: int, batch: Any, other_shape: bool) -> Timing:
        try:
            self.model.make_train_function(force=True)
            function: Callable[[Any], Any] = self.model.train_function
            if self.is_distributed:
                return timing(lambda: function([batch]), 1)
            spec = keras.tree.map_structure(tf.TensorSpec.from_tensor, batch) if other_shape else self._spec
            iterator = again([batch], spec, repeat=True)
            return timing(lambda: function(iterator), steps)
        except (tf.errors.OpError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            raise CannotMeasureError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error

    @contextlib.contextmanager
    def _set(self, settings: dict[str, Any]) -> Iterator[None]:
        """Sets attributes of the model, and gives them their values back."""
        missing = object()
        before = {name: vars(self.model).get(name, missing) for name in settings}
        values = {name: getattr(self.model, name, None) for name in settings}
        function = self.model.train_function
        try:
            for name, value in settings.items():
                setattr(self.model, name, value)
            yield
        finally:
            for name, value in before.items():
                if value is missing and name == "compute_metrics":
                    delattr(self.model, name)
                else:
                    setattr(self.model, name, values[name])
            self.model.train_function = function


def timing(call: Callable[[], Any], steps: int, seconds: float = SECONDS) -> Timing:
    """Times calls, each of so many steps, after one that may trace and compile.

    Example:
        >>> timing(lambda: time.sleep(0.002), steps=2, seconds=0.05).ms > 0.9
        True
    """
    _finish(call())
    _finish(call())
    times: list[float] = []
    begin, cpu = time.perf_counter(), time.process_time()
    while len(times) < FEWEST or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        _finish(call())
        times.append(time.perf_counter() - start)
        if len(times) >= 2 and time.perf_counter() - begin > 10 * seconds:
            break
    used = (time.process_time() - cpu) / len(times)
    return Timing(ms=1e3 * statistics.median(times) / steps, cpu_ms=1e3 * used / steps)


def _finish(outputs: Any) -> None:
    """Waits for the results: a GPU computes them after the call has returned."""
    for each in keras.tree.flatten(outputs):
        if isinstance(each, tf.Tensor):
            each.numpy()
