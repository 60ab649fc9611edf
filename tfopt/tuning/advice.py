"""The settings of a training for the batch size that was found, each with its reason.

A training in batches of B examples needs 1 + N / B times the fewest steps, where N is the noise scale of its gradients
(McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162). A step takes B / v seconds at
a speed of v examples per second. So the time to reach a loss is in proportion to (B + N) / v, and the batch for which
that is least is advised. Without the noise scale it is the smallest batch that is about as fast as any: the knee.
More examples in one step by accumulation are no faster per example, so they are advised only for a batch that is asked
for and does not fit.

For the same loss, a training needs examples in proportion to B + N. So with the noise scale known, a larger batch comes
with as many more epochs, whose steps are still fewer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfopt.errors import ConfigError
from tfopt.report import Decision, Record
from tfopt.report.record import decision_table
from tfopt.report.sheet import Sheet, Shown
from tfopt.training import TrainingConfig
from tfopt.training.optimizers import learning_rate_factor, scaled_learning_rate
from tfopt.training.step.noise import NoiseEstimate
from tfopt.training.step.noise_scale import in_words

# A smaller batch, or the present one, is good enough if the training takes so much longer at most.
CLOSE = 1.05
# Goyal et al. 2017 (arXiv:1706.02677) let the rate rise for 5 of 90 epochs. In a short training, 5 would be too many.
WARMUP_EPOCHS, WARMUP_SHARE = 5.0, 0.1
FEW_STEPS = 10  # of an epoch
SMALLEST = "the smallest batch that is about as fast as the fastest"


@dataclass(frozen=True, kw_only=True)
class BatchAdvice(Record, Shown):
    """The settings that are advised for a training.

    Attributes:
        global_batch_size: Number of examples of a step.
        micro_batch_size: Number of examples that are on a device at once.
        learning_rate: The highest learning rate, for this batch.
        steps_per_epoch: Number of steps of an epoch; None if the number of examples is unknown.
        settings: The settings of `TrainingConfig` that differ from those of the training, for a recipe or a TOML file.
        decisions: Each setting with its reason.
    """

    global_batch_size: int
    micro_batch_size: int
    learning_rate: float
    steps_per_epoch: int | None
    settings: Mapping[str, int | float]
    decisions: Sequence[Decision]

    def _sheet(self) -> Sheet:
        return Sheet(title="advised settings", tables=[decision_table(self.decisions)])


def advise(
    training: TrainingConfig,
    *,
    largest: int,
    knee: int | None = None,
    rates: Mapping[int, float] | None = None,
    noise: NoiseEstimate | None = None,
    replicas: int = 1,
    examples: int | None = None,
    global_batch_size: int | None = None,
) -> BatchAdvice:
    """Returns the settings of a training for the batch sizes that were measured.

    Args:
        training: The settings of the training at present. Its learning rate is the one for its batch size.
        largest: The largest batch on each replica that fits into memory.
        knee: The smallest batch on each replica that is about as fast per example as the fastest; None is `largest`.
        rates: The speed of batch sizes on each replica, in examples per second. With the noise scale it decides.
        noise: The noise scale; None if it was not measured.
        replicas: The number of replicas.
        examples: The number of training examples.
        global_batch_size: The batch to advise the other settings for; None chooses it.
    Raises:
        ConfigError: A number is below 1.
    Example:
        >>> training = TrainingConfig(global_batch_size=32, optimizer="sgd", learning_rate=0.1, epochs=90)
        >>> found = advise(training, largest=512, knee=128, examples=50_000)
        >>> print(found)
        advised settings
          setting            value  reason
          global_batch_size  128    the smallest batch that is about as fast as the fastest
          accumulate         1      up to 512 examples on a device at once
          learning_rate      0.4    times 4: batches of 128 for 32, in proportion for sgd
          warmup_epochs      5      the rate rises from zero to 4 times the former (Goyal et al. 2017)
          steps_per_epoch    391    50,000 examples
        >>> found.settings
        {'global_batch_size': 128, 'base_batch_size': 32, 'warmup_epochs': 5.0}
    """
    for name, value in (
        ("largest", largest),
        ("knee", knee),
        ("replicas", replicas),
        ("examples", examples),
        ("global_batch_size", global_batch_size),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1. Received: {name}={value}.")
    if global_batch_size is not None:
        size, reason = global_batch_size, "as asked"
    else:
        size, reason = _choose(training, largest, knee or largest, rates or {}, noise, replicas, examples)
        if knee is None and reason == SMALLEST:
            reason = "the largest that was trained; its speed is unknown"
    decisions = [Decision(setting="global_batch_size", value=str(size), reason=reason)]
    settings: dict[str, int | float] = {"global_batch_size": size}

    def decide(setting: str, value: Any, reason: str) -> None:
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        decisions.append(Decision(setting=setting, value=shown, reason=reason))

    if noise is not None:
        decide("noise_scale", "unknown" if noise.noise_scale is None else float(noise.noise_scale), in_words(noise))
    share = -(-size // replicas)
    accumulate = -(-share // largest)
    micro = -(-share // accumulate)
    if accumulate > 1:
        decide("accumulate", accumulate, f"a device trains at most {largest} of its {share} examples at once")
    else:
        decide("accumulate", 1, f"up to {largest} examples on a device at once")
    settings["accumulate"] = accumulate
    rate, factor = _rate(training, size, settings, decide)
    _warm_up(training, factor, settings, decide)
    _epochs(training, size, noise, settings, decide)
    steps = _steps(training, size, examples, settings, decide)
    present = {name: getattr(training, name) for name in settings}
    return BatchAdvice(
        global_batch_size=size,
        micro_batch_size=micro,
        learning_rate=rate,
        steps_per_epoch=steps,
        settings={name: value for name, value in settings.items() if value != present[name]},
        decisions=tuple(decisions),
    )


def _choose(
    training: TrainingConfig,
    largest: int,
    knee: int,
    rates: Mapping[int, float],
    noise: NoiseEstimate | None,
    replicas: int,
    examples: int | None,
) -> tuple[int, str]:
    """Returns the batch with which the training is done first, and the reason."""
    scale = None if noise is None else noise.noise_scale
    most = largest * replicas if examples is None else min(largest * replicas, examples // replicas * replicas)
    most = max(most, replicas)
    speeds = {size * replicas: rate for size, rate in rates.items() if size * replicas <= most}
    if scale is None or not speeds:
        size = min(knee * replicas, most)
        if scale is not None and scale < size:
            near = 2 ** max(round(math.log2(scale / replicas)), 0) * replicas
            return min(near, size), f"near the noise scale: {size} examples would be faster each, but save few steps"
        if size < knee * replicas:
            if most < largest * replicas:
                return size, f"all {examples:,} training examples"
            return size, "the most that fits into memory at once"
        return size, SMALLEST
    # in proportion to the time until a loss is reached
    times = {size: (size + scale) / rate for size, rate in speeds.items()}
    best = min(times.values())
    if times.get(training.global_batch_size, CLOSE * best * 2) <= CLOSE * best:
        return training.global_batch_size, "as before: no other batch reaches a loss over 5% sooner"
    size = min(size for size, time in times.items() if time <= CLOSE * best)
    return size, f"reaches a loss soonest, with a speed of {speeds[size]:,.0f} examples/s and this noise scale"


def _rate(training: TrainingConfig, size: int, settings: dict[str, int | float], decide: Any) -> tuple[float, float]:
    """Decides the learning rate. Returns it, and its factor over the present one."""
    if not isinstance(training.optimizer, str):
        factor = scaled_learning_rate(1.0, training.global_batch_size, size, training.optimizer)
        rate = float(training.optimizer.learning_rate) * factor
        decide("learning_rate", rate, f"times {factor:.3g}; set it where the optimizer is made")
        return rate, factor
    base = training.base_batch_size or training.global_batch_size
    if size != training.global_batch_size or training.base_batch_size is not None:
        settings["base_batch_size"] = base
    changed = replace(training, global_batch_size=size, base_batch_size=base)
    factor, reason = learning_rate_factor(changed)
    rate = training.learning_rate * factor
    decide("learning_rate", rate, reason)
    return rate, factor / learning_rate_factor(training)[0]


def _warm_up(training: TrainingConfig, factor: float, settings: dict[str, int | float], decide: Any) -> None:
    if factor <= 1 or not isinstance(training.optimizer, str):
        return
    epochs = max(training.warmup_epochs, min(WARMUP_EPOCHS, WARMUP_SHARE * training.epochs))
    settings["warmup_epochs"] = epochs
    decide("warmup_epochs", epochs, f"the rate rises from zero to {factor:.3g} times the former (Goyal et al. 2017)")


def _epochs(
    training: TrainingConfig, size: int, noise: NoiseEstimate | None, settings: dict[str, int | float], decide: Any
) -> None:
    scale = None if noise is None else noise.noise_scale
    if scale is None:
        return
    factor = (size + scale) / (training.global_batch_size + scale)
    epochs = round(training.epochs * factor)
    if epochs > training.epochs:
        settings["epochs"] = epochs
        decide("epochs", epochs, f"times {factor:.3g}, the examples that the same loss needs at this noise scale")


def _steps(
    training: TrainingConfig, size: int, examples: int | None, settings: dict[str, int | float], decide: Any
) -> int | None:
    if training.steps_per_epoch is not None:
        steps = max(round(training.steps_per_epoch * training.global_batch_size / size), 1)
        settings["steps_per_epoch"] = steps
        decide("steps_per_epoch", steps, f"as many examples as in {training.steps_per_epoch} steps before")
        return steps
    if examples is None:
        return None
    steps = examples // size if training.drop_remainder else -(-examples // size)
    few = "; so few steps need more epochs, or a smaller batch" if steps < FEW_STEPS else ""
    decide("steps_per_epoch", steps, f"{examples:,} examples{few}")
    return steps
