"""Sampling of GPUs and processors while a program runs: utilization, memory, power, clocks, traffic.

Start in callback.py, the Keras callback that watches `fit`; sampling.py has the thread that reads,
readers.py what it reads (GPUs through nvml.py and DCGM, or the processor), command.py watches any program.
"""
