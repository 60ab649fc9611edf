"""Sampling of GPUs and processors while a program runs: utilization, memory, power, clocks, traffic.

Start in callback.py, the Keras callback that watches `fit`; nvml.py and dcgm.py read NVIDIA GPUs, command.py watches
any program.
"""

from tfopt.profiling.monitoring.callback import GpuMonitor
from tfopt.profiling.monitoring.gpus import NvmlUnavailableError
from tfopt.profiling.monitoring.nvml import GpuSample, Nvml
from tfopt.profiling.monitoring.workers import merge_workers

__all__ = ["GpuMonitor", "GpuSample", "Nvml", "NvmlUnavailableError", "merge_workers"]
