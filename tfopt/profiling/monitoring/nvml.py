"""Reads NVIDIA GPUs and MIG slices through NVML, the library behind nvidia-smi.

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

UNSUPPORTED = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_FunctionNotFound,
    pynvml.NVMLError_NoPermission,
    pynvml.NVMLError_InvalidArgument,
    pynvml.NVMLError_ArgumentVersionMismatch,
    pynvml.NVMLError_Deprecated,
)


class NvmlUnavailableError(TfoptError):
    """No NVIDIA GPU can be read; the message is the reason."""


class NvmlGpu:
    """One GPU or MIG slice.

    Attributes:
        number: Number of the GPU on the bus.
        handle: NVML's handle of the GPU or the slice; None while the GPU is lost.
        whole: The handle of the whole GPU.
    """

    def __init__(self, number: int, handle: Any, whole: Any | None = None) -> None:
        self.number, self.handle, self.whole = number, handle, handle if whole is None else whole
        self.is_slice = whole is not None
        self.name = _text(pynvml.nvmlDeviceGetName(handle))
        self.uuid, self._uuid_of_whole = _uuid(handle), _uuid(self.whole)
        self._joules = 0.0
        self._counter: float | None = None
        self._links: tuple[float, tuple[float, float]] | None = None

    def find_again(self) -> None:
        """Finds the handle after the driver was opened again. It stays None if the GPU is still lost."""
        try:
            self.whole = pynvml.nvmlDeviceGetHandleByUUID(self._uuid_of_whole)
            self.handle = _slice(self.whole, self.uuid) if self.is_slice else self.whole
        except pynvml.NVMLError:
            self.handle = None

    def since_opened(self, counter: float | None) -> float | None:
        """Returns the energy since the first reading, from the joules that NVML has counted.

        NVML counts from when the driver was loaded. A lower count than before is that of a driver loaded again.
        """
        if counter is None:
            return None
        if self._counter is not None:
            self._joules += counter - self._counter if counter >= self._counter else counter
        self._counter = counter
        return self._joules

    def links_per_second(self, counted: tuple[float, float] | None) -> tuple[float | None, float | None]:
        """Returns the traffic over NVLink since the last reading; None after a driver was loaded again."""
        before, self._links = self._links, None if counted is None else (time.monotonic(), counted)
        if before is None or counted is None or self._links is None or counted < before[1]:
            return None, None
        seconds = self._links[0] - before[0]
        sent, received = (max(now - then, 0.0) / seconds for now, then in zip(counted, before[1], strict=True))
        return sent, received


def link_bytes(handle: Any) -> tuple[float, float]:
    """Returns the bytes sent and received over all NVLinks since the driver was loaded."""
    fields = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    every_link = 0xFFFFFFFF
    values = pynvml.nvmlDeviceGetFieldValues(handle, [(field, every_link) for field in fields])
    for value in values:
        if value.nvmlReturn != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError_NotSupported
    sent, received = (1024.0 * value.value.ullVal for value in values)  # in KiB
    return sent, received


def visible_gpus(cuda_visible_devices: str | None, failures: Counter[str]) -> list[NvmlGpu]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names by index, or by the start of a UUID, in its order.

    As in CUDA, the first entry that names no GPU ends the list, and a GPU that is lost at the start has no index; its
    error is added to `failures`.
    """
    gpus: list[NvmlGpu] = []
    lost: pynvml.NVMLError | None = None
    for number in range(pynvml.nvmlDeviceGetCount()):
        try:
            gpus.append(NvmlGpu(number, pynvml.nvmlDeviceGetHandleByIndex(number)))
        except pynvml.NVMLError as error:
            lost = error
            failures[f"GPU {number} of the bus: {error}"] += 1
    if not gpus:
        raise lost or NvmlUnavailableError("the NVIDIA driver reports no GPU")
    if cuda_visible_devices is None:
        return gpus
    visible: list[NvmlGpu] = []
    for entry in cuda_visible_devices.split(","):
        gpu = _named(entry.strip(), gpus)
        if gpu is None:
            break
        visible.append(gpu)
    if not visible:
        raise NvmlUnavailableError(f"CUDA_VISIBLE_DEVICES={cuda_visible_devices!r} hides the {len(gpus)} NVIDIA GPUs")
    return visible


def _named(entry: str, gpus: list[NvmlGpu]) -> NvmlGpu | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    found: list[NvmlGpu] = []
    for gpu in gpus:
        if entry.startswith("MIG-") and (part := _slice(gpu.whole, entry)) is not None:
            found.append(NvmlGpu(gpu.number, part, gpu.whole))
        elif entry.startswith("GPU-") and gpu.uuid.startswith(entry):
            found.append(gpu)
    return found[0] if len(found) == 1 else None


def _slice(whole: Any, uuid: str) -> Any | None:
    """Returns the handle of a MIG slice of a GPU by the start of its UUID, or None."""
    found = []
    try:
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
            with suppress(pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):  # a place without a slice
                part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, index)
                if _uuid(part).startswith(uuid):
                    found.append(part)
    except UNSUPPORTED:
        return None
    return found[0] if len(found) == 1 else None


def _uuid(handle: Any) -> str:
    return _text(pynvml.nvmlDeviceGetUUID(handle))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# A driver that has gone is looked for again after the first time, then after twice as long, up to the second.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
# Clocks below the highest because the chip is idle, because somebody set them, or because other GPUs of a group run
# slower, are no throttling.
THROTTLES = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "temperature",
    0x40: "hardware temperature limit",
    0x80: "power brake",
    0x200: "board limit",
    0x400: "reliability limit",
}
# One card has gone; the others are still read.
_CARD_LOST = (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired)
# The driver has gone, and all cards with it.
_DRIVER_LOST = (pynvml.NVMLError_Uninitialized, pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_LibRmVersionMismatch)
RATES = "gpu_utilization_percent memory_utilization_percent"
PCIE = "pcie_sent_bytes_per_second pcie_received_bytes_per_second"
LINKS = "nvlink_sent_bytes_per_second nvlink_received_bytes_per_second"
OF_SLICE = "NVML does not measure it for a MIG slice"


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
        throttles: Why clocks were lowered, as in "gpu0: temperature", each with the number of samples.
        unavailable: Why a figure has no value, for example "gpu0_power_watts": "Not Supported".
        numbers: The GPUs' numbers on the bus; None for a MIG slice.
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
    numbers: tuple[int | None, ...]

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self.throttles: Counter[str] = Counter()
        self.unavailable: dict[str, str] = {}
        self._is_open = False
        self._tried, self._pause_s = -LONGEST_PAUSE_S, FIRST_PAUSE_S
        self._turn = 0
        try:
            self._open()
            try:
                self._gpus = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), self.failures)
            except BaseException:
                self.close()
                raise
        except pynvml.NVMLError as error:
            raise NvmlUnavailableError(f"no NVIDIA GPU can be read: {error}") from error
        self.names = tuple(gpu.name for gpu in self._gpus)
        # DCGM has no figures of a slice under the number of the GPU.
        self.numbers = tuple(None if gpu.is_slice else gpu.number for gpu in self._gpus)

    def sample(self) -> tuple[GpuSample, ...]:
        """Returns the present values of each GPU.

        A value that cannot be read now is None, and `failures` counts it. The next sample may have it again, because
        some errors of NVML are temporary, such as a timeout of the driver.
        """
        if any(gpu.handle is None for gpu in self._gpus):
            self._reconnect()
        self._turn += 1
        pcie = self._turn % len(self._gpus)
        samples = tuple(self._sample(index, gpu, with_pcie=index == pcie) for index, gpu in enumerate(self._gpus))
        if all(gpu.handle is not None for gpu in self._gpus):
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
        """Opens the driver again, which finds cards that came back. Handles of before are not valid after that."""
        now = time.monotonic()
        if now - self._tried < self._pause_s:
            return
        self._tried, self._pause_s = now, min(2 * self._pause_s, LONGEST_PAUSE_S)
        self.close()
        try:
            self._open()
        except pynvml.NVMLError as error:
            self.failures[str(error)] += 1
            self._lose_all()
            return
        for gpu in self._gpus:
            gpu.find_again()

    def _lose_all(self) -> None:
        for gpu in self._gpus:
            gpu.handle = None

    def _sample(self, index: int, gpu: NvmlGpu, *, with_pcie: bool) -> GpuSample:
        if gpu.handle is None:
            return GpuSample()
        handle, whole = gpu.handle, gpu.whole

        def read(names: str, query: Callable[[], Any]) -> Any:
            return self._read(gpu, [f"gpu{index}_{name}" for name in names.split()], query)

        def number(name: str, query: Callable[[], float], scale: float = 1.0) -> float | None:
            value = read(name, query)
            return None if value is None else scale * float(value)

        rates = None
        if not gpu.is_slice:
            rates = read(RATES, lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
        else:
            self.unavailable |= {f"gpu{index}_{name}": OF_SLICE for name in RATES.split()}
        reasons = read("throttled", lambda: _clock_reasons(whole))
        words = [name for bit, name in THROTTLES.items() if reasons is not None and int(reasons) & bit]
        self.throttles.update(f"gpu{index}: {name}" for name in words)
        links = gpu.links_per_second(read(LINKS, lambda: link_bytes(whole)))
        pcie: list[float | None] = [None, None]
        if with_pcie:
            counters = (pynvml.NVML_PCIE_UTIL_TX_BYTES, pynvml.NVML_PCIE_UTIL_RX_BYTES)
            pcie = [  # in kB/s
                number(name, lambda counter=counter: pynvml.nvmlDeviceGetPcieThroughput(whole, counter), 1000.0)  # type: ignore[misc]
                for name, counter in zip(PCIE.split(), counters, strict=True)
            ]
        return GpuSample(
            gpu_utilization_percent=None if rates is None else float(rates.gpu),
            memory_utilization_percent=None if rates is None else float(rates.memory),
            memory_used_bytes=number("memory_used_bytes", lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used),
            power_watts=number("power_watts", lambda: pynvml.nvmlDeviceGetPowerUsage(whole), 1e-3),
            energy_joules=gpu.since_opened(
                number("energy_joules", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(whole), 1e-3)
            ),
            temperature_celsius=number(
                "temperature_celsius", lambda: pynvml.nvmlDeviceGetTemperature(whole, pynvml.NVML_TEMPERATURE_GPU)
            ),
            sm_clock_mhz=number("sm_clock_mhz", lambda: pynvml.nvmlDeviceGetClockInfo(whole, pynvml.NVML_CLOCK_SM)),
            throttled=None if reasons is None else float(bool(words)),
            pcie_sent_bytes_per_second=pcie[0],
            pcie_received_bytes_per_second=pcie[1],
            nvlink_sent_bytes_per_second=links[0],
            nvlink_received_bytes_per_second=links[1],
        )

    def _read(self, gpu: NvmlGpu, names: list[str], query: Callable[[], Any]) -> Any:
        if gpu.handle is None:  # lost by a reading before
            return None
        try:
            value = query()
        except UNSUPPORTED as error:
            self.unavailable |= dict.fromkeys(names, str(error))
            return None
        except pynvml.NVMLError as error:
            self.failures[str(error)] += 1
            if isinstance(error, _CARD_LOST):
                gpu.handle = None
            elif isinstance(error, _DRIVER_LOST):
                self._lose_all()
            return None
        return value


def _clock_reasons(handle: Any) -> int:
    """Returns the bits that say why the clocks are low. Older drivers have the call under its older name."""
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except pynvml.NVMLError_FunctionNotFound:
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
