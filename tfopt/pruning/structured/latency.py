"""A target of latency: channels leave until a call takes a share of the time, measured on this machine.

The time of a call does not fall in proportion to the multiply-adds, so smaller models are built and timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfopt.errors import ConfigError
from tfopt.pruning.call_times import Latency, in_turns, timed_function
from tfopt.pruning.structured.choice import Ranked, meet, smallest
from tfopt.pruning.structured.config import StructuredPruningConfig
from tfopt.pruning.structured.groups import ChannelGroups
from tfopt.pruning.structured.surgery import without_channels

TRIES = 8
NEAR = 0.03  # a ratio this near to the target ends the search


def meet_latency(
    model: keras.Model, channels: ChannelGroups, ranked: Sequence[Ranked], config: StructuredPruningConfig
) -> tuple[Any, Latency]:
    """Returns the units that stay, and the times that were measured.

    Raises:
        ConfigError: The smallest possible model is too slow, or an open size of the input besides the batch.
    """
    target = config.target_latency
    assert target is not None
    parent = timed_function(model, config.batch_size, config.open_size)
    everything = channels.multiply_adds(channels.all_kept)

    def measured(kept: Any) -> tuple[float, Any, Latency]:
        smaller = timed_function(without_channels(model, channels, kept), config.batch_size, config.open_size)
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
