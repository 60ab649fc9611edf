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
from typing import Annotated, Any

import keras
from annotated_types import Ge, Gt, Lt

from tfopt.compat.optimizers import decay_only, inner_optimizer
from tfopt.errors import ConfigError
from tfopt.models.unbuilt_copy import unbuilt_copy
from tfopt.settings.validation import check_value
from tfopt.training.config import TrainingConfig

# Their update is in proportion to the gradient.
IN_PROPORTION = ("sgd",)


def scaled_learning_rate(
    rate: float, from_batch: int, to_batch: int, optimizer: str | keras.optimizers.Optimizer
) -> float:
    """Returns the learning rate for batches of another size than those it was chosen for.

    SGD, also with momentum, needs a rate in proportion to the batch size, and other optimizers the square root of that.
    Both hold up to the noise scale of the gradients (`tfopt.NoiseScale`): from there on, a higher rate diverges. With a
    factor of more than two, let the rate rise from zero over some epochs (`warmup_epochs`; the paper on SGD takes 5).

    For Adam, the rule of Malladi et al. also multiplies 1 - beta_1 and 1 - beta_2 by the ratio of the batch sizes, and
    divides epsilon by its root, so that averages reach back over as many examples as before. That is not done here: at
    8 times the batch, beta_1 would fall from 0.9 to 0.2.

    Args:
        rate: The learning rate for batches of from_batch examples.
        from_batch, to_batch: Numbers of examples of a step, over all replicas and micro-batches.
        optimizer: A Keras optimizer, or its name.
    Raises:
        ConfigError: An argument is out of range.
    Reference:
        Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677.
        Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", NeurIPS 2022,
        arXiv:2205.10287.
    Example:
        >>> scaled_learning_rate(0.1, 256, 1024, "sgd"), scaled_learning_rate(0.001, 256, 1024, "adamw")
        (0.4, 0.002)
    """
    check_value("rate", rate, Annotated[float, Gt(0), Lt(math.inf)])
    for name, value in (("from_batch", from_batch), ("to_batch", to_batch)):
        check_value(name, value, Annotated[int, Ge(1)])
    return rate * _factor(from_batch, to_batch, optimizer)[0]


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
    factor, rule = _factor(base, size, config.optimizer)
    return factor, f"times {factor:.3g}: batches of {size} for {base}, {rule}"


def _factor(base: int, size: int, optimizer: Any) -> tuple[float, str]:
    """Returns the factor of a learning rate for batches of `size` instead of `base` examples, and the rule."""
    name = optimizer if isinstance(optimizer, str) else type(inner_optimizer(optimizer)).__name__
    if name.lower() in IN_PROPORTION:
        return size / base, f"in proportion for {name}"
    return math.sqrt(size / base), f"by the square root of the ratio for {name}"


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
