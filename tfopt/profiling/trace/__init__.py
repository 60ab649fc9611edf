"""A trace of TensorFlow's profiler: recorded for a few steps, and read into the operators that take the time.

Start in recording.py, which records; summary.py reads what was recorded.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
