"""Data sets by name: known data sets, data set hubs, and examples made at random.

Start in digits.py. SOURCES lists all sources by name, also those of files/.
"""

from collections.abc import Callable

from tfopt.data.examples import Examples
from tfopt.data.files.tfrecord import tfrecord
from tfopt.data.sources.digits import digits
from tfopt.data.sources.synthetic import synthetic

SOURCES: dict[str, Callable[..., Examples]] = {"digits": digits, "synthetic": synthetic, "tfrecord": tfrecord}
