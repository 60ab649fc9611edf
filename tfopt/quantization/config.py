"""Settings of quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfopt.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Static int8 post-training quantization: 8-bit activations per tensor, 8-bit weights per channel.

    Example:
        >>> QuantizationConfig(calibration_examples=64).observer
        'minmax'
    """

    observer: Literal["minmax"] = "minmax"
    """How activation ranges are measured on the calibration data."""
    calibration_examples: int = 256
    """At most this many examples of the calibration data are run through the model."""
    exclude: tuple[str, ...] = ()
    """Names (or shell-style patterns such as '*/dense_2/*') of graph nodes that stay float."""

    def __post_init__(self) -> None:
        if self.observer not in ("minmax",):
            raise ConfigError(f"observer must be 'minmax'. Received: observer={self.observer!r}.")
        if self.calibration_examples < 1:
            raise ConfigError(
                "calibration_examples must be at least 1. Received: "
                f"calibration_examples={self.calibration_examples}. 100 to 500 examples are usual."
            )
