from .augment.augmentation import Augmentation
from .augment.config import AugmentConfig
from .batches import iterate_batches
from .config import DataConfig
from .decisions import decide
from .epoch_order import EpochCounter
from .examples import Examples
from .measurement.measure import measure
from .measurement.report import InputReport
from .pipeline import PREFETCH, pipeline
from .sources import SOURCES
from .sources.digits import digits
from .sources.in_memory import arrays
from .sources.synthetic import synthetic
from .steps import epoch_steps

__all__ = [
    "DataConfig",
    "PREFETCH",
    "SOURCES",
    "AugmentConfig",
    "Augmentation",
    "EpochCounter",
    "Examples",
    "InputReport",
    "arrays",
    "decide",
    "digits",
    "epoch_steps",
    "iterate_batches",
    "measure",
    "pipeline",
    "synthetic",
]
