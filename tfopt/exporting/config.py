"""Settings of an export."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from tfopt.errors import ConfigError, unknown_name
from tfopt.quantization.config import QuantizationConfig

FORMATS = ("saved_model",)
PRECISIONS = ("float32", "int8")
Int8Nodes = Literal["faster", "all"]


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
    int8_nodes: Int8Nodes = "faster"
    """Which nodes run in int8: those that are faster so on this machine, by the clock, or all that can."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """The batch sizes at which int8_nodes="faster" times the model; each counts alike."""
    node_times: str | None = None
    """A JSON file of the nodes' times. Where it exists it decides, not this machine's clock; else it is written."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise unknown_name("format", self.format, FORMATS)
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", self.precision, PRECISIONS)
        if self.int8_nodes not in get_args(Int8Nodes):
            raise unknown_name("int8_nodes", self.int8_nodes, get_args(Int8Nodes))
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ConfigError(
                f"batch_sizes must name at least one size, each at least 1. Received: batch_sizes={self.batch_sizes}."
            )
        if not isinstance(self.quantization, QuantizationConfig):
            raise ConfigError(
                f"quantization must be a QuantizationConfig. Received: quantization={self.quantization!r}."
            )
        if self.quantization.training:
            raise ConfigError(
                "training must be False in an export. Received: quantization=QuantizationConfig(training=True, ...). "
                "Train what tfopt.quantize makes of the model with it, and export that: its ranges are in it."
            )
