"""tfopt makes Keras 3 models train faster and ship smaller on TensorFlow, and proves it with measurements.

The public names are listed, with their types, in `__init__.pyi`. Each is imported when it is first used, so that
importing tfopt loads neither TensorFlow nor anything else that is slow or touches global state. The one exception is a
program that has imported Keras: it may load a model with layers of ours, which Keras must have been told of.
"""

import importlib
import sys
from importlib.metadata import version

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = version("tfopt")

if "keras" in sys.modules:
    importlib.import_module("tfopt.quantization.layers")
