"""Settings of quantization."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from tfopt.errors import ConfigError, check_field_types, unknown_name
from tfopt.flags import BY_NAME

ObserverName = Literal["minmax", "moving_average", "percentile", "mse", "entropy"]
Rounding = Literal["nearest", "adaptive"]
Metric = Callable[[Any, Any], float]
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
    percentile: float = 99.99
    """How many percent of a tensor's values the range covers, with observer="percentile"."""
    calibration_examples: int = 256
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
    smooth_quant: float = 0.5
    """How much of the spread between channels to move from a normalisation's result into the weights that read it,
    where rounding errors are smaller for it: alpha of SmoothQuant, up to 1. 0 leaves all as it is."""
    bias_correction: bool = True
    """Whether to take the mean error that quantization causes in each channel off its bias. Costs about three more runs
    of the calibration data."""
    rounding: Rounding = "nearest"
    """How weights are rounded: each to the nearest step, or "adaptive", up or down as keeps each layer's results on the
    calibration data closest (AdaRound)."""
    max_accuracy_drop: float | None = None
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
    freeze_ranges_after: int | None = None
    """With training: after so many training calls of the model the activations' ranges and learned ones stay."""
    freeze_batch_norm_after: int | None = None
    """With training: after so many training calls batch norms use their moving statistics, as at inference."""
    epochs: int = 5
    """With training: epochs that a recipe trains the quantized model for."""
    learning_rate: float | None = None
    """With training: learning rate of a recipe's training of the quantized model; by default that of its training."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.observer not in get_args(ObserverName):
            raise ConfigError(
                f"observer must be one of {', '.join(map(repr, get_args(ObserverName)))}. "
                f"Received: observer={self.observer!r}."
            )
        if not 50 <= self.percentile <= 100:
            raise ConfigError(
                f"percentile must be between 50 and 100. Received: percentile={self.percentile}. "
                "99.9 to 99.999 is usual."
            )
        if self.calibration_examples < 1:
            raise ConfigError(
                "calibration_examples must be at least 1. Received: "
                f"calibration_examples={self.calibration_examples}. 100 to 500 examples are usual."
            )
        if self.weight_bits not in (4, 8):
            raise ConfigError(f"weight_bits must be 8 or 4. Received: weight_bits={self.weight_bits}.")
        if not 0 <= self.smooth_quant <= 1:
            raise ConfigError(
                f"smooth_quant must be from 0 (off) to 1. Received: smooth_quant={self.smooth_quant}. 0.5 is usual."
            )
        if self.rounding not in get_args(Rounding):
            raise unknown_name("rounding", self.rounding, get_args(Rounding))
        check_metric(self.metric)
        self._check_drop()
        self._check_training()

    def _check_drop(self) -> None:
        drop = self.max_accuracy_drop
        if drop is None:
            return
        if not (math.isfinite(drop) and drop >= 0):
            raise ConfigError(f"max_accuracy_drop must be at least 0. Received: max_accuracy_drop={drop}.")
        if isinstance(self.metric, str) and drop >= 1:
            raise ConfigError(
                f"max_accuracy_drop must be in [0, 1). Received: max_accuracy_drop={drop}. It is a share of the "
                f"examples; did you mean {drop / 100:g}?"
            )

    def _check_training(self) -> None:
        for name in ("freeze_ranges_after", "freeze_batch_norm_after"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(
                    f"{name} must not be negative. Received: {name}={value}. None means never, 0 from the start."
                )
        if self.epochs < 1:
            raise ConfigError(f"epochs must be at least 1. Received: epochs={self.epochs}.")
        if self.learning_rate is not None and self.learning_rate <= 0:
            raise ConfigError(f"learning_rate must be positive. Received: learning_rate={self.learning_rate:g}.")
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
    if isinstance(metric, str):
        if metric not in METRICS:
            raise unknown_name("metric", metric, METRICS)
    elif not callable(metric):
        names = ", ".join(map(repr, METRICS))
        raise ConfigError(
            f"metric must be one of {names}, or a function (labels, outputs) -> float. Received: metric={metric!r}."
        )
