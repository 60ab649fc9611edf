"""Watches `fit` of a model: times its steps, the waits for batches and the callbacks, without changing its result.

A step takes its batch inside TensorFlow, so the wait for the batch cannot be seen from outside. Every fourth call gets
its batches from here: they are taken from the iterator of `fit`, which is timed, and are handed to the same function in
an iterator of the same type. So the same graph computes the same numbers. The calls between are left alone. They give
the time of a step.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfopt.diagnosis.observation import Call, Observation
from tfopt.training.step.runtime import next_steps

HOOKS = tuple(name for name in vars(keras.callbacks.Callback) if name.startswith("on_"))
# Calls that are left alone between two whose batches are taken here.
LEFT_ALONE = 3
# Methods that are called while Keras evaluates or predicts, which is no part of a training step.
OUTSIDE = ("test", "predict", "train_begin", "train_end")


@contextlib.contextmanager
def watching(model: keras.Model, observation: Observation, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Watches the `fit` that runs inside, and yields the keyword arguments for it.

    Args:
        model: A compiled model.
        observation: Receives the times.
        kwargs: The keyword arguments of `fit`.
    """
    observation.model, observation.fits = model, observation.fits + 1
    with contextlib.ExitStack() as scopes:
        steps = _Steps(model, observation)
        scopes.enter_context(steps.installed())
        given = kwargs.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            callbacks = given.callbacks
            given.callbacks.insert(0, steps.epochs)
            scopes.callback(given.callbacks.remove, steps.epochs)
            steps.epochs.set_model(model)
            steps.epochs.set_params(given.params)
        else:
            callbacks = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
            kwargs = {**kwargs, "callbacks": [steps.epochs, *callbacks]}
        for callback in callbacks:
            if callback is not steps.epochs:
                scopes.enter_context(_timed_callback(callback, observation))
        scopes.enter_context(_copies_timed(model, observation))
        yield kwargs


class _Epochs(keras.callbacks.Callback):
    """Tells when an epoch begins. It has no method for batches: Keras would wait for the results of each batch."""

    def __init__(self, steps: _Steps) -> None:
        super().__init__()
        self._steps = steps

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps.begin_epoch(self.params.get("steps"))


class _Steps:
    """The training function of a model, timed."""

    def __init__(self, model: keras.Model, observation: Observation) -> None:
        self.model, self.observation = model, observation
        self.epochs = _Epochs(self)
        self._function: Any = None
        self._traces = 0
        self._last = time.perf_counter()
        self._starts_epoch = True
        self._since_taken = 0
        self._on_gpu = bool(tf.config.list_physical_devices("GPU"))

    def begin_epoch(self, batches: int | None) -> None:
        self.observation.batches_per_epoch = batches
        self._last, self._starts_epoch = time.perf_counter(), True

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Wraps the methods with which Keras makes the training function, on the model itself."""
        make, train_step = self.model.make_train_function, self.model.train_step
        own = {name: vars(self.model).get(name) for name in ("make_train_function", "train_step")}

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._traces += 1
            return train_step(*args, **kwargs)

        def made(force: bool = False) -> None:
            if isinstance(self.model.train_function, functools.partial):
                self.model.train_function = self._function
            make(force)
            self._function = self.model.train_function
            self.model.train_function = functools.partial(self._call)

        if self.model.train_function is None:  # otherwise it has been traced, and holds the step of the model
            self.model.train_step = functools.wraps(train_step)(counted)
        self.model.make_train_function = functools.wraps(make)(made)
        try:
            yield
        finally:
            for name, before in own.items():
                if before is not None:
                    setattr(self.model, name, before)
                elif name in vars(self.model):
                    delattr(self.model, name)
            if isinstance(self.model.train_function, functools.partial):
                self.model.train_function = self._function

    def _call(self, iterator: Any) -> Any:
        seen = self.observation
        if seen.is_enough or not isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
            return self._function(iterator)
        begin, traces = time.perf_counter(), self._traces
        taken: list[Any] = []
        wait = None
        self._since_taken = 0 if self._starts_epoch or self._since_taken == LEFT_ALONE else self._since_taken + 1
        count = next_steps(self.model)
        if self._since_taken == 0:
            taken = _take(iterator, count)
            wait = time.perf_counter() - begin
            source = taken if isinstance(iterator, tf.distribute.DistributedIterator) else _again(taken, iterator)
            begin = time.perf_counter()
            outputs = self._function(source)
        else:
            outputs = self._function(iterator)
        if self._on_gpu:
            keras.tree.map_structure(lambda value: value.numpy() if hasattr(value, "numpy") else value, outputs)
        self._note(iterator, begin, wait, taken, count, self._traces - traces)
        if taken:
            del source
            taken.clear()
            self._last = time.perf_counter()  # the next call must not pay for the iterator that ends here
        return outputs

    def _note(
        self, iterator: Any, begin: float, wait: float | None, taken: Sequence[Any], count: int, traces: int
    ) -> None:
        end = time.perf_counter()
        seen = self.observation
        if taken:
            shapes = tuple(tuple(each.shape) for each in _tensors(taken[0]))
            if seen.batch is None or _size(taken[0]) >= _size(seen.batch):
                seen.batch, seen.spec = taken[0], iterator.element_spec
        seen.calls.append(
            Call(
                fit=seen.fits,
                starts_epoch=self._starts_epoch,
                steps=len(taken) or count,
                period_s=end - self._last,
                call_s=end - begin,
                wait_s=wait,
                after_taken=self._since_taken == 1,
                traces=0 if self.model.run_eagerly else traces,
                shapes=shapes if taken else None,
            )
        )
        self._last, self._starts_epoch = end, False
        if seen.stops and seen.is_enough:
            self.model.stop_training = True


def _take(iterator: Any, count: int) -> list[Any]:
    """Returns the next batches. Raises StopIteration if there is none, as the training function does."""
    taken = [next(iterator)]
    for _ in range(count - 1):
        batch = next(iterator, None)
        if batch is None:
            break
        taken.append(batch)
    return taken


def again(batches: Sequence[Any], spec: Any, *, repeat: bool = False) -> Any:
    """Returns an iterator over batches, with the types and shapes of another iterator, so that nothing is traced anew.

    Example:
        >>> iterator = again([(tf.zeros((2, 3)),)], (tf.TensorSpec((None, 3)),))
        >>> iterator.element_spec, len(list(iterator))
        ((TensorSpec(shape=(None, 3), dtype=tf.float32, name=None),), 1)
    """
    dataset = functools.reduce(lambda first, other: first.concatenate(other), map(_alone, batches))
    if repeat:
        dataset = dataset.repeat()
    return iter(tf.data.experimental.from_variant(tf.data.experimental.to_variant(dataset), spec))


def _again(batches: Sequence[Any], iterator: Any) -> Any:
    return again(batches, iterator.element_spec)


def _alone(batch: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(batch)


def _tensors(batch: Any) -> list[Any]:
    flat = [each.values[0] if isinstance(each, tf.distribute.DistributedValues) else each for each in _flat(batch)]
    return [each for each in flat if hasattr(each, "shape")]


def _flat(batch: Any) -> list[Any]:
    return list(keras.tree.flatten(batch))


def _size(batch: Any) -> int:
    tensors = _tensors(batch)
    return int(tensors[0].shape[0] or 0) if tensors and len(tensors[0].shape) else 0


@contextlib.contextmanager
def _timed_callback(callback: Any, observation: Observation) -> Iterator[None]:
    """Times the methods that a callback has itself and that run between the steps of an epoch."""
    own = [
        name
        for name in HOOKS
        if getattr(type(callback), name, None) is not getattr(keras.callbacks.Callback, name)
        and not any(word in name for word in OUTSIDE)
    ]
    own_s = observation.callbacks_s
    before = {name: vars(callback).get(name) for name in own}

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                if not observation.is_enough:
                    seconds = time.perf_counter() - begin
                    own_s[type(callback).__name__] = own_s.get(type(callback).__name__, 0.0) + seconds
                    if name == "on_epoch_end":
                        observation.after_epochs_s += seconds

        return call

    for name in own:
        setattr(callback, name, timed(name, getattr(callback, name)))
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                delattr(callback, name)
            else:
                setattr(callback, name, method)


@contextlib.contextmanager
def _copies_timed(model: keras.Model, observation: Observation) -> Iterator[None]:
    """Times `get_weights` and `numpy` of the model's variables, which copy weights to the host."""
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

    keras.Variable.numpy = functools.wraps(original)(numpy)
    try:
        yield
    finally:
        keras.Variable.numpy = original
