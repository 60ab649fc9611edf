from .aware_training.prepare import quantization_report
from .config import QuantizationConfig
from .quantize import quantize
from .quantized_model import QuantizedModel
from .weight_only import WeightOnlyConfig

__all__ = ["QuantizationConfig", "QuantizedModel", "WeightOnlyConfig", "quantization_report", "quantize"]
