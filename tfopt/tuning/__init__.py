"""Tuning by measurement: the batch size that fits into memory and is fast enough, and the speed settings of a training.

Start in find_batch_size.py and search.py. Both train a workload (workload.py) in processes of their own (trial.py)
under a limit of memory (limit.py). For the batch size, memory.py finds the largest, throughput.py the speed of each,
and advice.py makes settings of them. For the speed settings, space.py says which have a choice, exploration.py in which
order they are tried, and sides.py measures a trial beside the start, in turns (comparison.py).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
