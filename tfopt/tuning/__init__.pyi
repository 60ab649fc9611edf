from .config import BatchSizeConfig
from .find_batch_size import find_batch_size
from .report import BatchSizeReport

__all__ = ["BatchSizeConfig", "BatchSizeReport", "find_batch_size"]
