"""Reads NVIDIA GPUs through NVML, the library behind nvidia-smi.

NVML numbers GPUs by their position on the bus and ignores CUDA_VISIBLE_DEVICES. This module applies the variable, so
that GPU 0 is GPU 0 of the training process. If the GPUs are of different models, the numbers of CUDA and NVML agree
only with CUDA_DEVICE_ORDER=PCI_BUS_ID.
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
    """The state of one GPU at one moment. A value is None if the GPU or its driver does not report it.

    Attributes:
        gpu_utilization_percent: Share of the last sample period, 0 to 100, in which any kernel ran. It does not tell
            how much of the GPU the kernel used.
        memory_used_bytes: Memory used by all processes. By default TensorFlow takes nearly all memory at once.
        power_watts: Power that the board takes.
        temperature_celsius: Temperature of the chip.
        sm_clock_mhz: Clock rate of the streaming multiprocessors. A throttled GPU lowers it.
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
        failures: Error messages of NVML, each with the number of failed readings. A value that a GPU does not support
            is not a failure.

    Raises:
        NvmlUnavailableError: There is no driver or no GPU, or CUDA_VISIBLE_DEVICES hides all GPUs.

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
        """Returns the present values of each GPU.

        A value that cannot be read now is None, and `failures` counts it. The next sample may have it again, because
        some errors of NVML are temporary, such as a timeout of the driver.
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
        """Releases NVML. A second call has no effect."""
        self._open.close()

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _visible(cuda_visible_devices: str | None) -> list[Any]:
    """Returns the handles of the GPUs that CUDA_VISIBLE_DEVICES names by index or by the start of a UUID, in its order.

    As in CUDA, the first entry that names no GPU ends the list. A MIG slice counts as no GPU: NVML does not measure the
    utilization of a slice, and the utilization of the whole GPU includes the work of others.
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
