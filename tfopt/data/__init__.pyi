from .batches import iterate_batches
from .epoch_order import EpochCounter
from .examples import Examples
from .files.image_folder import image_folder
from .files.numpy_files import numpy_files
from .pipeline import PREFETCH, pipeline
from .sources import SOURCES
from .sources.digits import digits
from .sources.in_memory import arrays
from .sources.synthetic import synthetic

__all__ = [
    "PREFETCH",
    "SOURCES",
    "EpochCounter",
    "Examples",
    "arrays",
    "digits",
    "image_folder",
    "iterate_batches",
    "numpy_files",
    "pipeline",
    "synthetic",
]
