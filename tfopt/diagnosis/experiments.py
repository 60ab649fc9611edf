"""Times a model's training step on one batch in memory: as it is, in one graph, with XLA, with more examples.

An experiment trains. So it runs inside `unchanged`, which gives every variable and random generator its value back.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.replace import kept, replaced
from tfopt.compat.trainer import built_under
from tfopt.diagnosis.batches import again, batches_in_memory
from tfopt.errors import TfoptError
from tfopt.timing import call_seconds, in_turns
from tfopt.training.checkpointing.record import read_random, write_random
from tfopt.training.checkpointing.state import hold_state
from tfopt.training.step.runtime import is_trained_by_tfopt

# Steps in one call, so that the time of the call itself no longer counts.
IN_ONE_CALL = 16
# Seconds for each form of the step, without its trace, in so many turns; the fewest turns, and seconds of enough turns.
SECONDS, TURNS, FEWEST, LONGEST = 0.8, 8, 4, 12.0
# A step that waits for its input runs so many seconds in each turn before it is timed: buffers fill or drain.
SETTLES = 0.2
# Batches that are kept as arrays, from which shuffled batches are taken.
ARRAYS = 8
Scope = Callable[[], contextlib.AbstractContextManager[Any]]


class CannotMeasureError(TfoptError):
    """An experiment is not possible with this model or on this machine; the message is the reason."""


@contextlib.contextmanager
def measurable() -> Iterator[None]:
    """Says in a CannotMeasureError why TensorFlow, Keras or a model of the user refuses what is done inside.

    Example:
        >>> with measurable():
        ...     tf.ones((2, 3)) @ tf.ones((2, 3))
        Traceback (most recent call last):
        ...
        tfopt.diagnosis.experiments.CannotMeasureError: InvalidArgumentError: ...
    """
    try:
        yield
    except CannotMeasureError:
        raise
    except (TfoptError, tf.errors.OpError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CannotMeasureError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


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
    give_back, random = hold_state(model), read_random()
    try:
        yield
    finally:
        give_back()
        write_random(random)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Milliseconds of a step in two forms, timed in turns, so that a change of the machine's speed meets both alike."""

    before_ms: float  # milliseconds of the first form
    after_ms: float  # milliseconds of the second form
    build_s: float = 0.0  # seconds that it takes longer to trace and compile the second form than the first, once

    @property
    def saved(self) -> float:
        """The share of the time that the second form saves; negative if it takes longer."""
        return 1 - self.after_ms / self.before_ms


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of the step."""

    steps: int = 1  # steps in one call
    settings: Mapping[str, Any] = field(default_factory=dict)  # attributes of the model that are set
    # What the training function is called with, without a strategy an iterator; None is the batch in memory.
    source: Any = None
    # Whether the step waits for an input pipeline. Then the mean of the calls counts: one call waits for many.
    waits: bool = False
    # Seconds of Python between two calls, in which the input goes on. They count as part of the call.
    gap_s: float = 0.0
    scope: Scope = contextlib.nullcontext  # what the step is traced and called in


class Experiments:
    """The experiments with a compiled model and one batch as its training function takes it.

    `spec` has the types and shapes of the batches of `fit`. Each experiment runs once, and keeps its result.
    """

    def __init__(self, model: keras.Model, batch: Any, spec: Any) -> None:
        self.model, self._batch, self._spec = model, batch, spec
        self.is_distributed = built_under(model) is not None
        self._done: dict[str, Pair] = {}

    def _check_alone(self) -> None:
        if self.is_distributed:
            raise CannotMeasureError("the model runs under a distribution strategy")

    def in_graph(self) -> Pair:
        """Times a step as `fit` calls it, and among many in one call: what the device takes, without Python."""
        asked = self.model.steps_per_execution
        if self.is_distributed or self.model.run_eagerly or asked >= IN_ONE_CALL:
            if "in_graph" not in self._done:
                ((alone, _),) = self._timed([Form(steps=asked)])
                self._done["in_graph"] = Pair(before_ms=alone, after_ms=alone)
            return self._done["in_graph"]
        return self._pair("in_graph", Form(steps=asked), Form(steps=IN_ONE_CALL))

    def handing_over(self) -> Pair:
        """Times a step of several replicas whose batch comes from an iterator, and one that has its parts."""
        iterator = batches_in_memory(self._batch, self._spec, self.model.distribute_strategy)
        return self._pair("handing_over", Form(source=iterator), Form())

    def other_xla(self) -> Pair:
        """Times a step among many in one call, and the same with the other setting of jit_compile."""
        self._check_alone()
        if is_trained_by_tfopt(self.model):
            raise CannotMeasureError("tfopt.compile has set the step; the plan says why XLA is on or off")
        settings = {"jit_compile": not self.model.jit_compile, "run_eagerly": False}
        return self._pair("xla", Form(steps=IN_ONE_CALL), Form(steps=IN_ONE_CALL, settings=settings))

    def within(self, name: str, scope: Scope) -> Pair:
        """Times a step, and the same inside a scope that changes what layers compute."""
        self._check_alone()
        if is_trained_by_tfopt(self.model):
            raise CannotMeasureError("tfopt.compile has set the step, which keeps its traces")
        return self._pair(name, Form(), Form(scope=scope))

    def as_graph(self) -> Pair:
        """Times a step that runs eagerly, and the same as a graph."""
        return self._pair("as_graph", Form(), Form(settings={"run_eagerly": False}))

    def without_metrics(self) -> Pair:
        """Times a step, and the same without the metrics."""
        nothing = {"compute_metrics": lambda *args, **kwargs: {"none": tf.constant(0.0)}}
        return self._pair("without_metrics", Form(), Form(settings=nothing))

    def with_examples(self, factor: int) -> Pair:
        """Times a step, and one with so many times the examples."""
        self._check_alone()
        with measurable():  # a batch may hold other things than dense tensors
            batch = keras.tree.map_structure(
                lambda each: None if each is None else tf.repeat(each, factor, axis=0), self._batch
            )
            spec = keras.tree.map_structure(tf.type_spec_from_value, batch)
        return self._pair(f"examples {factor}", Form(), Form(source=again([batch], spec, repeat=True)))

    def other_input(self, name: str, before: tf.data.Dataset, after: tf.data.Dataset, gap_s: float) -> Pair:
        """Times a step that reads batches from the data set of the training, and one that reads from a changed one.

        Python takes `gap_s` seconds between two calls.
        """

        def reading(dataset: tf.data.Dataset) -> Form:
            source = iter(self._typed(dataset.repeat()))
            return Form(steps=self.model.steps_per_execution, source=source, waits=True, gap_s=gap_s)

        return self._pair(f"input {name}", reading(before), reading(after))

    def whole_epochs(
        self, name: str, before: tf.data.Dataset, after: tf.data.Dataset, gap_s: float, batches: int
    ) -> Pair:
        """Times the steps of whole epochs of some batches, with the starts of their data sets."""
        name = f"epochs {name}"
        if name not in self._done:
            one, other = self._epochs([before, after], gap_s, batches)
            self._done[name] = Pair(before_ms=one, after_ms=other)
        return self._done[name]

    def from_arrays(self, gap_s: float, batches: int) -> float:
        """Returns the milliseconds of a step in whole epochs whose batches are gathered from arrays in random order."""
        self._check_alone()
        parts = keras.tree.flatten(self._batch)
        if not all(isinstance(each, tf.Tensor) and each.shape.rank for each in parts):
            raise CannotMeasureError("a batch holds other things than arrays of examples")
        size = int(parts[0].shape[0])
        arrays = keras.tree.map_structure(lambda each: tf.concat([each] * ARRAYS, 0), self._batch)
        order = tf.data.Dataset.range(ARRAYS * size).shuffle(ARRAYS * size).repeat().batch(size, drop_remainder=True)
        gathered = order.map(
            lambda places: keras.tree.map_structure(lambda each: tf.gather(each, places), arrays), tf.data.AUTOTUNE
        )
        (found,) = self._epochs([gathered.prefetch(tf.data.AUTOTUNE)], gap_s, batches)
        return found

    def _epochs(self, datasets: Sequence[tf.data.Dataset], gap_s: float, batches: int) -> list[float]:
        """Returns the milliseconds of a step in whole epochs with each data set, in turns."""
        asked = self.model.steps_per_execution
        calls = max(batches // asked, 1)
        sources = [self._typed(each) for each in datasets]
        with measurable(), unchanged(self.model), self._set({"steps_per_execution": asked}):
            self.model.make_train_function(force=True)
            function: Callable[[Any], Any] = self.model.train_function
            is_enough = _within_longest()
            sides = [partial(_epoch_s, function, source, calls, gap_s) for source in sources]
            for side in sides:  # it traces, and fills caches
                side()
            seconds = in_turns(sides, TURNS, is_enough)
        return [1e3 * statistics.median(each) / (calls * asked) for each in seconds]

    def _typed(self, dataset: tf.data.Dataset) -> Any:
        """Returns a data set whose batches have the structure of those of `fit`, divided over the replicas."""
        found = tf.nest.flatten(dataset.element_spec)
        flat = tf.nest.flatten(self._spec)
        if len(found) != len(flat):
            raise CannotMeasureError(f"fit takes {len(flat)} tensors, the data set gives {len(found)}")
        if self.is_distributed:  # the specs of fit are those of all replicas together
            typed = list(found)
        else:
            typed = [tf.TensorSpec(one.shape, other.dtype) for one, other in zip(flat, found, strict=True)]
        variant = tf.data.experimental.to_variant(dataset)
        batches = tf.data.experimental.from_variant(variant, tf.nest.pack_sequence_as(self._spec, typed))
        if self.is_distributed:
            return self.model.distribute_strategy.experimental_distribute_dataset(batches)
        return batches

    @contextlib.contextmanager
    def ready_step(self) -> Iterator[Callable[[], None]]:
        """Yields a function that runs one step in a call of its own, and has traced it already."""
        with unchanged(self.model), self._set({"steps_per_execution": 1}):
            self.model.make_train_function(force=True)
            function: Callable[[Any], Any] = self.model.train_function
            batches = self._in_memory(1)
            for _ in range(2):
                _finish(function(batches))
            yield lambda: _finish(function(batches))

    def _pair(self, name: str, before: Form, after: Form) -> Pair:
        if name not in self._done:
            (first, first_s), (second, second_s) = self._timed([before, after])
            self._done[name] = Pair(before_ms=first, after_ms=second, build_s=second_s - first_s)
        return self._done[name]

    def _timed(self, forms: Sequence[Form]) -> list[tuple[float, float]]:
        """Returns the milliseconds of a step in each form, timed in turns, and the seconds that it took to build it."""
        with measurable(), unchanged(self.model):
            calls, build_s = zip(*(self._ready(form) for form in forms), strict=True)
            sides = [partial(self._turn, form, call) for form, call in zip(forms, calls, strict=True)]
            samples = in_turns(sides, TURNS, _within_longest())
        return [
            (1e3 * (statistics.fmean if form.waits else statistics.median)(chain(*each)) / form.steps, seconds)
            for form, each, seconds in zip(forms, samples, build_s, strict=True)
        ]

    def _turn(self, form: Form, call: Callable[[], None]) -> list[float]:
        """Returns the seconds of the calls of one turn."""
        with form.scope(), self._set({"steps_per_execution": form.steps, **form.settings}):
            if form.waits:
                call_seconds(call, SETTLES)
            return call_seconds(call, SECONDS / TURNS)

    def _ready(self, form: Form) -> tuple[Callable[[], None], float]:
        """Returns a call of the training function in a form, which is traced, and the seconds that this took."""
        source = self._in_memory(form.steps) if form.source is None else form.source
        with form.scope(), self._set({"steps_per_execution": form.steps, **form.settings}):
            self.model.make_train_function(force=True)
            function: Callable[[Any], Any] = self.model.train_function
            times = [time.perf_counter()]
            for _ in range(2):
                _finish(function(source))
                times.append(time.perf_counter())
        return lambda: _called(function, source, form.gap_s), (times[1] - times[0]) - (times[2] - times[1])

    def _in_memory(self, steps: int) -> Any:
        """Returns what a call of some steps takes its batches from: always the same one."""
        return [self._batch] * steps if self.is_distributed else again([self._batch], self._spec, repeat=True)

    @contextlib.contextmanager
    def _set(self, settings: dict[str, Any]) -> Iterator[None]:
        """Sets attributes of the model, and gives them their values back."""
        with kept(self.model, "train_function"), replaced(self.model, **settings):
            yield


def usual_ms(call: Callable[[], Any], seconds: float = SECONDS) -> float:
    """Returns the median milliseconds of calls, after some that may trace and compile.

    Example:
        >>> usual_ms(lambda: time.sleep(0.002), seconds=0.05) > 1.9
        True
    """
    _finish(call())
    _finish(call())
    found: list[float] = []
    while len(found) < FEWEST:
        found += call_seconds(lambda: _finish(call()), seconds)
    return 1e3 * statistics.median(found)


def _within_longest() -> Callable[[Sequence[Any]], bool]:
    """Returns the rule for when turns are enough: after LONGEST seconds from now, but not before FEWEST turns."""
    end = time.perf_counter() + LONGEST
    return lambda turns: len(turns) >= FEWEST and time.perf_counter() > end


def _epoch_s(function: Callable[[Any], Any], dataset: Any, calls: int, gap_s: float) -> float:
    """Returns the seconds of so many calls of a training function, from the start of the data set's iterator."""
    begin = time.perf_counter()
    iterator = iter(dataset)
    for _ in range(calls):
        try:
            _called(function, iterator, gap_s)
        except (StopIteration, tf.errors.OutOfRangeError):  # the last batches are too few for a call
            break
    return time.perf_counter() - begin


def _called(function: Callable[[Any], Any], source: Any, gap_s: float) -> None:
    """Calls a training function, and then keeps Python as busy as the loop of `fit` does between two calls."""
    _finish(function(source))
    end = time.perf_counter() + gap_s
    while time.perf_counter() < end:
        pass


def _finish(outputs: Any) -> None:
    """Waits for the results: a GPU computes them after the call has returned."""
    for each in keras.tree.flatten(outputs):
        if isinstance(each, tf.Tensor):
            each.numpy()
