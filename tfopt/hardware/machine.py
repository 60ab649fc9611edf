"""Detects the processor, the memory and the GPUs of this machine without starting a device.

TensorFlow fixes its logical devices and takes the memory of a GPU when a device is first used. This module only lists
physical devices, so that a program can configure them afterwards.

The environment variable TFOPT_PRETEND_HARDWARE replaces what `detect` and `has_vnni` find, in the process and in those
that it starts: a processor ("avx2", "vnni", "amx"), or a GPU of the table ("A100"). So decisions and tests for another
machine can be tried here. What computes is still this one, and the names of the processor and of the GPU say so
wherever they appear.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pynvml
import tensorflow as tf

from tfopt.errors import ConfigError
from tfopt.hardware.gpus import GPU_CARDS, Gpu, card_name, peak_tflops
from tfopt.report import Record
from tfopt.report.formatting import memory_size
from tfopt.report.sheet import Sheet, Shown, pairs

# The instructions that decide which precision is fast on a CPU, by their names in the Linux kernel, the newest last.
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8")

# The instructions that add products of bytes in 32 bits, and those that each value of oneDNN's limit allows. Any other
# value allows all instructions of the processor.
_BYTE_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8")
_LEFT_BY_LIMIT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sse41", "avx", "avx2", "avx512_core"), ()),
    **dict.fromkeys(("avx2_vnni", "avx2_vnni_2"), ("avx_vnni",)),
    **dict.fromkeys(("avx512_core_vnni", "avx512_core_bf16"), ("avx512_vnni",)),
}
_WITHOUT_AVX512 = ("sse41", "avx", "avx2", "avx2_vnni")
_WITHOUT_BFLOAT16 = (*_WITHOUT_AVX512, "avx2_vnni_2", "avx512_core", "avx512_core_vnni")
VARIABLE = "TFOPT_PRETEND_HARDWARE"

_AVX512 = ("avx2", "avx512f", "avx512_vnni")
_PROCESSORS: dict[str, tuple[str, ...]] = {
    "avx2": ("avx2",),
    "vnni": _AVX512,
    "amx": (*_AVX512, "avx512_bf16", "amx_bf16", "amx_int8"),
}


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

    @property
    def processor(self) -> str:
        """The name of the processor, with the last of its `CPU_FEATURES`: cloud machines of one name differ in them.

        Example:
            >>> Hardware(cpu_model="AMD EPYC", logical_cores=2, cpu_features=("avx2", "avx512_vnni"),
            ...          memory_bytes=8 * 2**30, tensorflow_version="2.21.0").processor
            'AMD EPYC with AVX512_VNNI'
        """
        last = next((each for each in reversed(CPU_FEATURES) if each in self.cpu_features), None)
        return f"{self.cpu_model or 'CPU'}{f' with {last.upper()}' if last else ''}"

    def device(self, on_gpu: bool = False) -> str:
        """Returns the name of what computes: the first GPU, or the processor."""
        return self.gpus[0].name if on_gpu and self.gpus else self.processor

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
    TFOPT_PRETEND_HARDWARE puts another machine in its place: plans then decide for it.

    Example:
        >>> hardware = detect()
        >>> hardware.logical_cores >= 1, hardware.memory_bytes > 0
        (True, True)
    """
    cpu_model, cpu_features, unavailable = _cpu()
    driver_memory = _gpu_memory_by_name()
    gpus = tuple(_gpu(device, driver_memory) for device in tf.config.list_physical_devices("GPU"))
    pretended = _pretended()
    if pretended and pretended.lower() not in _PROCESSORS:
        card = GPU_CARDS[card_name(pretended)]
        gpus = (
            Gpu(
                name=f"pretended {pretended}",
                compute_capability=card.compute_capability,
                memory_bytes=card.memory_bytes,
                peak_tflops=dict(card.peak_tflops),
            ),
        )
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


def has_vnni() -> bool | None:
    """Returns whether oneDNN computes int8 with VNNI or AMX on this machine; None if its instructions are unknown.

    The environment variable ONEDNN_MAX_CPU_ISA (older name: DNNL_MAX_CPU_ISA) can limit oneDNN to fewer instructions
    than the processor has. oneDNN reads the variable when its first kernel runs.
    """
    _, features, unavailable = _cpu()
    if not features and not unavailable["cpu_features"].startswith("none of"):
        return None
    return any(feature in features for feature in _LEFT_BY_LIMIT.get(_limit(), _BYTE_PRODUCTS))


def multiplies_bfloat16() -> bool:
    """Returns whether oneDNN multiplies bfloat16 with instructions for it (AVX512_BF16, AMX) on this machine.

    Limits for oneDNN count as in `has_vnni`.
    """
    features = _cpu()[1]
    return _limit() not in _WITHOUT_BFLOAT16 and not {"avx512_bf16", "amx_bf16"}.isdisjoint(features)


def computes_bfloat16() -> bool:
    """Returns whether TensorFlow can multiply in bfloat16 under the limit that the environment sets for oneDNN.

    TensorFlow asks the processor and not the limit. Where oneDNN may not use what the processor has, TensorFlow ends
    the process (measured with AVX512 and ONEDNN_MAX_CPU_ISA=AVX2).
    """
    return _limit() not in _WITHOUT_AVX512


def writes_bfloat16() -> bool:
    """Returns whether an int8 kernel of oneDNN can write bfloat16 on this machine, which takes AVX512.

    Elsewhere TensorFlow ends the process (measured with AVX2 alone: no primitive descriptor).
    """
    return computes_bfloat16() and "avx512f" in _cpu()[1]


def _limit() -> str:
    return (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").lower()


def _cpu() -> tuple[str | None, tuple[str, ...], dict[str, str]]:
    """Returns the name and the features of the processor, and the reason for each value that is missing."""
    pretended = _pretended().lower()
    if pretended in _PROCESSORS:
        return f"pretended {pretended}", _PROCESSORS[pretended], {}
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    # All processors of a machine have the same entries, so the first is enough.
    entries = dict(re.findall(r"^(\w[\w ]*?)\s*: (.*)$", text.split("\n\n")[0], re.MULTILINE))
    model = entries.get("model name") or platform.processor() or None
    unavailable = {} if model else {"cpu_model": "the operating system does not name it"}
    if "flags" not in entries:
        return model, (), {**unavailable, "cpu_features": "the operating system does not list them"}
    features = tuple(feature for feature in CPU_FEATURES if feature in entries["flags"].split())
    if not features:
        unavailable["cpu_features"] = f"none of {', '.join(CPU_FEATURES)}"
    return model, features, unavailable


def logical_cores() -> int:
    """Returns the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
            name: str = pynvml.nvmlDeviceGetName(handle)
            total: int | None = None
            with contextlib.suppress(pynvml.NVMLError):  # a GPU that shares the processor's memory reports none
                total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            memory[name] = total if memory.get(name, total) == total else None
    finally:
        pynvml.nvmlShutdown()
    return memory


def _why_no_gpu(driver_names: list[str]) -> str:
    if not driver_names:
        return "TensorFlow sees none, and no NVIDIA driver answers"
    found = f"TensorFlow sees none although the driver has {', '.join(driver_names)}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"{found}: CUDA_VISIBLE_DEVICES={visible!r}"
    return f"{found}: install the CUDA libraries with tfopt[cuda]"


def _pretended() -> str:
    """Returns the name of the processor or GPU that the environment puts in place of this machine's; "" for none."""
    name = os.environ.get(VARIABLE, "").strip()
    if name and name.lower() not in _PROCESSORS:
        try:
            card_name(name)
        except ConfigError as error:
            raise ConfigError(
                f"{VARIABLE} must be one of {', '.join(_PROCESSORS)}, or a GPU of the table ({', '.join(GPU_CARDS)}). "
                f"Received: {VARIABLE}={name!r}. Unset it to use this machine's own hardware."
            ) from error
    return name
