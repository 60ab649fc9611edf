from .callback import GpuMonitor
from .gpus import NvmlUnavailableError
from .nvml import GpuSample, Nvml
from .workers import merge_workers

__all__ = ["GpuMonitor", "GpuSample", "Nvml", "NvmlUnavailableError", "merge_workers"]
