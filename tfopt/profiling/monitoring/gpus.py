"""The GPUs and MIG slices that CUDA_VISIBLE_DEVICES names, with their handles of NVML."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pynvml

from tfopt.errors import TfoptError

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

    Args:
        number: Number of the GPU on the bus.
        handle: NVML's handle of the GPU or the slice.
        whole: NVML's handle of the GPU that a slice is part of.

    Attributes:
        number: Number of the GPU on the bus.
        name: Product name.
        uuid: NVML's identifier.
        handle: NVML's handle; None while the GPU is lost.
        whole: The handle of the whole GPU.
        is_slice: Whether it is a MIG slice.
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
        """Returns the energy since the first reading.

        Args:
            counter: The joules that NVML has counted since the driver was loaded. A lower count than before is the
                count of a driver that was loaded again.
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

    As in CUDA, the first entry that names no GPU ends the list, and a GPU that is lost at the start has no index.

    Args:
        cuda_visible_devices: The variable; None if it is not set.
        failures: Receives the errors of lost GPUs.
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
