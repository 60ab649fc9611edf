"""Compression to a budget: shrinking, healing by the parent and int8, combined by a search that measures them here.

Start in search.py, which searches; trial.py makes one smaller artifact, candidates.py chooses which are worth it,
directory.py keeps what a search needs to go on, and front.py has the result.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
