"""Settings of an export."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from annotated_types import Ge, MinLen

from tfopt.errors import ConfigError
from tfopt.quantization.config import QuantizationConfig
from tfopt.quantization.weight_only.config import WeightOnlyConfig
from tfopt.settings.validation import check_fields

Precision = Literal["float32", "float16", "bfloat16", "int8", "int8_weight_only", "int4_weight_only"]
Int8Nodes = Literal["faster", "all"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to write.

    Example:
        >>> ExportConfig(precision="int8").format
        'saved_model'
    """

    format: Literal["saved_model"] = "saved_model"
    """The artifact's format."""
    precision: Precision = "float32"
    """"int8" runs int8 kernels and needs calibration data. The others compute in float32, with the weights stored as
    named: "int8_weight_only" and "int4_weight_only" in integers with scales, "float16" and "bfloat16" in half of
    float32's bits."""
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    """How to calibrate; used for int8 only."""
    int8_nodes: Int8Nodes = "faster"
    """Which nodes run in int8: those that are faster so on this machine, by the clock, or all that can."""
    batch_sizes: Annotated[tuple[Annotated[int, Ge(1)], ...], MinLen(1)] = (1, 8)
    """The batch sizes at which int8_nodes="faster" times the model; each counts alike."""
    node_times: str | None = None
    """A JSON file of the nodes' times. Where it exists it decides, not this machine's clock; else it is written."""
    weight_only: WeightOnlyConfig = field(default_factory=WeightOnlyConfig)
    """How weights are stored and decoded; not used for float32 and int8."""
    float_fallback: bool = False
    """With int8: also write the signature "serving_float", which computes in float32 with the same int8 weights, for a
    TensorFlow without the int8 kernels."""
    xla_signature: bool = False
    """Also write the signature "serving_xla", which XLA compiles when it is first called; with int8 it is the float
    one."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.float_fallback and self.precision not in ("float32", "int8"):
            raise ConfigError(
                f"float_fallback belongs to precision='int8'. Received: precision={self.precision!r}, whose artifact "
                "computes in float32 anyway. Leave it out."
            )
        if self.quantization.training:
            raise ConfigError(
                "training must be False in an export. Received: quantization=QuantizationConfig(training=True, ...). "
                "Train what tfopt.quantize makes of the model with it, and export that: its ranges are in it."
            )
