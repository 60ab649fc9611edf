"""The number of steps of an epoch, which learning-rate schedules and progress bars need before the first epoch."""

from __future__ import annotations

from typing import Any

from tfopt.data.examples import Examples
from tfopt.errors import ConfigError


def epoch_steps(
    data: Any, batch_size: int, *, steps_per_epoch: int | None = None, drop_remainder: bool = False, buckets: int = 0
) -> int:
    """Returns the number of training steps of an epoch.

    Args:
        data: `tfopt.data.Examples`, or a data set of single examples.
        batch_size: Examples of a step.
        steps_per_epoch: The number that the user asks for; it needs a pipeline with repeat=True.
        drop_remainder: Whether a smaller last batch is left out.
        buckets: Number of buckets by length. The last batch of each may be smaller, so the number of steps is unknown.
    Raises:
        ConfigError: The number is unknown, or the data has fewer examples than a step.
    Example:
        >>> import tensorflow as tf
        >>> epoch_steps(tf.data.Dataset.range(10), 4)
        3
    """
    if steps_per_epoch is not None:
        return steps_per_epoch
    records = data.train if isinstance(data, Examples) else data
    count = int(records.cardinality())
    remedy = "Set steps_per_epoch, the number of steps after which an epoch ends."
    if count < 0 or buckets:
        # TensorFlow's names for the numbers: -1 is infinite, -2 is unknown.
        why = "in batches from buckets by length" if buckets else "without end" if count == -1 else "of unknown number"
        raise ConfigError(f"An epoch needs a known number of steps. Received: examples {why}. {remedy}")
    steps = count // batch_size if drop_remainder else -(-count // batch_size)
    if not steps:
        raise ConfigError(
            f"An epoch needs at least one step. Received: {count} examples, with {batch_size} in each step. "
            "Lower global_batch_size."
        )
    return steps
