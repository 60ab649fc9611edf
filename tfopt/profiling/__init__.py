"""The load of the GPU during training, and the layers that do not fit its tensor cores.

Start in monitoring/callback.py, the Keras callback that watches `fit`.
"""

import lazy_loader

# The public names are listed, with their types, in `__init__.pyi`. Each is imported when it is first used, so that
# settings can be read without TensorFlow.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
