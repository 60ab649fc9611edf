"""Quantization: ranges from calibration data, written into the graph as fake-quantization annotations."""

from tfopt.quantization.config import QuantizationConfig
from tfopt.quantization.quantize import QuantizedModel, quantize
from tfopt.quantization.training import quantization_report

__all__ = ["QuantizationConfig", "QuantizedModel", "quantization_report", "quantize"]
