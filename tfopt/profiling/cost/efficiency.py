"""The share of a device's peak rates that a training step reaches, and the roof that limits it.

A device computes at most `peak` operations per second and moves at most `bandwidth` bytes per second. So a step of F
operations and B bytes takes at least max(F / peak, B / bandwidth). F / B is the intensity of the step. Above the ridge,
peak / bandwidth, the first roof binds: the step is bound by compute. Below it, the second roof binds: memory. If a step
takes much longer than both roofs allow, neither binds: the time goes to overhead, such as the start of small kernels,
the host, or the wait for data.

MFU (model FLOPs utilization) is the rate of F over the peak. F counts matrix products and convolutions, also where
layers are computed again. NVML's `gpu_utilization` is something else: the share of time in which any kernel runs.

Reference:
    Williams et al., "Roofline: An Insightful Visual Performance Model for Multicore Architectures", CACM 2009.
    Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B (MFU).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import ConfigError
from tfopt.hardware import Gpu, Hardware, cpu_peak, detect, find_card
from tfopt.profiling.cost.training import train_cost
from tfopt.report import Record
from tfopt.report.formatting import short_bytes, short_count
from tfopt.report.record import shown_or_reason
from tfopt.report.sheet import Sheet, Shown, pairs

# A step that reaches less than this share of both roofs is bound by overhead. Well tuned training on a GPU reaches 0.4
# to 0.6 of its binding roof (Chowdhery et al. 2022, table 3: 0.21 to 0.46 of the compute roof for language models).
FAR_BELOW = 0.2
COMPUTE_DTYPES = {"float32": "float32", "mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}


@dataclass(frozen=True, kw_only=True)
class Roofs(Record):
    """The peak rates of a device, or of several devices together."""

    device: str  # name of the device
    dtype: str  # the arithmetic that the peak is for, for example "bfloat16" or "tensorfloat32"
    flops_per_s: float | None  # peak rate of operations; None if it is unknown
    bytes_per_s: float | None  # bandwidth of the memory; None if it is unknown
    unavailable: Mapping[str, str] = field(default_factory=dict)  # for each rate that is None, the reason


@dataclass(frozen=True, kw_only=True)
class Efficiency(Record, Shown):
    """How much of a device's peak rates a training step reaches.

    Attributes:
        flops_per_step: Floating-point operations of a step, forward, gradient and update.
        bytes_per_step: Estimated bytes that a step moves between memory and processor.
        step_ms: Measured time of a step.
        flops_per_s: The rate that the step reaches.
        peak_flops_per_s: Peak rate of the device; None if it is unknown.
        mfu: Share of the peak rate, 0 to 1.
        bytes_per_s: The bandwidth that the step reaches.
        peak_bytes_per_s: Bandwidth of the device's memory; None if it is unknown.
        bandwidth_share: Share of the bandwidth. Above 1, caches keep values that count as moved.
        intensity: Operations per byte of the step.
        ridge: Operations per byte above which compute limits a step of this device.
        bound: The roof that limits the step: "compute" or "memory"; "overhead" if the step is far below both.
        device: Name of the device.
        dtype: The arithmetic that the peak is for, for example "bfloat16".
        unavailable: For each attribute above that is None, the reason.
    """

    flops_per_step: int
    bytes_per_step: int
    step_ms: float
    flops_per_s: float
    peak_flops_per_s: float | None
    mfu: float | None
    bytes_per_s: float
    peak_bytes_per_s: float | None
    bandwidth_share: float | None
    intensity: float
    ridge: float | None
    bound: str | None
    device: str
    dtype: str
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def rows(self) -> dict[str, str]:
        """Returns the figures as text, by what they are."""
        compute = f"{short_count(self.flops_per_step)} operations in {self.step_ms:.3g} ms: {_rate(self.flops_per_s)}"
        memory = f"{short_bytes(self.bytes_per_step)} moved: {short_bytes(self.bytes_per_s)}/s"
        if self.mfu is not None and self.peak_flops_per_s is not None:
            compute += f" of {_rate(self.peak_flops_per_s)} in {self.dtype}"
        if self.bandwidth_share is not None and self.peak_bytes_per_s is not None:
            memory += f" of {short_bytes(self.peak_bytes_per_s)}/s ({self.bandwidth_share:.1%})"
        ridge = shown_or_reason(self, "ridge", "{:.3g}")
        return {
            "device": self.device,
            "mfu": shown_or_reason(self, "mfu", "{:.1%}"),
            "compute": compute,
            "memory": memory,
            "intensity": f"{self.intensity:.3g} operations per byte, ridge {ridge}",
            "bound by": shown_or_reason(self, "bound", "{}"),
        }

    def _sheet(self) -> Sheet:
        return Sheet(title="efficiency", tables=[pairs(self.rows())])

    def __str__(self) -> str:
        return str(pairs(self.rows()))


def efficiency(
    model: keras.Model, batch: Any, step_ms: float, hardware: Hardware | None = None, precision: str | None = None
) -> Efficiency:
    """Compares a measured step with the peak rates of its device.

    On a GPU the peaks are those of its datasheet; on a processor they are measured, which takes about two seconds, once
    for the process. If the model trains on several GPUs, the peaks are those of all of them.

    Args:
        model: A model that Keras or tfopt has compiled.
        batch: A batch as `fit` trains on it, of arrays or `tf.TensorSpec`: (x, y) or (x, y, sample_weight).
        step_ms: Measured time of a step in milliseconds.
        hardware: The machine; None detects it.
        precision: Name of the dtype policy; None is that of the model.
    Raises:
        ConfigError: step_ms is not positive.
        UnsupportedModelError: The model is not compiled.
    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> model.compile("sgd", "mse")
        >>> reached = efficiency(model, (np.zeros((16, 8)), np.zeros((16, 4))), step_ms=1.0)
        >>> reached.flops_per_step, reached.bound
        (2048, 'overhead')
    """
    if not step_ms > 0:
        raise ConfigError(f"step_ms must be positive. Received: step_ms={step_ms}. Pass the measured milliseconds.")
    cost = train_cost(model, batch)
    replicas = model.distribute_strategy.num_replicas_in_sync
    roofs = roofs_of(hardware or detect(), precision or model.dtype_policy.name, replicas)
    return compare(cost.flops, cost.moved_bytes, step_ms, roofs)


def compare(flops: int, moved_bytes: int, step_ms: float, roofs: Roofs) -> Efficiency:
    """Returns the shares of the roofs that a step reaches.

    Example:
        >>> roofs = Roofs(device="a GPU", dtype="float16", flops_per_s=1e12, bytes_per_s=1e11)
        >>> reached = compare(8 * 10**9, 10**8, 10.0, roofs)
        >>> reached.mfu, reached.intensity, reached.ridge, reached.bound
        (0.8, 80.0, 10.0, 'compute')
    """
    seconds = step_ms / 1e3
    peak, bandwidth = roofs.flops_per_s, roofs.bytes_per_s
    unavailable: dict[str, str] = {}
    if peak is None:
        unavailable |= dict.fromkeys(("peak_flops_per_s", "mfu"), roofs.unavailable["flops_per_s"])
    if bandwidth is None:
        unavailable |= dict.fromkeys(("peak_bytes_per_s", "bandwidth_share"), roofs.unavailable["bytes_per_s"])
    if peak is None or bandwidth is None:
        unavailable |= dict.fromkeys(("ridge", "bound"), next(iter(unavailable.values())))
    mfu = None if peak is None else flops / seconds / peak
    share = None if bandwidth is None else moved_bytes / seconds / bandwidth
    bound = None
    if mfu is not None and share is not None:
        bound = "overhead" if max(mfu, share) < FAR_BELOW else "compute" if mfu >= share else "memory"
    return Efficiency(
        flops_per_step=flops,
        bytes_per_step=moved_bytes,
        step_ms=step_ms,
        flops_per_s=flops / seconds,
        peak_flops_per_s=peak,
        mfu=mfu,
        bytes_per_s=moved_bytes / seconds,
        peak_bytes_per_s=bandwidth,
        bandwidth_share=share,
        intensity=flops / max(1, moved_bytes),
        ridge=None if peak is None or bandwidth is None else peak / bandwidth,
        bound=bound,
        device=roofs.device,
        dtype=roofs.dtype,
        unavailable=unavailable,
    )


def roofs_of(hardware: Hardware, precision: str, replicas: int = 1) -> Roofs:
    """Returns the peak rates of a machine's GPUs, or of its processor if it has none."""
    dtype = COMPUTE_DTYPES.get(precision, precision)
    if not hardware.gpus:
        return _of_processor(hardware, dtype)
    gpu = hardware.gpus[0]
    card = find_card(gpu.name)
    device = gpu.name if replicas == 1 else f"{replicas} x {gpu.name}"
    if card is None:
        reason = f"{gpu.name} is not among the GPUs that tfopt knows"
        unavailable = {"flops_per_s": reason, "bytes_per_s": reason}
        return Roofs(device=device, dtype=dtype, flops_per_s=None, bytes_per_s=None, unavailable=unavailable)
    dtype = _arithmetic(dtype, gpu)
    rate = card.peak_tflops.get(dtype)
    return Roofs(
        device=device,
        dtype=dtype,
        flops_per_s=None if rate is None else 1e12 * rate * replicas,
        bytes_per_s=1e9 * card.memory_gb_per_s * replicas,
        unavailable={} if rate is not None else {"flops_per_s": f"{gpu.name} has no fast arithmetic in {dtype}"},
    )


def _arithmetic(dtype: str, gpu: Gpu) -> str:
    """Returns the arithmetic of matrix products: since Ampere, those in float32 run in TensorFloat-32 by default."""
    allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    has = (gpu.peak_tflops or {}).get("tensorfloat32") is not None
    return "tensorfloat32" if dtype == "float32" and allowed and has else dtype


def _of_processor(hardware: Hardware, dtype: str) -> Roofs:
    peak = cpu_peak()
    rate = {"float32": peak.float32_gflops, "bfloat16": peak.bfloat16_gflops}.get(dtype)
    return Roofs(
        device=f"{hardware.processor}, {hardware.logical_cores} logical cores, measured",
        dtype=dtype,
        flops_per_s=None if rate is None else 1e9 * rate,
        bytes_per_s=1e9 * peak.memory_gb_per_s,
        unavailable={} if rate is not None else {"flops_per_s": f"not measured in {dtype} on a processor"},
    )


def _rate(flops_per_s: float) -> str:
    return f"{short_count(flops_per_s)}FLOP/s"
