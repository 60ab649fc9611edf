"""Tuning by measurement: the batch size that fits into memory, the one that is fast enough, and the settings for it.

Start in find_batch_size.py. memory.py finds the largest batch and throughput.py the speed of each size; both train a
workload (workload.py) in a process of its own (trial.py) under a limit of memory (limit.py). advice.py makes settings
of what was found.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
