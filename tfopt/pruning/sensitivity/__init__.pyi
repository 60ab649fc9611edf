from .curves import Sensitivity
from .measure import sensitivity

__all__ = ["Sensitivity", "sensitivity"]
