from .monitoring.callback import GpuMonitor
from .monitoring.gpus import NvmlUnavailableError
from .monitoring.nvml import GpuSample, Nvml
from .monitoring.workers import merge_workers

__all__ = ["GpuMonitor", "GpuSample", "Nvml", "NvmlUnavailableError", "merge_workers"]
