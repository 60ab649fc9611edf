from .batches import iterate_batches
from .epoch_order import EpochCounter
from .pipeline import PREFETCH, pipeline
from .sources import SOURCES, Examples, arrays, digits, synthetic

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
