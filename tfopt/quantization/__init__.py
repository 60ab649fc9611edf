"""Quantization: ranges from calibration data, written into the graph as fake-quantization annotations.

The public names stand, with their types, in `__init__.pyi`. Each is imported when it is first used: the settings can be
read without TensorFlow.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
