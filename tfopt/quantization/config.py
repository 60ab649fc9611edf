"""Settings of quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tfopt.errors import ConfigError

ObserverName = Literal["minmax", "moving_average", "percentile", "mse", "entropy"]


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Static int8 post-training quantization: 8-bit activations per tensor, 8-bit weights per channel.

    Example:
        >>> QuantizationConfig(calibration_examples=64).observer
        'minmax'
    """

    observer: ObserverName = "minmax"
    """How activation ranges are measured on the calibration data: "minmax" covers every value; "percentile", "mse" and
    "entropy" cut outliers off, "moving_average" lets rare ones count less."""
    percentile: float = 99.99
    """How many percent of a tensor's values the range covers, with observer="percentile"."""
    calibration_examples: int = 256
    """At most this many examples of the calibration data are run through the model."""
    exclude: tuple[str, ...] = ()
    """Names (or shell-style patterns such as '*/dense_2/*') of graph nodes that stay float."""

    def __post_init__(self) -> None:
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
