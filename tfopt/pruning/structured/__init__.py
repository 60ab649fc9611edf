"""Structured pruning: whole channels, heads and units are removed, so that every runtime gets faster.

Start in shrink.py. rules/ says how the channels of each layer depend on each other; groups.py finds what leaves
together; surgery.py builds the smaller model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
