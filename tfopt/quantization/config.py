"""Settings of quantization."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval, Lt

from tfopt.errors import ConfigError
from tfopt.settings.flags import BY_NAME
from tfopt.settings.validation import Remedy, check_fields, check_value
from tfopt.tasks.scorer import ACCURACIES, check_metric

ObserverName = Literal["minmax", "moving_average", "percentile", "mse", "entropy"]
Rounding = Literal["nearest", "adaptive"]
FREEZE = Remedy("Give a number of training calls; None means never.")


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Static int8 quantization, after or during training. Activations have a scale per tensor, weights per channel.

    Example:
        >>> QuantizationConfig(calibration_examples=64).observer
        'mse'
    """

    observer: ObserverName = "mse"
    """Method that finds activation ranges on the calibration data: "mse" minimizes the squared error of rounding and
    clipping together; "minmax" covers every value; "percentile" and "entropy" clip outliers; "moving_average" gives
    rare outliers less weight."""
    percentile: Annotated[float, Interval(ge=50, le=100), Remedy("99.9 to 99.999 is usual.")] = 99.99
    """Share of a tensor's values that the range covers, in per cent, with observer="percentile"."""
    calibration_examples: Annotated[int, Ge(1), Remedy("100 to 500 examples are usual.")] = 256
    """Largest number of examples of the calibration data to run through the model."""
    exclude: tuple[str, ...] = ()
    """Names (or shell-style patterns such as '*/dense_2/*') of graph nodes that stay float. With training also names of
    layers."""
    weight_bits: int = 8
    """Number of bits of the quantized weights, 8 or 4. The same int8 kernels compute with 4-bit weights."""
    reduce_range: bool = True
    """Whether weights use 7 of 8 bits where 8 bits could overflow on processors without VNNI. The results are then the
    same on every x86-64 processor. If False, the model needs VNNI or AMX for correct results."""
    equalization: bool = True
    """Whether to rescale the channels between two layers where this makes the rounding errors smaller. The results in
    float stay the same. Costs one more run of the calibration data."""
    smooth_quant: Annotated[float, Interval(ge=0, le=1), Remedy("0 is off, and 0.5 is usual.")] = 0.5
    """Alpha of SmoothQuant, from 0 to 1: how much of the spread between channels moves from the output of a
    normalization into the next weights, where this makes the rounding errors smaller. 0 is off."""
    bias_correction: bool = True
    """Whether to subtract the mean quantization error of each channel from its bias. Costs about three more runs of the
    calibration data."""
    rounding: Rounding = "nearest"
    """Rounding of weights: "nearest" rounds each weight to the nearest step; "adaptive" (AdaRound) rounds up or down so
    that the outputs of each layer change least on the calibration data."""
    max_accuracy_drop: Annotated[float, Ge(0), Lt(math.inf)] | None = None
    """Largest loss of the metric, for example 0.005 for half a point of accuracy, or 0.02 for bits per byte. Nodes
    return to float, as few as possible, until the loss is within this bound. Needs labels. None sets no bound."""
    metric: Annotated[str | Any, BY_NAME] = "accuracy"
    """Metric of max_accuracy_drop. "accuracy" finds out the kind of classifier; "categorical_accuracy",
    "binary_accuracy" (for probabilities) and "binary_accuracy_from_logits" name the kind. "mean_iou", "bits_per_byte"
    and "mean_absolute_error" are for other tasks; a recipe takes the score of its task. In Python also a
    tfopt.tasks.Score, or a function (labels, outputs) -> float, where a higher value is better."""
    training: bool = False
    """Whether `tfopt.quantize` returns a Keras model for quantization-aware training, which trains with int8 values."""
    learned_ranges: bool = False
    """With training: whether the optimizer trains the ranges (LSQ). If False, activation ranges are moving averages,
    which start from the calibrated ranges, and weight ranges follow the largest weights."""
    freeze_ranges_after: Annotated[Annotated[int, Ge(0)] | None, FREEZE] = None
    """With training: number of training calls after which activation ranges and learned ranges stay fixed. None means
    never, 0 from the start."""
    freeze_batch_norm_after: Annotated[Annotated[int, Ge(0)] | None, FREEZE] = None
    """With training: number of training calls after which batch normalization uses its moving statistics, as at
    inference. None means never, 0 from the start."""
    epochs: Annotated[int, Ge(1)] = 5
    """With training: number of epochs for which a recipe trains the quantized model."""
    learning_rate: Annotated[float, Gt(0), Lt(math.inf)] | None = None
    """With training: learning rate for the quantized model in a recipe. By default the one of the training."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_value("weight_bits", self.weight_bits, Literal[8, 4])
        check_metric(self.metric)
        drop = self.max_accuracy_drop
        if drop is not None and self.metric in (*ACCURACIES, "mean_iou") and drop >= 1:
            raise ConfigError(
                f"max_accuracy_drop must be in [0, 1). Received: max_accuracy_drop={drop}. It is a share of the "
                f"examples; did you mean {drop / 100:g}?"
            )
        training_only = ("learned_ranges", "freeze_ranges_after", "freeze_batch_norm_after")
        given = {name: getattr(self, name) for name in training_only}
        ignored = [name for name, value in given.items() if value is not None and value is not False]
        if ignored and not self.training:
            raise ConfigError(
                f"{ignored[0]} is a setting of quantization-aware training. "
                f"Received: {ignored[0]}={getattr(self, ignored[0])} with training=False. Set training=True."
            )


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a node's name matches one of the patterns, with or without the numbers that Keras adds to layer names.

    Keras opens the scope of a layer "head" twice, so the names of its nodes start with "head_1".
    """
    names = (name, re.sub(r"_\d+(?=/)", "", name))
    return any(fnmatch.fnmatchcase(candidate, pattern) for candidate in names for pattern in patterns)


def check_exclude(patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raises ConfigError unless each pattern matches one of the names."""
    known = list(names)
    for pattern in patterns:
        if not any(matches(name, (pattern,)) for name in known):
            raise ConfigError(
                f"exclude must name nodes of the graph (or, for training, layers of the model). Received: "
                f"exclude={tuple(patterns)}, where {pattern!r} matches none. To see the names, run without exclude "
                "and read the report."
            )
