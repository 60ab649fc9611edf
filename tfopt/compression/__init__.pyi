from .config import CompressionConfig
from .front import CompressedModel, CompressionReport, TrialRecord
from .search import compress

__all__ = ["CompressedModel", "CompressionConfig", "CompressionReport", "TrialRecord", "compress"]
