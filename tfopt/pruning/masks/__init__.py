"""Masks: which weights are kept, in which pattern, and how a mask is applied inside the compiled training step.

Start in constraint.py, which holds a mask. choice.py chooses masks by scores, and patterns.py says which weights go
together.
"""

import lazy_loader

# As in tfopt.pruning: settings are read without TensorFlow.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
