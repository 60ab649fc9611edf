"""What the machine does while a model trains."""

from tfopt.profiling.monitor import GpuMonitor
from tfopt.profiling.nvml import GpuSample, Nvml, NvmlUnavailableError

__all__ = ["GpuMonitor", "GpuSample", "Nvml", "NvmlUnavailableError"]
