from .monitoring import GpuMonitor, GpuSample, Nvml, NvmlUnavailableError, merge_workers

__all__ = ["GpuMonitor", "GpuSample", "Nvml", "NvmlUnavailableError", "merge_workers"]
