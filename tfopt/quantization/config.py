"""Settings of quantization."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval, Lt

from tfopt.errors import ConfigError
from tfopt.settings.flags import BY_NAME
from tfopt.settings.validation import Remedy, check_fields, check_name, check_value

ObserverName = Literal["minmax", "moving_average", "percentile", "mse", "entropy"]
Rounding = Literal["nearest", "adaptive"]
Metric = Callable[[Any, Any], float]
FREEZE = Remedy("None means never, 0 from the start.")
METRICS = ("accuracy", "categorical_accuracy", "binary_accuracy", "binary_accuracy_from_logits")


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Static int8 quantization, after training or while training: 8-bit activations per tensor, weights per channel.

    Example:
        >>> QuantizationConfig(calibration_examples=64).observer
        'mse'
    """

    observer: ObserverName = "mse"
    """How activation ranges are measured on the calibration data: "mse" takes the range with the smallest squared error
    of rounding and cutting off together; "minmax" covers every value; "percentile" and "entropy" cut outliers off,
    "moving_average" lets rare ones count less."""
    percentile: Annotated[float, Interval(ge=50, le=100), Remedy("99.9 to 99.999 is usual.")] = 99.99
    """How many percent of a tensor's values the range covers, with observer="percentile"."""
    calibration_examples: Annotated[int, Ge(1), Remedy("100 to 500 examples are usual.")] = 256
    """At most this many examples of the calibration data are run through the model."""
    exclude: tuple[str, ...] = ()
    """Names (or shell-style patterns such as '*/dense_2/*') of graph nodes that stay float; for training also those of
    layers."""
    weight_bits: int = 8
    """Width of the quantized weights, 8 or 4. Weights of 4 bits are computed by the same int8 kernels."""
    reduce_range: bool = True
    """Whether weights use 7 of 8 bits where 8 could overflow on processors without VNNI, so that the model computes the
    same on every x86-64 processor. Without it the model needs VNNI or AMX for right results."""
    equalization: bool = True
    """Whether to rescale the channels between layers, which changes nothing in float, where rounding errors are smaller
    for it. Costs one more run of the calibration data."""
    smooth_quant: Annotated[float, Interval(ge=0, le=1), Remedy("0 is off, and 0.5 is usual.")] = 0.5
    """How much of the spread between channels to move from a normalisation's result into the weights that read it,
    where rounding errors are smaller for it: alpha of SmoothQuant, up to 1. 0 leaves all as it is."""
    bias_correction: bool = True
    """Whether to take the mean error that quantization causes in each channel off its bias. Costs about three more runs
    of the calibration data."""
    rounding: Rounding = "nearest"
    """How weights are rounded: each to the nearest step, or "adaptive", up or down as keeps each layer's results on the
    calibration data closest (AdaRound)."""
    max_accuracy_drop: Annotated[float, Ge(0), Lt(math.inf)] | None = None
    """How much of the metric may be lost, 0.005 being half a point of accuracy: nodes go back to float, as few as can
    be, until no more is. Needs labels. None sets no bound."""
    metric: Annotated[str | Metric, BY_NAME] = "accuracy"
    """What max_accuracy_drop is measured by: "accuracy", which works out what kind of classifier the model is, or
    "categorical_accuracy", "binary_accuracy" (of probabilities) or "binary_accuracy_from_logits", which say so; in
    Python also a function (labels, outputs) -> float, where more is better."""
    training: bool = False
    """Whether `tfopt.quantize` returns a Keras model that trains with the values it will have in int8."""
    learned_ranges: bool = False
    """With training: whether the optimizer trains the ranges (LSQ). Else those of activations are moving averages,
    starting from the calibrated ones, and those of weights follow the largest weights."""
    freeze_ranges_after: Annotated[Annotated[int, Ge(0)] | None, FREEZE] = None
    """With training: after so many training calls of the model the activations' ranges and learned ones stay."""
    freeze_batch_norm_after: Annotated[Annotated[int, Ge(0)] | None, FREEZE] = None
    """With training: after so many training calls batch norms use their moving statistics, as at inference."""
    epochs: Annotated[int, Ge(1)] = 5
    """With training: epochs that a recipe trains the quantized model for."""
    learning_rate: Annotated[float, Gt(0)] | None = None
    """With training: learning rate of a recipe's training of the quantized model; by default that of its training."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_value("weight_bits", self.weight_bits, Literal[8, 4])
        check_metric(self.metric)
        self._check_drop()
        self._check_training()

    def _check_drop(self) -> None:
        drop = self.max_accuracy_drop
        if drop is not None and isinstance(self.metric, str) and drop >= 1:
            raise ConfigError(
                f"max_accuracy_drop must be in [0, 1). Received: max_accuracy_drop={drop}. It is a share of the "
                f"examples; did you mean {drop / 100:g}?"
            )

    def _check_training(self) -> None:
        training_only = ("learned_ranges", "freeze_ranges_after", "freeze_batch_norm_after")
        ignored = [name for name in training_only if getattr(self, name) not in (None, False)]
        if ignored and not self.training:
            raise ConfigError(
                f"{ignored[0]} is a setting of quantization-aware training. "
                f"Received: {ignored[0]}={getattr(self, ignored[0])} with training=False. Set training=True."
            )


def check_metric(metric: Any) -> None:
    """Raises ConfigError unless a metric is one of METRICS or a function.

    Example:
        >>> check_metric("top5")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: Unknown metric 'top5'. Expected one of: 'accuracy', 'binary_accuracy', ...
    """
    check_name("metric", metric, METRICS, or_a="a function (labels, outputs) -> float", accepts=callable)
