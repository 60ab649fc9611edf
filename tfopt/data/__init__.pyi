from .augment.augmentation import Augmentation
from .augment.config import AugmentConfig
from .batches import iterate_batches
from .config import DataConfig
from .decisions import decide
from .epoch_order import EpochCounter
from .examples import Examples
from .files.image_folder import image_folder
from .files.in_memory import arrays
from .files.numpy_files import numpy_files
from .files.tfrecord import tfrecord, tfrecord_files
from .measurement.measure import measure
from .measurement.report import InputReport
from .pipeline import PREFETCH, pipeline
from .records.convert import ConversionReport, convert
from .records.stored import EncodedImage, EncodedMask, Scaled, Stored
from .sources import SOURCES
from .sources.cifar import cifar10, cifar100
from .sources.digits import digits
from .sources.huggingface import huggingface
from .sources.imdb import imdb
from .sources.mnist import fashion_mnist, mnist
from .sources.synthetic import synthetic
from .sources.tfds import tfds
from .steps import epoch_steps
from .tables.tables import csv, parquet
from .text_files.text import text
from .text_files.text_classes import text_classes

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
    "cifar10",
    "cifar100",
    "csv",
    "fashion_mnist",
    "huggingface",
    "image_folder",
    "imdb",
    "mnist",
    "numpy_files",
    "parquet",
    "pipeline",
    "synthetic",
    "text",
    "text_classes",
    "tfds",
    "ConversionReport",
    "EncodedImage",
    "EncodedMask",
    "Scaled",
    "Stored",
    "convert",
    "tfrecord",
    "tfrecord_files",
]
