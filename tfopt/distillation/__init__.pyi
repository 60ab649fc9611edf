from .config import DistillationConfig, FeaturePair
from .distill import distill, end_distillation

__all__ = ["DistillationConfig", "FeaturePair", "distill", "end_distillation"]
