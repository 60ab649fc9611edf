"""Quantization: ranges from calibration data, written into the graph as fake-quantization annotations."""

from tfopt.quantization.config import QuantizationConfig
from tfopt.quantization.quantize import QuantizedModel, quantize

__all__ = ["QuantizationConfig", "QuantizedModel", "quantize"]
