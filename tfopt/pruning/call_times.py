"""The time of a call of a model, measured on this machine as an export would run it: with its weights as constants."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt import timing
from tfopt.errors import ConfigError
from tfopt.graph import freeze

TURNS = 15
TURN_SECONDS = 0.05
# A call in another process takes up to this much more or less of the other's time, also where the turns agree.
MARGIN = 0.1


@dataclass(frozen=True)
class Latency:
    """Times of a call of the model and of the smaller one.

    Attributes:
        before_ms, after_ms: Median milliseconds.
        ratio: Median of the turns' ratios, after to before.
        least, most: The range that holds the median of many turns in 96 of 100 measurements.
    """

    before_ms: float
    after_ms: float
    ratio: float
    least: float
    most: float

    @property
    def speed(self) -> str:
        """What may be expected of the smaller model in another process, as far as the turns can tell.

        Example:
            >>> Latency(before_ms=10, after_ms=5, ratio=0.5, least=0.48, most=0.55).speed
            '2.00x as fast, 1.82x to 2.08x'
            >>> Latency(before_ms=1, after_ms=1.2, ratio=1.2, least=0.8, most=1.3).speed
            'about even, 0.77x to 1.25x'
        """
        is_clear = self.most < 1 - MARGIN or self.least > 1 + MARGIN
        first = f"{1 / self.ratio:.2f}x as fast" if is_clear else "about even"
        return f"{first}, {1 / self.most:.2f}x to {1 / self.least:.2f}x"


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


def compare_latency(one: Callable[[], Any], other: Callable[[], Any]) -> Latency:
    """Times two functions in turns."""
    for warm_up in (one, other, one, other):
        warm_up()
    before, after = timing.in_turns([lambda: _turn_ms(one), lambda: _turn_ms(other)], TURNS)
    ratio = timing.estimate([ours / theirs for theirs, ours in zip(before, after, strict=True)])
    return Latency(statistics.median(before), statistics.median(after), ratio.median, ratio.least, ratio.most)


def _turn_ms(function: Callable[[], Any]) -> float:
    """Returns the median milliseconds of the calls of a turn."""
    return 1e3 * statistics.median(timing.call_seconds(function, TURN_SECONDS))
