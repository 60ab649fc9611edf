"""Settings for a batch: how it is divided into what fits, and the learning rate for it."""

from __future__ import annotations

import math
from dataclasses import replace

from tfopt.report import Decision
from tfopt.training import TrainingConfig
from tfopt.training.optimizers import learning_rate_factor
from tfopt.tuning.memory import MemoryReport
from tfopt.tuning.throughput import ThroughputReport


def advise_batch(
    training: TrainingConfig | None,
    memory: MemoryReport,
    throughput: ThroughputReport | None,
    wanted: int | None,
    examples: int | None,
) -> tuple[dict[str, int | float], tuple[Decision, ...]]:
    """Returns settings of a TrainingConfig, and the reasons.

    Args:
        training: The settings so far; None for a script, whose learning rate is unknown.
        memory: What fits.
        throughput: How fast it is; None if that was not measured.
        wanted: The batch that the training is to have; None lets the speed decide.
        examples: Number of training examples.
    """
    largest = memory.global_batch_size
    if wanted is not None:
        size, reason = wanted, "as asked"
    elif throughput is not None:
        size, reason = throughput.knee, "the smallest within 5% of the best speed"
    else:
        size, reason = largest, "the largest that fits; its speed was not measured"
    decisions = [Decision(setting="global_batch_size", value=str(size), reason=reason)]
    settings: dict[str, int | float] = {"global_batch_size": size}
    if size > largest:
        at_once = max(largest // (1 if training is None else training.accumulate), 1)
        settings["accumulate"] = micro_batches(size, at_once, memory.replicas)
        why = f"micro-batches, because {at_once} examples fit at once"
        decisions.append(Decision(setting="accumulate", value=str(settings["accumulate"]), reason=why))
    if training is not None:
        rate, base, why = learning_rate_for(training, size)
        if base is not None:
            settings["base_batch_size"] = base
        value = "unchanged" if rate is None else f"{rate:.4g}"
        decisions.append(Decision(setting="learning_rate", value=value, reason=why))
    if examples is not None:
        steps = math.ceil(examples / size)
        decisions.append(
            Decision(setting="steps of an epoch", value=f"{steps:,}", reason=f"for {examples:,} training examples")
        )
    return settings, tuple(decisions)


def micro_batches(size: int, largest: int, replicas: int) -> int:
    """Returns the fewest micro-batches that fit, into which the examples of each replica can be divided evenly.

    Example:
        >>> micro_batches(256, 100, 1), micro_batches(256, 100, 2)
        (4, 4)
    """
    on_each, at_once = math.ceil(size / replicas), max(largest // replicas, 1)
    fewest = math.ceil(on_each / at_once)
    return next((count for count in range(fewest, on_each) if on_each % count == 0), on_each)


def learning_rate_for(training: TrainingConfig, size: int) -> tuple[float | None, int | None, str]:
    """Returns the learning rate for another batch, the batch size that the setting is for, and the rule.

    `base_batch_size` in a TrainingConfig scales the rate, so the setting of the rate itself stays.

    Example:
        >>> learning_rate_for(TrainingConfig(optimizer="sgd", learning_rate=0.1, global_batch_size=64), 256)
        (0.4, 64, 'times 4: batches of 256 for 64, in proportion for sgd')
    """
    base = training.base_batch_size or training.global_batch_size
    if not isinstance(training.optimizer, str):
        return None, None, "the optimizer object has its own; scale it by hand"
    factor, rule = learning_rate_factor(replace(training, global_batch_size=size, base_batch_size=base))
    return training.learning_rate * factor, base, rule
