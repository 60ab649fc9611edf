"""Settings of the search for a batch size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from tfopt.errors import ConfigError
from tfopt.settings.validation import check_fields

AtLeastOne = Annotated[int, Ge(1)]
Seconds = Annotated[float, Gt(0), Lt(math.inf)]


@dataclass(frozen=True, kw_only=True)
class BatchSizeConfig:
    """How much memory a batch may take, and how long to measure.

    Raises:
        ConfigError: A value is out of range, or a hard limit has no bytes.
    Example:
        >>> BatchSizeConfig(memory_limit_bytes=4 * 2**30).margin
        0.1
    """

    memory_limit_bytes: AtLeastOne | None = None
    """Memory that the process of the training may take. None means the memory of the GPU or, without one, the least of
    the limit of the container, the limits of this process and the free memory."""
    margin: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Share of the limit that stays free."""
    hard: bool = False
    """Whether the operating system enforces memory_limit_bytes (RLIMIT_DATA), so that an allocation beyond it fails. By
    default, the memory of a trial is measured, and a trial that takes more is ended."""
    max_trials: Annotated[int, Ge(2), Le(12)] = 12
    """Largest number of trials of the search for the largest batch."""
    max_batch_size: AtLeastOne | None = None
    """Largest batch on each replica that is tried. None means all training examples."""
    trial_limit_s: Seconds = 300.0
    """Seconds after which a trial is ended. Its batch then counts as too large."""
    throughput: bool = True
    """Whether to measure the speed of the batches that fit."""
    window_s: Seconds = 0.5
    """Seconds of steps that are timed in each turn of a batch size."""
    turns: Annotated[int, Ge(3), Le(100)] = 12
    """Largest number of turns of each batch size. Fewer are taken where they suffice to tell the sizes apart."""
    throughput_limit_s: Seconds = 600.0
    """Seconds for the measurement of the speed."""
    global_batch_size: AtLeastOne | None = None
    """Batch that the training is to have. If it does not fit, the advice divides it into micro-batches. None means the
    smallest batch that is within 5% of the best speed."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hard and self.memory_limit_bytes is None:
            raise ConfigError(
                "memory_limit_bytes must be given with hard=True. Received: memory_limit_bytes=None. Set it, or leave "
                "hard out."
            )
