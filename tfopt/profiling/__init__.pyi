from .monitoring.callback import GpuMonitor
from .monitoring.nvml import GpuSample, Nvml, NvmlUnavailableError
from .monitoring.workers import merge_workers

__all__ = ["GpuMonitor", "GpuSample", "Nvml", "NvmlUnavailableError", "merge_workers"]
