from .augment.augmentation import Augmentation
from .augment.config import AugmentConfig
from .config import DataConfig
from .epoch_order import EpochCounter
from .examples import Examples, epoch_steps
from .files.image_folder import image_folder
from .files.numpy_files import numpy_files
from .files.tables import csv, parquet
from .files.text import text, text_classes
from .files.tfrecord import tfrecord, tfrecord_files
from .in_memory import arrays
from .measurement.measure import measure
from .measurement.report import InputReport
from .pipeline import PREFETCH, decide, pipeline
from .records.convert import ConversionReport, convert
from .sources import SOURCES
from .sources.huggingface import huggingface
from .sources.imdb import imdb
from .sources.scikit_learn import diabetes, digit_masks, digits
from .sources.small_images import cifar10, cifar100, fashion_mnist, mnist
from .sources.synthetic import synthetic
from .sources.tfds import tfds
from .stored import EncodedImage, EncodedMask, Scaled, Stored
from .user_data import iterate_batches

__all__ = [
    "PREFETCH",
    "SOURCES",
    "AugmentConfig",
    "Augmentation",
    "ConversionReport",
    "DataConfig",
    "EncodedImage",
    "EncodedMask",
    "EpochCounter",
    "Examples",
    "InputReport",
    "Scaled",
    "Stored",
    "arrays",
    "cifar10",
    "cifar100",
    "convert",
    "csv",
    "decide",
    "diabetes",
    "digit_masks",
    "digits",
    "epoch_steps",
    "fashion_mnist",
    "huggingface",
    "image_folder",
    "imdb",
    "iterate_batches",
    "measure",
    "mnist",
    "numpy_files",
    "parquet",
    "pipeline",
    "synthetic",
    "text",
    "text_classes",
    "tfds",
    "tfrecord",
    "tfrecord_files",
]
