from .config import BatchSizeConfig, TuneConfig
from .find_batch_size import find_batch_size
from .report import BatchSizeReport
from .search import tune
from .tune_report import TuneReport

__all__ = ["BatchSizeConfig", "BatchSizeReport", "TuneConfig", "TuneReport", "find_batch_size", "tune"]
