"""Data sets by name: known data sets, data set hubs, and examples made at random.

Start in scikit_learn.py. SOURCES lists all sources by name, also those of files/.
"""

from collections.abc import Callable

from tfopt.data.examples import Examples
from tfopt.data.files.image_folder import image_folder
from tfopt.data.files.numpy_files import numpy_files
from tfopt.data.files.tables import csv, parquet
from tfopt.data.files.text import text, text_classes
from tfopt.data.files.tfrecord import tfrecord
from tfopt.data.sources.huggingface import huggingface
from tfopt.data.sources.imdb import imdb
from tfopt.data.sources.scikit_learn import diabetes, digit_masks, digits
from tfopt.data.sources.small_images import cifar10, cifar100, fashion_mnist, mnist
from tfopt.data.sources.synthetic import synthetic
from tfopt.data.sources.tfds import tfds

SOURCES: dict[str, Callable[..., Examples]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "csv": csv,
    "diabetes": diabetes,
    "digit_masks": digit_masks,
    "digits": digits,
    "fashion_mnist": fashion_mnist,
    "image_folder": image_folder,
    "huggingface": huggingface,
    "imdb": imdb,
    "mnist": mnist,
    "numpy": numpy_files,
    "parquet": parquet,
    "synthetic": synthetic,
    "text": text,
    "text_classes": text_classes,
    "tfds": tfds,
    "tfrecord": tfrecord,
}
