"""Data sets by name: known data sets, data set hubs, and examples made at random.

Start in digits.py. SOURCES lists all sources by name, also those of files/.
"""

from collections.abc import Callable

from tfopt.data.examples import Examples
from tfopt.data.files.image_folder import image_folder
from tfopt.data.files.numpy_files import numpy_files
from tfopt.data.sources.digits import digits
from tfopt.data.sources.synthetic import synthetic

SOURCES: dict[str, Callable[..., Examples]] = {
    "digits": digits,
    "image_folder": image_folder,
    "numpy": numpy_files,
    "synthetic": synthetic,
}
