"""Watches `fit` of a model: times its steps, the waits for batches and the callbacks, without changing its result.

A step takes its batch inside TensorFlow, so the wait for the batch cannot be seen from outside. Two of some seven calls
get their batches from here: they are taken from the iterator of `fit` and are handed to the same function in an
iterator of the same type. So the same graph computes the same numbers. Taking the first batch is timed: this is the
wait for it. The second call is timed: it has its batch in hand and begins as soon after the first as usual, when the
threads of TensorFlow are still awake, so this is the time of a step without a wait. The call after these two finds an
input that had more time or less than usual. The other calls are left alone. They give the time of a step as it is.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import psutil
import tensorflow as tf

from tfopt.compat.replace import callbacks_of, first_callback, replaced
from tfopt.diagnosis.batches import Hand, again, batches_in_memory
from tfopt.diagnosis.observation import Observation, StepCall
from tfopt.training.step.runtime import is_trained_by_tfopt, next_steps

# The places of calls in a cycle: batches are taken for the first two; the third comes after that; the others are left
# alone. The lengths of cycles vary: workers that prepare batches together deliver them together, for example every
# third.
AFTER, LENGTHS = 2, (6, 7, 8)
Distributed = tf.distribute.DistributedIterator
HOOKS = tuple(name for name in vars(keras.callbacks.Callback) if name.startswith("on_"))
# Methods that are called while Keras evaluates or predicts, which is no part of a training step.
OUTSIDE = ("test", "predict", "train_begin", "train_end")


@contextlib.contextmanager
def watching(model: keras.Model, observation: Observation, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Watches the `fit` that runs inside, whose keyword arguments are given, and yields those to call it with."""
    observation.model, observation.fits = model, observation.fits + 1
    with contextlib.ExitStack() as scopes:
        steps = _Steps(model, observation, scopes.enter_context(collections_timed()))
        scopes.enter_context(steps.installed())
        given = kwargs.get("callbacks")
        for callback in callbacks_of(given):
            scopes.enter_context(callback_timed(callback, observation))
        scopes.enter_context(copies_timed(observation))
        yield {**kwargs, "callbacks": scopes.enter_context(first_callback(model, steps.epochs, given))}


class _Epochs(keras.callbacks.Callback):
    """Tells when an epoch begins. It has no method for batches: Keras would wait for the results of each batch."""

    def __init__(self, steps: _Steps) -> None:
        super().__init__()
        self._steps = steps

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps.begin_epoch(self.params.get("steps"))


class _Steps:
    """The training function of a model, timed."""

    def __init__(self, model: keras.Model, observation: Observation, collected_s: Callable[[], float]) -> None:
        self.model, self.observation, self._collected_s = model, observation, collected_s
        self.epochs = _Epochs(self)
        self._function: Any = None
        self._traces = 0
        self._last = time.perf_counter()
        self._starts_epoch = True
        self._place, self._cycle, self._epoch = -1, 0, 0  # the place in the cycle
        self._in_epoch = 0  # steps
        # For the next call: its iterator, its batches, and the iterator that gives them.
        self._spare: tuple[Any, list[Any], Any] | None = None
        self._in_memory: Any = None
        self._hand: Hand | None = None
        self._on_gpu = bool(tf.config.list_physical_devices("GPU"))

    def begin_epoch(self, batches: int | None) -> None:
        self.observation.batches_per_epoch = batches
        self._last, self._starts_epoch, self._in_epoch = time.perf_counter(), True, 0
        self._collected_s()
        # Of every two epochs, one begins with a timed wait, and one with a call that is left alone.
        self._epoch += 1
        self._place = (0 if self._epoch % 2 else AFTER + 1) - 1

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Wraps the methods with which Keras makes the training function, on the model itself."""
        make, train_step = self.model.make_train_function, self.model.train_step

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._traces += 1
            return train_step(*args, **kwargs)

        def made(force: bool = False) -> None:
            if isinstance(self.model.train_function, functools.partial):
                self.model.train_function = self._function
            make(force)
            self._function = self.model.train_function
            self.model.train_function = functools.partial(self._call)

        own = {"make_train_function": functools.wraps(make)(made)}
        if self.model.train_function is None:  # otherwise it has been traced, and holds the step of the model
            own["train_step"] = functools.wraps(train_step)(counted)
        try:
            with replaced(self.model, **own):
                yield
        finally:
            if isinstance(self.model.train_function, functools.partial):
                self.model.train_function = self._function
            self._close_hand()

    def _call(self, iterator: Any) -> Any:
        seen = self.observation
        spare, self._spare = self._spare, None
        given, source = spare[1:] if spare is not None and spare[0] is iterator else ([], iterator)
        if not given and (seen.is_enough or not isinstance(iterator, tf.data.Iterator | Distributed)):
            return self._function(iterator)
        traces, count = self._traces, next_steps(self.model)
        self._place += 1
        if self._place == LENGTHS[self._cycle % len(LENGTHS)]:
            self._place, self._cycle = 0, self._cycle + 1
        batches, wait = given, None
        if not given and self._place == 0:
            batches, wait = self._paced(iterator, count)
            source = self._handed_over(batches, iterator, count)
            if self._has_two_more(count) and (more := _take(iterator, count, or_none=True)):
                self._spare = iterator, more, self._handed_over(more, iterator, count)
        waited_s = self._collected_s()  # before the call, since the last one
        began_call = time.perf_counter()
        outputs = self._function(source)
        if self._on_gpu:
            keras.tree.map_structure(lambda value: value.numpy() if hasattr(value, "numpy") else value, outputs)
        end, in_call_s = time.perf_counter(), self._collected_s()
        if wait is not None:
            wait = max(wait - len(batches) * self._taking(batches[0], iterator, paused=count > 1), 0.0)
        self._note(batches, iterator, StepCall(
            fit=seen.fits,
            starts_epoch=self._starts_epoch,
            steps=len(batches) or count,
            period_s=end - self._last - waited_s - in_call_s,
            call_s=end - began_call - in_call_s,
            wait_s=wait,
            in_hand=bool(given),
            after_taken=self._place == AFTER,
            traces=0 if self.model.run_eagerly else self._traces - traces,
            shapes=tuple(tuple(each.shape) for each in _tensors(batches[0])) if batches else None,
            resident_bytes=psutil.Process().memory_info().rss if self._place < AFTER else None,
        ))  # fmt: skip
        # What was done here between two calls must not count for the next one.
        if self._place < AFTER:
            self._last = time.perf_counter()
            self._collected_s()
        else:
            self._last = end
        return outputs

    def _paced(self, iterator: Any, count: int) -> tuple[list[Any], float]:
        """Takes the batches of a call, and returns the seconds that it waited for them.

        Between two of them it pauses as long as a step takes: the input goes on meanwhile, as it does in the call.
        """
        batches: list[Any] = []
        wait = 0.0
        for place in range(count):
            if place:
                time.sleep(self.observation.step_in_hand_s)
            begin = time.perf_counter()
            taken = _take(iterator, 1, or_none=bool(batches))
            wait += time.perf_counter() - begin
            if not taken:
                break
            batches += taken
        return batches, wait

    def _note(self, batches: list[Any], iterator: Any, call: StepCall) -> None:
        seen = self.observation
        if batches and (seen.batch is None or _size(batches[0]) >= _size(seen.batch)):
            seen.batch, seen.spec = batches[0], iterator.element_spec
        seen.calls.append(call)
        self._in_epoch += call.steps
        self._starts_epoch = False
        if seen.stops and seen.is_enough:
            self.model.stop_training = True

    def _has_two_more(self, count: int) -> bool:
        """Returns whether this epoch has a call after this one, so that a batch taken for it is used."""
        if is_trained_by_tfopt(self.model):  # its next call may have fewer steps
            return False
        batches = self.observation.batches_per_epoch
        return batches is None or self._in_epoch + 2 * count <= batches

    def _taking(self, batch: Any, iterator: Any, *, paused: bool) -> float:
        """Returns the seconds that it takes here and now to take a batch that is in memory: that is no wait.

        If the other batches were taken after pauses, in which threads fall asleep, so is this one.
        """
        if self._in_memory is None:
            self._in_memory = batches_in_memory(batch, iterator.element_spec, self.model.distribute_strategy)
            _take(self._in_memory, 1)
        if paused:
            time.sleep(self.observation.step_in_hand_s)
        begin = time.perf_counter()
        _take(self._in_memory, 1)
        return time.perf_counter() - begin

    def _handed_over(self, batches: list[Any], iterator: Any, count: int) -> Any:
        """Returns what gives the training function batches that were taken."""
        if isinstance(iterator, Distributed):
            return batches
        if len(batches) < count:  # the last call of an epoch, whose iterator must end
            return again(batches, iterator.element_spec)
        if self._hand is None or self._hand.spec != iterator.element_spec:
            self._close_hand()
            self._hand = Hand(iterator.element_spec)
        return self._hand.give(batches)

    def _close_hand(self) -> None:
        if self._hand is not None:
            self._hand.close()
        self._hand = None


@contextlib.contextmanager
def callback_timed(callback: Any, observation: Observation) -> Iterator[None]:
    """Times the methods that a callback has itself and that run between the steps of an epoch."""
    own = [
        name
        for name in HOOKS
        if getattr(type(callback), name, None) is not getattr(keras.callbacks.Callback, name)
        and not any(word in name for word in OUTSIDE)
    ]

    def add(times: dict[str, float], seconds: float) -> None:
        times[type(callback).__name__] = times.get(type(callback).__name__, 0.0) + seconds

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin, copies = time.perf_counter(), (observation.copies_s, observation.copied_bytes)
            try:
                return method(*args, **kwargs)
            finally:
                if not observation.is_enough:
                    add(observation.callbacks_s, seconds := time.perf_counter() - begin)
                    if name == "on_epoch_end":
                        add(observation.epoch_ends_s, seconds)
                        observation.copies_s, observation.copied_bytes = copies

        return call

    with replaced(callback, **{name: timed(name, getattr(callback, name)) for name in own}):
        yield


@contextlib.contextmanager
def copies_timed(observation: Observation) -> Iterator[None]:
    """Times `get_weights` and `numpy` of variables, which copy weights to the host."""
    original = keras.Variable.numpy
    depth = 0

    def numpy(variable: Any) -> Any:
        nonlocal depth
        begin = time.perf_counter()
        depth += 1
        try:
            value = original(variable)
        finally:
            depth -= 1
        if not depth and not observation.is_enough and observation.calls:
            observation.copies_s += time.perf_counter() - begin
            observation.copied_bytes += getattr(value, "nbytes", 0)
        return value

    with replaced(keras.Variable, numpy=functools.wraps(original)(numpy)):
        yield


@contextlib.contextmanager
def collections_timed() -> Iterator[Callable[[], float]]:
    """Times the collections of garbage inside. Yields a function that returns their seconds since its last call.

    A collection of all objects takes some hundred milliseconds and comes once in thousands of steps. Among the few
    steps that are watched it would count far too much, so it is left out.

    Example:
        >>> with collections_timed() as seconds:
        ...     _ = gc.collect(0)
        >>> seconds() > 0
        True
    """
    total = began = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal total, began
        if phase == "start":
            began = time.perf_counter()
        else:
            total += time.perf_counter() - began

    def seconds() -> float:
        nonlocal total
        found, total = total, 0.0
        return found

    gc.callbacks.append(note)
    try:
        yield seconds
    finally:
        gc.callbacks.remove(note)


def _take(iterator: Any, count: int, *, or_none: bool = False) -> list[Any]:
    """Returns the next batches. Raises as the training function does if there is none, unless that is allowed."""
    take = _next_of_replicas if isinstance(iterator, Distributed) else next
    taken: list[Any] = []
    try:
        for _ in range(count):
            taken.append(take(iterator))
    except (StopIteration, tf.errors.OutOfRangeError):
        if not taken and not or_none:
            raise
    return taken


@tf.function(reduce_retracing=True)
def _next_of_replicas(iterator: Any) -> Any:
    """Returns the next batch of all replicas, as the training function takes it; from Python it takes far longer."""
    return iterator.get_next()


def _tensors(batch: Any) -> list[Any]:
    flat = keras.tree.flatten(batch)
    first = [each.values[0] if isinstance(each, tf.distribute.DistributedValues) else each for each in flat]
    return [each for each in first if hasattr(each, "shape")]


def _size(batch: Any) -> int:
    tensors = _tensors(batch)
    return int(tensors[0].shape[0] or 0) if tensors and len(tensors[0].shape) else 0
