"""Data: sources of examples, and the pipeline that feeds them to `fit`."""

from tfopt.data.batches import iterate_batches
from tfopt.data.pipeline import PREFETCH, pipeline
from tfopt.data.position import EpochCounter
from tfopt.data.sources import SOURCES, Examples, arrays, digits, synthetic

__all__ = [
    "PREFETCH",
    "SOURCES",
    "EpochCounter",
    "Examples",
    "arrays",
    "digits",
    "iterate_batches",
    "pipeline",
    "synthetic",
]
