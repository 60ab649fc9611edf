"""Settings of the search for a batch size, and of that for faster settings."""

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
    """Largest number of turns of all batch sizes, at least 3. Fewer are taken where they suffice to tell the sizes
    apart. Where they do not, the sizes that may be the knee get up to twice as many more."""
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


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """How long to search for faster settings, and what they may change.

    Raises:
        ConfigError: A value is out of range.
    Example:
        >>> TuneConfig(minutes=5).other_batches
        False
    """

    minutes: Annotated[float, Gt(0), Lt(math.inf)] = 10.0
    """Minutes of the search, with what confirms its result."""
    max_trials: AtLeastOne | None = None
    """Largest number of trials. None means as many as the time allows."""
    other_batches: bool = False
    """Whether larger batches may be tried, and the rematerialisation that makes room for them. They change the
    training; the learning rate follows them."""
    loss_tolerance: Annotated[float, Gt(0), Lt(math.inf)] = 0.05
    """How far a trial's loss may be above that of the start after the same few steps, as a share of the loss at their
    beginning. A trial beyond it does not count, however fast it is."""
    memory_limit_bytes: AtLeastOne | None = None
    """Memory that the process of a training may take. None means as for `BatchSizeConfig`."""
    margin: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Share of the limit that stays free."""
    trial_limit_s: Seconds = 300.0
    """Seconds after which a trial is ended, and counts as failed."""
    window_s: Seconds = 0.5
    """Seconds of steps that are timed in each turn."""
    turns: Annotated[int, Ge(6), Le(100)] = 12
    """Largest number of turns of a trial, at least 6. Fewer are taken where they suffice to tell that it is slower."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    """Seed of the proposals. The same seed proposes the same first trials; later ones depend on what was measured."""

    def __post_init__(self) -> None:
        check_fields(self)
