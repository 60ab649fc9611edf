"""The time of a call of a model, measured on this machine as an export would run it: with its weights as constants.

Two models are timed in turns, because turns see the same noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import ConfigError
from tfopt.graph import freeze

TURNS = 15
TURN_SECONDS = 0.05


@dataclass(frozen=True)
class Latency:
    """Median milliseconds of a call of the model and of the smaller one, and the median ratio of the turns."""

    before_ms: float
    after_ms: float
    ratio: float


def timed_function(model: keras.Model, batch_size: int, open_size: int | None = None) -> Callable[[], Any]:
    """Returns a function without arguments that runs a model on zeros, as an exported artifact would."""
    graph = freeze(model)
    shapes = {
        name: [batch_size, *(open_size if size is None else size for size in spec.shape[1:])]
        for name, spec in graph.inputs.items()
    }
    if any(None in shape for shape in shapes.values()):
        raise ConfigError(
            f"The input must have fixed sizes for a latency to be measured. Received: {model.name!r} with the inputs "
            f"{shapes}. Set open_size, or build it with fixed sizes."
        )
    inputs = {name: tf.zeros(shape, graph.inputs[name].dtype) for name, shape in shapes.items()}
    function = graph.as_function()
    return lambda: [value.numpy() for value in function(**inputs).values()]


def in_turns(one: Callable[[], Any], other: Callable[[], Any]) -> Latency:
    """Times two functions in turns."""
    for warm_up in (one, other, one, other):
        warm_up()
    turns = [(_turn(one), _turn(other)) for _ in range(TURNS)]
    before, after = np.median(turns, axis=0)
    return Latency(float(before), float(after), float(np.median([after / before for before, after in turns])))


def _turn(function: Callable[[], Any]) -> float:
    """Returns the median milliseconds of the calls of a turn, at least one."""
    calls: list[float] = []
    until = time.perf_counter() + TURN_SECONDS
    while not calls or time.perf_counter() < until:
        start = time.perf_counter()
        function()
        calls.append((time.perf_counter() - start) * 1e3)
    return float(np.median(calls))
