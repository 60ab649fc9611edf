from .monitor import GpuMonitor
from .nvml import GpuSample, Nvml, NvmlUnavailableError

__all__ = ["GpuMonitor", "GpuSample", "Nvml", "NvmlUnavailableError"]
