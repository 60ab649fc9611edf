from .batches import iterate_batches
from .epoch_order import EpochCounter
from .examples import Examples
from .files.image_folder import image_folder
from .files.in_memory import arrays
from .files.numpy_files import numpy_files
from .pipeline import PREFETCH, pipeline
from .sources import SOURCES
from .sources.digits import digits
from .sources.synthetic import synthetic
from .tables.tables import csv, parquet
from .text_files.text import text
from .text_files.text_classes import text_classes

__all__ = [
    "PREFETCH",
    "SOURCES",
    "EpochCounter",
    "Examples",
    "arrays",
    "csv",
    "digits",
    "image_folder",
    "iterate_batches",
    "numpy_files",
    "parquet",
    "pipeline",
    "synthetic",
    "text",
    "text_classes",
]
