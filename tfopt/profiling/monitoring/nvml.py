"""Reads NVIDIA GPUs through NVML, the library behind nvidia-smi.

NVML numbers GPUs by their position on the bus and ignores CUDA_VISIBLE_DEVICES. This module applies the variable, so
that GPU 0 is GPU 0 of the training process. If the GPUs are of different models, the numbers of CUDA and NVML agree
only with CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pynvml

from tfopt.errors import TfoptError
from tfopt.report import Record

# A driver that has gone is looked for again after the first time, then after twice as long, up to the second.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
# Clocks below the highest because the chip is idle, or because somebody set them, are no throttling.
THROTTLES = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "temperature",
    0x40: "hardware temperature limit",
    0x80: "power brake",
}
_LOST = (
    pynvml.NVMLError_GpuIsLost,
    pynvml.NVMLError_Uninitialized,
    pynvml.NVMLError_DriverNotLoaded,
    pynvml.NVMLError_LibRmVersionMismatch,
    pynvml.NVMLError_ResetRequired,
)
_UNSUPPORTED = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_FunctionNotFound,
    pynvml.NVMLError_NoPermission,
    pynvml.NVMLError_InvalidArgument,
)


class NvmlUnavailableError(TfoptError):
    """No NVIDIA GPU can be read; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class GpuSample(Record):
    """The state of one GPU at one moment. A value is None if the GPU or its driver does not report it.

    Of a MIG slice, the memory is that of the slice, the utilization is None, because NVML does not measure it, and all
    other values are those of the whole GPU.

    Attributes:
        gpu_utilization_percent: Share of the last sample period, 0 to 100, in which any kernel ran. It does not tell
            how much of the GPU the kernel used.
        memory_utilization_percent: Share of that period in which memory was read or written.
        memory_used_bytes: Memory used by all processes. By default TensorFlow takes nearly all memory at once.
        power_watts: Power that the board takes.
        energy_joules: Energy since the monitor opened the GPU.
        temperature_celsius: Temperature of the chip.
        sm_clock_mhz: Clock rate of the streaming multiprocessors. A throttled GPU lowers it.
        throttled: 1 if heat, power or the hardware lowers the clocks, otherwise 0.
        pcie_sent_bytes_per_second: Traffic from the GPU over PCIe. NVML takes 20 ms to measure it, so each sample has
            it for one GPU in turn.
        pcie_received_bytes_per_second: The same to the GPU.
        nvlink_sent_bytes_per_second: Traffic from the GPU over all NVLinks since the sample before.
        nvlink_received_bytes_per_second: The same to the GPU.
    """

    gpu_utilization_percent: float | None = None
    memory_utilization_percent: float | None = None
    memory_used_bytes: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    sm_clock_mhz: float | None = None
    throttled: float | None = None
    pcie_sent_bytes_per_second: float | None = None
    pcie_received_bytes_per_second: float | None = None
    nvlink_sent_bytes_per_second: float | None = None
    nvlink_received_bytes_per_second: float | None = None


class Nvml:
    """The GPUs that this process may use, open for reading until closed; also a context manager.

    A GPU that is lost, or a driver that is unloaded, is looked for again every few seconds.

    Attributes:
        names: The GPUs' product names, in the order of `sample`.
        failures: Error messages of NVML, each with the number of failed readings. A value that a GPU does not support
            is not a failure.
        throttles: Why clocks were lowered, each with the number of samples.

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
        self.throttles: Counter[str] = Counter()
        self._is_open = self._is_lost = False
        self._tried, self._pause_s = 0.0, FIRST_PAUSE_S
        self._turn = 0
        try:
            self._open()
            try:
                self._gpus = _visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
            except BaseException:
                self.close()
                raise
        except pynvml.NVMLError as error:
            raise NvmlUnavailableError(f"no NVIDIA GPU can be read: {error}") from error
        self.names = tuple(gpu.name for gpu in self._gpus)

    def sample(self) -> tuple[GpuSample, ...]:
        """Returns the present values of each GPU.

        A value that cannot be read now is None, and `failures` counts it. The next sample may have it again, because
        some errors of NVML are temporary, such as a timeout of the driver.
        """
        if self._is_lost:
            self._reconnect()
        self._turn += 1
        pcie = self._turn % len(self._gpus)
        samples = tuple(self._sample(gpu, with_pcie=index == pcie) for index, gpu in enumerate(self._gpus))
        if not self._is_lost:
            self._pause_s = FIRST_PAUSE_S
        return samples

    def close(self) -> None:
        """Releases NVML. A second call has no effect."""
        if self._is_open:
            self._is_open = False
            with suppress(pynvml.NVMLError):  # the driver has gone
                pynvml.nvmlShutdown()

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        pynvml.nvmlInit()
        self._is_open = True

    def _reconnect(self) -> None:
        now = time.monotonic()
        if now - self._tried < self._pause_s:
            return
        self._tried, self._pause_s = now, min(2 * self._pause_s, LONGEST_PAUSE_S)
        self.close()
        try:
            self._open()
        except pynvml.NVMLError as error:
            self.failures[str(error)] += 1
            return
        self._is_lost = False
        for gpu in self._gpus:
            gpu.find_again()

    def _sample(self, gpu: _Gpu, *, with_pcie: bool) -> GpuSample:
        if gpu.handle is None or not self._is_open:
            self._is_lost = True  # it may come back
            return GpuSample()
        handle, whole = gpu.handle, gpu.whole
        rates = None if gpu.is_slice else self._read(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
        reasons = self._read(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(whole))
        words = [name for bit, name in THROTTLES.items() if reasons is not None and int(reasons) & bit]
        self.throttles.update(words)
        links = gpu.links_per_second(self._read(lambda: _link_bytes(whole)))
        return GpuSample(
            gpu_utilization_percent=None if rates is None else float(rates.gpu),
            memory_utilization_percent=None if rates is None else float(rates.memory),
            memory_used_bytes=self._number(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used),
            power_watts=self._number(lambda: pynvml.nvmlDeviceGetPowerUsage(whole) / 1000),
            energy_joules=gpu.since_opened(
                self._number(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(whole) / 1000)
            ),
            temperature_celsius=self._number(
                lambda: pynvml.nvmlDeviceGetTemperature(whole, pynvml.NVML_TEMPERATURE_GPU)
            ),
            sm_clock_mhz=self._number(lambda: pynvml.nvmlDeviceGetClockInfo(whole, pynvml.NVML_CLOCK_SM)),
            throttled=None if reasons is None else float(bool(words)),
            pcie_sent_bytes_per_second=self._pcie(whole, pynvml.NVML_PCIE_UTIL_TX_BYTES) if with_pcie else None,
            pcie_received_bytes_per_second=self._pcie(whole, pynvml.NVML_PCIE_UTIL_RX_BYTES) if with_pcie else None,
            nvlink_sent_bytes_per_second=links[0],
            nvlink_received_bytes_per_second=links[1],
        )

    def _pcie(self, handle: Any, direction: int) -> float | None:
        return self._number(lambda: 1000 * pynvml.nvmlDeviceGetPcieThroughput(handle, direction))  # in kB/s

    def _number(self, query: Callable[[], float]) -> float | None:
        value = self._read(query)
        return None if value is None else float(value)

    def _read(self, query: Callable[[], Any]) -> Any:
        if self._is_lost:
            return None
        try:
            return query()
        except _UNSUPPORTED:
            return None
        except _LOST as error:
            self.failures[str(error)] += 1
            self._is_lost = True
        except pynvml.NVMLError as error:
            self.failures[str(error)] += 1
        return None


class _Gpu:
    """One GPU or MIG slice.

    Attributes:
        name: Product name.
        handle: NVML's handle; None while the GPU is lost.
        whole: The handle of the whole GPU.
        is_slice: Whether it is a MIG slice.
    """

    def __init__(self, handle: Any, whole: Any | None = None) -> None:
        self.handle, self.whole = handle, handle if whole is None else whole
        self.is_slice = whole is not None
        self.name = _text(pynvml.nvmlDeviceGetName(handle))
        self._uuid, self._uuid_of_whole = _uuid(handle), _uuid(self.whole)
        self._first_joules: float | None = None
        self._links: tuple[float, tuple[float, float]] | None = None

    def find_again(self) -> None:
        """Finds the handle after the driver was opened again."""
        try:
            self.whole = pynvml.nvmlDeviceGetHandleByUUID(self._uuid_of_whole)
            self.handle = _slice(self.whole, self._uuid) if self.is_slice else self.whole
        except pynvml.NVMLError:
            self.handle = None

    def since_opened(self, joules: float | None) -> float | None:
        """Returns the energy since the first reading. NVML counts since the driver was loaded."""
        if joules is None:
            return None
        if self._first_joules is None:
            self._first_joules = joules
        elif joules < self._first_joules:  # the driver was loaded again
            self._first_joules = 0.0
        return joules - self._first_joules

    def links_per_second(self, counted: tuple[float, float] | None) -> tuple[float | None, float | None]:
        """Returns the traffic over NVLink since the last reading."""
        before, self._links = self._links, None if counted is None else (time.monotonic(), counted)
        if before is None or self._links is None:
            return None, None
        seconds = self._links[0] - before[0]
        sent, received = (max(now - then, 0.0) / seconds for now, then in zip(self._links[1], before[1], strict=True))
        return sent, received


def _link_bytes(handle: Any) -> tuple[float, float]:
    """Returns the bytes sent and received over all NVLinks since the driver was loaded."""
    fields = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    every_link = 0xFFFFFFFF
    values = pynvml.nvmlDeviceGetFieldValues(handle, [(field, every_link) for field in fields])
    for value in values:
        if value.nvmlReturn != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError_NotSupported
    sent, received = (1024.0 * value.value.ullVal for value in values)  # in KiB
    return sent, received


def _visible(cuda_visible_devices: str | None) -> list[_Gpu]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names by index, or by the start of a UUID, in its order.

    As in CUDA, the first entry that names no GPU ends the list.
    """
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if not handles:
        raise NvmlUnavailableError("the NVIDIA driver reports no GPU")
    if cuda_visible_devices is None:
        return [_Gpu(handle) for handle in handles]
    visible: list[_Gpu] = []
    for entry in cuda_visible_devices.split(","):
        gpu = _named(entry.strip(), handles)
        if gpu is None:
            break
        visible.append(gpu)
    if not visible:
        raise NvmlUnavailableError(
            f"CUDA_VISIBLE_DEVICES={cuda_visible_devices!r} hides the {len(handles)} NVIDIA GPUs"
        )
    return visible


def _named(entry: str, handles: list[Any]) -> _Gpu | None:
    if entry.isdecimal():
        return _Gpu(handles[int(entry)]) if int(entry) < len(handles) else None
    if entry.startswith("MIG-"):
        found = [(whole, part) for whole in handles if (part := _slice(whole, entry)) is not None]
        return _Gpu(found[0][1], found[0][0]) if len(found) == 1 else None
    matches = [handle for handle in handles if entry.startswith("GPU-") and _uuid(handle).startswith(entry)]
    return _Gpu(matches[0]) if len(matches) == 1 else None


def _slice(whole: Any, uuid: str) -> Any | None:
    """Returns the handle of a MIG slice of a GPU by the start of its UUID, or None."""
    found = []
    try:
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
            with suppress(pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):  # a place without a slice
                part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, index)
                if _uuid(part).startswith(uuid):
                    found.append(part)
    except _UNSUPPORTED:
        return None
    return found[0] if len(found) == 1 else None


def _uuid(handle: Any) -> str:
    return _text(pynvml.nvmlDeviceGetUUID(handle))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
