from .batches import iterate_batches
from .epoch_order import EpochCounter
from .examples import Examples
from .files.tfrecord import tfrecord, tfrecord_files
from .pipeline import PREFETCH, pipeline
from .records.convert import ConversionReport, convert
from .records.stored import EncodedImage, EncodedMask, Scaled, Stored
from .sources import SOURCES
from .sources.digits import digits
from .sources.in_memory import arrays
from .sources.synthetic import synthetic

__all__ = [
    "PREFETCH",
    "SOURCES",
    "ConversionReport",
    "EncodedImage",
    "EncodedMask",
    "EpochCounter",
    "Examples",
    "Scaled",
    "Stored",
    "arrays",
    "convert",
    "digits",
    "iterate_batches",
    "pipeline",
    "synthetic",
    "tfrecord",
    "tfrecord_files",
]
