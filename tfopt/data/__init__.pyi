from .augment.augmentation import Augmentation
from .augment.config import AugmentConfig
from .batches import iterate_batches
from .epoch_order import EpochCounter
from .examples import Examples
from .pipeline import PREFETCH, pipeline
from .sources import SOURCES
from .sources.digits import digits
from .sources.in_memory import arrays
from .sources.synthetic import synthetic

__all__ = [
    "PREFETCH",
    "SOURCES",
    "AugmentConfig",
    "Augmentation",
    "EpochCounter",
    "Examples",
    "arrays",
    "digits",
    "iterate_batches",
    "pipeline",
    "synthetic",
]
