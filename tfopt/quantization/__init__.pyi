from .config import QuantizationConfig
from .quantize import quantize
from .quantized_model import QuantizedModel
from .training import quantization_report
from .weight_only import WeightOnlyConfig

__all__ = ["QuantizationConfig", "QuantizedModel", "WeightOnlyConfig", "quantization_report", "quantize"]
