"""Sensitivity: the score of a model against the sparsity of each layer or group alone, and what to prune by it

Start in measure.py.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
