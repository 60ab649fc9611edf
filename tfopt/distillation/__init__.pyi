from .cached_teacher import CachedTeacher, cache_teacher
from .config import DistillationConfig, FeaturePair, TeacherConfig
from .distill import distill, end_distillation

__all__ = [
    "CachedTeacher",
    "DistillationConfig",
    "FeaturePair",
    "TeacherConfig",
    "cache_teacher",
    "distill",
    "end_distillation",
]
