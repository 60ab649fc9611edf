"""Makes the optimizer of a training: the schedule of its learning rate, weight decay and moving averages.

Without a warm-up, the learning rate falls from its highest value to zero along half a cosine, or stays. With a warm-up,
it first rises from zero in a straight line.

A larger batch allows a larger learning rate, because its gradient has less noise. With sgd, the rate grows in
proportion to the batch size (Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677). Optimizers that
divide by the size of the gradients, such as adam, need the square root of it (Malladi et al., "On the SDEs and Scaling
Rules for Adaptive Gradient Algorithms", NeurIPS 2022, arXiv:2205.10287).
"""

from __future__ import annotations

import math
from typing import Any

import keras

from tfopt.compat.optimizers import decay_only
from tfopt.errors import ConfigError
from tfopt.models.unbuilt_copy import unbuilt_copy
from tfopt.training.config import TrainingConfig

# Their update is in proportion to the gradient.
IN_PROPORTION = ("sgd",)


def learning_rate_factor(config: TrainingConfig) -> tuple[float, str]:
    """Returns the factor of the learning rate for the size of the batch, and the reason.

    Example:
        >>> learning_rate_factor(TrainingConfig(optimizer="sgd", base_batch_size=256, global_batch_size=1024))
        (4.0, 'times 4: batches of 1024 for 256, in proportion for sgd')
    """
    base, size = config.base_batch_size, config.global_batch_size
    if base is None:
        return 1.0, "as asked"
    if base == size:
        return 1.0, f"as asked, for batches of {base}"
    if str(config.optimizer).lower() in IN_PROPORTION:
        factor, rule = size / base, "in proportion"
    else:
        factor, rule = math.sqrt(size / base), "by the square root of the ratio"
    return factor, f"times {factor:.3g}: batches of {size} for {base}, {rule} for {config.optimizer}"


def make_optimizer(
    config: TrainingConfig,
    *,
    learning_rate: float | None = None,
    steps: int,
    warmup_steps: int = 0,
    averages: bool = True,
) -> keras.optimizers.Optimizer:
    """Makes the optimizer of one fit. Call it under `plan.scope()`.

    An optimizer object in `config.optimizer` has settings of its own; the result is a new one with these settings.

    Args:
        learning_rate: Learning rate instead of the configuration's. It is scaled for the batch size like that one.
        steps: Number of steps of the fit, at the end of which a cosine reaches zero.
        warmup_steps: Number of steps in which the learning rate rises, before it falls.
        averages: Whether the model has the moving average of its weights at the end, if the configuration asks for it.
    Raises:
        ConfigError: `config.optimizer_arguments` does not fit the optimizer, or an optimizer of an own class would lose
            settings that its `get_config` does not return.
    Example:
        >>> config = TrainingConfig(optimizer="adamw", weight_decay=0.05, optimizer_arguments={"beta_2": 0.95})
        >>> optimizer = make_optimizer(config, steps=100)
        >>> type(optimizer).__name__, optimizer.weight_decay, optimizer.beta_2
        ('AdamW', 0.05, 0.95)
    """
    if not isinstance(config.optimizer, str):
        # A new optimizer: its slots belong to one fit of one model.
        return unbuilt_copy(config.optimizer)
    rate = (config.learning_rate if learning_rate is None else learning_rate) * learning_rate_factor(config)[0]
    settings: dict[str, Any] = {"learning_rate": _schedule(config, rate, steps, warmup_steps)}
    if config.weight_decay is not None:
        settings["weight_decay"] = config.weight_decay
    if config.ema_momentum is not None and averages:
        settings |= {"use_ema": True, "ema_momentum": config.ema_momentum}
    arguments = dict(config.optimizer_arguments)
    # `keras.optimizers.get` does not know all of them.
    classes = {name.lower(): value for name, value in vars(keras.optimizers).items() if isinstance(value, type)}
    try:
        made = classes[config.optimizer.lower()](**settings, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer_arguments must fit the optimizer {config.optimizer!r}. Received: "
            f"optimizer_arguments={arguments} ({' '.join(str(error).split())}). Correct their names and values."
        ) from error
    decay_only(made, is_decayed)
    return made


def is_decayed(variable: Any) -> bool:
    """Returns whether weight decay shrinks a variable: kernels and embeddings, not biases, scales and offsets."""
    return len(variable.shape) > 1 and "bias" not in variable.name  # the biases of MultiHeadAttention have two axes


def _schedule(config: TrainingConfig, rate: float, steps: int, warmup_steps: int) -> Any:
    cosine = keras.optimizers.schedules.CosineDecay
    if not warmup_steps:
        return cosine(rate, steps) if config.decay == "cosine" else rate
    stays = 0.0 if config.decay == "cosine" else 1.0
    return cosine(0.0, max(1, steps - warmup_steps), alpha=stays, warmup_target=rate, warmup_steps=warmup_steps)
