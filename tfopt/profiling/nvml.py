"""Reads NVIDIA GPUs through NVML, the library behind nvidia-smi.

NVML counts GPUs by their place on the bus and knows nothing of CUDA_VISIBLE_DEVICES, so this module applies it: GPU 0
here is GPU 0 of the training process. With GPUs of different models CUDA's numbers agree with NVML's only under
CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pynvml

from tfopt.errors import TfoptError
from tfopt.report import Record


class NvmlUnavailableError(TfoptError):
    """No NVIDIA GPU can be read; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class GpuSample(Record):
    """What one GPU did at one moment; None where the GPU or its driver does not tell.

    Attributes:
        gpu_utilization_percent: Share of the last moments, 0 to 100, in which any kernel ran. It says nothing about how
            much of the GPU the kernel filled.
        memory_used_bytes: Memory taken by all processes. TensorFlow takes nearly all at once unless told otherwise.
        power_watts: Power drawn by the board.
        temperature_celsius: Temperature of the chip.
        sm_clock_mhz: Clock of the streaming multiprocessors; it falls when the GPU is throttled.
    """

    gpu_utilization_percent: float | None
    memory_used_bytes: float | None
    power_watts: float | None
    temperature_celsius: float | None
    sm_clock_mhz: float | None


class Nvml:
    """The GPUs that this process may use, open for reading until closed; also a context manager.

    Attributes:
        names: The GPUs' product names, in the order of `sample`.
        failures: What NVML said instead of a figure, and how many times. Figures that a GPU does not support are not
            among them.

    Raises:
        NvmlUnavailableError: There is no driver, no GPU, or CUDA_VISIBLE_DEVICES hides them all.

    Example:
        >>> try:
        ...     with Nvml() as nvml:
        ...         samples = nvml.sample()
        ... except NvmlUnavailableError:
        ...     samples = ()
        >>> all(isinstance(sample, GpuSample) for sample in samples)
        True
    """

    names: tuple[str, ...]

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        try:
            with ExitStack() as stack:
                pynvml.nvmlInit()
                stack.callback(pynvml.nvmlShutdown)
                self._handles = _visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
                self.names = tuple(pynvml.nvmlDeviceGetName(handle) for handle in self._handles)
                self._open = stack.pop_all()
        except pynvml.NVMLError as error:
            raise NvmlUnavailableError(f"no NVIDIA GPU can be read: {error}") from error

    def sample(self) -> tuple[GpuSample, ...]:
        """Returns the present figures of each GPU.

        A figure that cannot be read now is None, and `failures` counts it. The next sample may hold it again: some
        errors of NVML pass, such as a timeout of the driver.
        """
        return tuple(self._sample(handle) for handle in self._handles)

    def _sample(self, handle: Any) -> GpuSample:
        return GpuSample(
            gpu_utilization_percent=self._read(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            memory_used_bytes=self._read(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used),
            power_watts=self._read(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            temperature_celsius=self._read(
                lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
            ),
            sm_clock_mhz=self._read(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        )

    def _read(self, query: Callable[[], float]) -> float | None:
        try:
            return float(query())
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission):
            return None
        except pynvml.NVMLError as error:
            self.failures[str(error)] += 1
            return None

    def close(self) -> None:
        """Releases NVML. Closing twice does no harm."""
        self._open.close()

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _visible(cuda_visible_devices: str | None) -> list[Any]:
    """Returns the handles that CUDA_VISIBLE_DEVICES names by index or by the beginning of a UUID, in its order.

    As in CUDA, the first entry that names no GPU ends the list. A MIG slice names none here: NVML does not measure the
    utilization of a slice, and that of the whole GPU would be someone else's too.
    """
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if not handles:
        raise NvmlUnavailableError("the NVIDIA driver reports no GPU")
    if cuda_visible_devices is None:
        return handles
    uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    visible = []
    for entry in cuda_visible_devices.split(","):
        index = _index(entry.strip(), uuids)
        if index is None:
            break
        visible.append(handles[index])
    if not visible:
        raise NvmlUnavailableError(
            f"CUDA_VISIBLE_DEVICES={cuda_visible_devices!r} hides the {len(handles)} NVIDIA GPUs"
        )
    return visible


def _index(entry: str, uuids: list[str]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    matches = [index for index, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
