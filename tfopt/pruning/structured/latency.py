"""A target of latency: channels leave until a call takes a share of the time, measured on this machine.

The time of a call does not fall in proportion to the multiply-adds, so smaller models are built and timed. Each is
timed in turns with its parent, as an export would run it, with its weights as constants. Turns see the same noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import ConfigError
from tfopt.graph import freeze
from tfopt.pruning.structured.choice import Ranked, meet, smallest
from tfopt.pruning.structured.config import StructuredPruningConfig
from tfopt.pruning.structured.groups import ChannelGroups
from tfopt.pruning.structured.surgery import without_channels

TRIES = 8
NEAR = 0.03  # a ratio this near to the target ends the search
TURNS = 15
TURN_SECONDS = 0.05


@dataclass(frozen=True)
class Latency:
    """Median milliseconds of a call of the model and of the smaller one, and the median ratio of the turns."""

    before_ms: float
    after_ms: float
    ratio: float


def meet_latency(
    model: keras.Model, channels: ChannelGroups, ranked: Sequence[Ranked], config: StructuredPruningConfig
) -> tuple[Any, Latency]:
    """Returns the units that stay, and the times that were measured.

    Raises:
        ConfigError: The smallest possible model is too slow, or an open size of the input besides the batch.
    """
    target = config.target_latency
    assert target is not None
    parent = timed_function(model, config.batch_size)
    everything = channels.multiply_adds(channels.all_kept)

    def measured(kept: Any) -> tuple[float, Any, Latency]:
        smaller = timed_function(without_channels(model, channels, kept), config.batch_size)
        return channels.multiply_adds(kept) / everything, kept, in_turns(parent, smaller)

    least, _, latency = best = measured(smallest(channels, ranked, config))
    if latency.ratio > target:
        raise ConfigError(
            f"target_latency must be reachable. Received: {target:g}, and the smallest possible model takes "
            f"{latency.ratio:.2f} of the time, with max_ratio={config.max_ratio:g} and round_to={config.round_to}. Set "
            "a larger target, a larger max_ratio or a smaller round_to."
        )
    low, high = (least, latency.ratio), (1.0, 1.0)  # (share of the multiply-adds, share of the time)
    for _ in range(TRIES):
        if abs(best[2].ratio / target - 1) <= NEAR:
            break
        share = float(np.interp(target, (low[1], high[1]), (low[0], high[0])))
        share, _, latency = tried = measured(
            meet(channels, ranked, config, channels.multiply_adds, max(share, least) * everything)
        )
        if abs(latency.ratio - target) < abs(best[2].ratio - target):
            best = tried
        if latency.ratio <= target:
            low = (share, latency.ratio)
        else:
            high = (share, latency.ratio)
    return best[1], best[2]


def timed_function(model: keras.Model, batch_size: int) -> Callable[[], Any]:
    """Returns a function without arguments that runs a model on zeros, as an exported artifact would."""
    graph = freeze(model)
    shapes = {name: [batch_size, *spec.shape[1:]] for name, spec in graph.inputs.items()}
    if any(None in shape for shape in shapes.values()):
        raise ConfigError(
            f"The input must have fixed sizes for a latency to be measured. Received: {model.name!r} with the inputs "
            f"{shapes}. Build it with fixed sizes, or set target_flops."
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
