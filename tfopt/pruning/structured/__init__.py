"""Structured pruning: whole channels, heads and units are removed, so that every runtime gets faster.

Start in shrink.py, which builds the smaller model. groups.py finds the channels that leave together, and choice.py
decides which of them leave.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
