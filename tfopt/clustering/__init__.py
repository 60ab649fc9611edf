"""Clustering: the weights of a layer share a few values, which a file stores in 4 or 8 bits for each weight.

Start in cluster.py; clusters.py holds the shared values in training, and kmeans.py chooses them.
"""

import lazy_loader

# The public names are listed, with their types, in `__init__.pyi`. Each is imported when it is first used, so that
# settings can be read without TensorFlow.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
