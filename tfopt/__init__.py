"""tfopt makes Keras 3 models train faster and ship smaller on TensorFlow, and proves it with measurements.

The public names are listed, with their types, in `__init__.pyi`. Each is imported when it is first used, so that
importing tfopt loads neither TensorFlow nor anything else that is slow or touches global state. The one exception is a
program that has imported Keras: it may load a model with layers of ours, which Keras must have been told of.
"""

import importlib
import sys
from importlib.metadata import version
from typing import Any

import lazy_loader

from tfopt import errors

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in __all__ and not hasattr(errors, name):
        errors.check_keras_backend()
    return _load(name)


__version__ = version("tfopt")

if "keras" in sys.modules:
    importlib.import_module("tfopt.quantization.aware_training.layers")
