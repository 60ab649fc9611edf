from .config import DistillationConfig, FeaturePair, TeacherConfig
from .distill import distill, end_distillation

__all__ = ["DistillationConfig", "FeaturePair", "TeacherConfig", "distill", "end_distillation"]
