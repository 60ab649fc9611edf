"""Criteria: the scores of weights, from their values alone or from gradients of the loss over data.

Start in scores.py, which lists the criteria and applies one.
"""

import lazy_loader

# As in tfopt.pruning: the gradients alone need TensorFlow.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
