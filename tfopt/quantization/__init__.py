"""Quantization: ranges from calibration data, written into the graph as fake-quantization annotations."""

from tfopt.quantization.config import QuantizationConfig
from tfopt.quantization.quantize import quantize
from tfopt.quantization.quantized_model import QuantizedModel
from tfopt.quantization.training import quantization_report
from tfopt.quantization.weight_only import WeightOnlyConfig

__all__ = ["QuantizationConfig", "QuantizedModel", "WeightOnlyConfig", "quantization_report", "quantize"]
