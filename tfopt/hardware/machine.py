"""Detects the processor, the memory and the GPUs of this machine without starting a device.

TensorFlow fixes its logical devices and takes the memory of a GPU when a device is first used. This module only lists
physical devices, so that a program can configure them afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil
import pynvml
import tensorflow as tf

from tfopt.hardware.gpus import Gpu, peak_tflops
from tfopt.hardware.pretended import pretended_gpu
from tfopt.hardware.processor import cpu, logical_cores
from tfopt.report import Record
from tfopt.report.formatting import memory_size
from tfopt.report.sheet import Sheet, Shown, pairs


@dataclass(frozen=True, kw_only=True)
class Hardware(Record, Shown):
    """The processor, the memory and the GPUs of this machine.

    Attributes:
        cpu_model: Name of the processor.
        logical_cores: Number of logical cores, with hyper-threads, that this process may use.
        cpu_features: The instructions in `CPU_FEATURES` that the processor has.
        memory_bytes: Memory of the machine.
        gpus: The GPUs that TensorFlow can use, in TensorFlow's order.
        tensorflow_version: Version of TensorFlow, for example "2.21.0".
        unavailable: For each attribute above that is None or empty, the reason.

    Example:
        >>> print(Hardware(cpu_model="AMD EPYC", logical_cores=2, cpu_features=("avx2", "avx512_vnni"),
        ...                memory_bytes=8 * 2**30, tensorflow_version="2.21.0", unavailable={"gpus": "no driver"}))
        cpu           AMD EPYC, 2 logical cores
        cpu features  avx2, avx512_vnni
        memory        8.0 GiB
        gpus          none (no driver)
        tensorflow    2.21.0
    """

    cpu_model: str | None = None
    logical_cores: int
    cpu_features: tuple[str, ...] = ()
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    tensorflow_version: str
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def _sheet(self) -> Sheet:
        model = self.cpu_model or self._unavailable("cpu_model")
        gpus = {f"gpu {index}": str(gpu) for index, gpu in enumerate(self.gpus)}
        rows = {
            "cpu": f"{model}, {self.logical_cores} logical cores",
            "cpu features": ", ".join(self.cpu_features) or self._unavailable("cpu_features"),
            "memory": memory_size(self.memory_bytes),
            **(gpus or {"gpus": f"none ({self.unavailable.get('gpus', 'not looked for')})"}),
            "tensorflow": self.tensorflow_version,
        }
        return Sheet(tables=[pairs(rows)])

    def _unavailable(self, attribute: str) -> str:
        return f"unavailable ({self.unavailable.get(attribute, 'not looked for')})"


def detect() -> Hardware:
    """Returns the hardware of this machine, without starting a device or taking GPU memory.

    Logical devices, memory growth and visible devices can still be configured afterwards. The environment variable
    TFOPT_PRETEND_HARDWARE puts another machine in its place, "amx" or "A100" for example: plans then decide for it.

    Example:
        >>> hardware = detect()
        >>> hardware.logical_cores >= 1
        True
        >>> hardware.memory_bytes > 0
        True
    """
    cpu_model, cpu_features, unavailable = cpu()
    driver_memory = _gpu_memory_by_name()
    gpus = tuple(_gpu(device, driver_memory) for device in tf.config.list_physical_devices("GPU"))
    pretended = pretended_gpu()
    if pretended is not None:
        gpus = (pretended,)
    if not gpus:
        unavailable["gpus"] = _why_no_gpu(list(driver_memory))
    return Hardware(
        cpu_model=cpu_model,
        logical_cores=logical_cores(),
        cpu_features=cpu_features,
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpus,
        tensorflow_version=tf.__version__,
        unavailable=unavailable,
    )


def _gpu(device: tf.config.PhysicalDevice, driver_memory: Mapping[str, int | None]) -> Gpu:
    details = tf.config.experimental.get_device_details(device)
    name = details.get("device_name", device.name)
    return Gpu(
        name=name,
        compute_capability=details.get("compute_capability"),
        memory_bytes=driver_memory.get(name),
        peak_tflops=peak_tflops(name),
    )


def _gpu_memory_by_name() -> dict[str, int | None]:
    """Returns the memory in bytes of each GPU that the driver finds, by product name; empty without a driver.

    TensorFlow gives the memory of a GPU only after starting it, and numbers GPUs differently from NVML. Both use the
    same product names. If GPUs with one name differ in memory, the value is None.
    """
    memory: dict[str, int | None] = {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return memory
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name, total = pynvml.nvmlDeviceGetName(handle), _total_memory(handle)
            memory[name] = total if memory.get(name, total) == total else None
    finally:
        pynvml.nvmlShutdown()
    return memory


def _total_memory(handle: object) -> int | None:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:  # a GPU that shares the memory of the processor reports no memory
        return None


def _why_no_gpu(driver_names: list[str]) -> str:
    if not driver_names:
        return "TensorFlow sees none, and no NVIDIA driver answers"
    found = f"TensorFlow sees none although the driver has {', '.join(driver_names)}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"{found}: CUDA_VISIBLE_DEVICES={visible!r}"
    return f"{found}: install the CUDA libraries with tfopt[cuda]"
