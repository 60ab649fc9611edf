"""Sampling of GPUs and processors while a program runs: utilization, memory, power, clocks, traffic.

Start in callback.py, the Keras callback that watches `fit`; sampling.py has the thread that reads, nvml.py and dcgm.py
read NVIDIA GPUs, command.py watches any program.
"""

import lazy_loader

# The public names are listed, with their types, in `__init__.pyi`. Each is imported when it is first used, so that
# `tfopt monitor` starts a program without the seconds that Keras takes.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
