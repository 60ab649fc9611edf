"""Pruning: weights become zero and stay zero in training, or whole channels leave the model.

Start in prune.py, which prunes at once; callback.py prunes during `fit`. structured/ removes channels.
"""

import lazy_loader

# The public names are listed, with their types, in `__init__.pyi`. Each is imported when it is first used, so that
# settings can be read without TensorFlow.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
