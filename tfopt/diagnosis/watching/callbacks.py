"""Times what callbacks do between the steps, and the weights that they copy to the host."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfopt.compat.replace import replaced
from tfopt.diagnosis.watching.observation import Observation

HOOKS = tuple(name for name in vars(keras.callbacks.Callback) if name.startswith("on_"))
# Methods that are called while Keras evaluates or predicts, which is no part of a training step.
OUTSIDE = ("test", "predict", "train_begin", "train_end")


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
