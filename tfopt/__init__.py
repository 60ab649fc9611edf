"""tfopt makes Keras 3 models train faster and ship smaller on TensorFlow, and proves it with measurements.

`__init__.pyi` lists the public names with their types. Each is imported at its first use, so that `import tfopt` is
fast and does not load TensorFlow or change global state. There is one exception: if Keras is already imported, the
layers of tfopt are registered with it, because the program may load a model that contains them.
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
    importlib.import_module("tfopt.models.layers")
    importlib.import_module("tfopt.models.text.attention")
    importlib.import_module("tfopt.quantization.aware_training.layers")
