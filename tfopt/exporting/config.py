"""Settings of an export."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tfopt.errors import ConfigError, unknown_name
from tfopt.quantization.config import QuantizationConfig

FORMATS = ("saved_model",)
PRECISIONS = ("float32", "int8")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to write.

    Example:
        >>> ExportConfig(precision="int8").format
        'saved_model'
    """

    format: Literal["saved_model"] = "saved_model"
    """The artifact's format."""
    precision: Literal["float32", "int8"] = "float32"
    """float32, or int8 with calibration data."""
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    """How to calibrate; used for int8 only."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise unknown_name("format", self.format, FORMATS)
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", self.precision, PRECISIONS)
        if not isinstance(self.quantization, QuantizationConfig):
            raise ConfigError(
                f"quantization must be a QuantizationConfig. Received: quantization={self.quantization!r}."
            )
        if self.quantization.training:
            raise ConfigError(
                "training must be False in an export. Received: quantization=QuantizationConfig(training=True, ...). "
                "Train what tfopt.quantize makes of the model with it, and export that: its ranges are in it."
            )
