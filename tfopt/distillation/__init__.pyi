from .config import DistillationConfig
from .distill import distill, end_distillation

__all__ = ["DistillationConfig", "distill", "end_distillation"]
