"""Rules for the device: kernels that are too small for it, its memory, and its clocks."""

from __future__ import annotations

from tfopt.diagnosis.experiments import CannotMeasureError
from tfopt.diagnosis.measured import WORTH, Measured, share
from tfopt.hardware import KERNEL_START_US, cpu_peak
from tfopt.report import Diagnosis

# Shares of the computation: of the starts of kernels, and of the bandwidth of the memory.
STARTS, BANDWIDTH = 0.2, 0.5
# Share of the samples with lowered clocks, and of the memory of a GPU that the training uses at most.
LOWERED, USED = 0.1, 0.5
# So many times the examples are tried where memory is left, and what they must save for each example.
LARGER, BATCH = 2, 0.1
PEAK = "_tensorflow_memory_peak_bytes"


def small_kernels(measured: Measured) -> Diagnosis | str:
    """The device starts so many small kernels that starting them takes a good part of the computation."""
    cost, compiled = measured.cost, bool(measured.model.jit_compile)
    count = (cost.fused_kernels if compiled else cost.unfused_kernels) // measured.replicas
    each_us = KERNEL_START_US if measured.hardware.gpus else cpu_peak().kernel_us
    starts_ms = count * each_us / 1e3
    compute_ms = measured.breakdown.compute_ms
    used = share(starts_ms, compute_ms)
    figures = f"{count:,} kernels, {each_us:.2g} us to start each, in a computation of {compute_ms:.3g} ms"
    if used < STARTS:
        return figures
    gain = None if compiled else _saved_by_xla(measured)
    if gain is None and not measured.hardware.gpus:  # a processor loses little by them
        return f"{figures}; XLA would not make it faster"
    if gain is not None:
        figures += f"; {measured.gain_of_other_xla()[1]}"
    return Diagnosis(
        cause="small_kernels",
        title="the computation consists of many small kernels",
        evidence=f"{figures} (threshold {STARTS:.0%})",
        gain=gain,
        advice="a larger batch, or fewer and wider layers"
        if gain is None
        else "model.compile(..., jit_compile=True), which joins kernels; a larger batch",
        settings={} if gain is None else {"training.jit_compile": True},
    )


def memory_bound(measured: Measured) -> Diagnosis | str:
    """The computation waits for the memory of the device."""
    reached, parts = measured.efficiency, measured.breakdown
    if reached.bandwidth_share is None or reached.mfu is None or not parts.compute_ms:
        raise CannotMeasureError(next(iter(reached.unavailable.values()), "the computation takes no time"))
    during = parts.step_ms / parts.compute_ms
    bandwidth, rate = during * reached.bandwidth_share, during * reached.mfu
    figures = f"the computation reaches {bandwidth:.0%} of the memory bandwidth, and {rate:.0%} of the peak rate"
    if bandwidth < BANDWIDTH or bandwidth <= rate:
        return figures
    if bandwidth > 1 and not measured.hardware.gpus:
        return f"{figures}: values stay in the caches"
    gain = None if measured.model.jit_compile else _saved_by_xla(measured)
    return Diagnosis(
        cause="memory_bound",
        title="the computation waits for the memory of the device",
        evidence=f"{figures} (threshold {BANDWIDTH:.0%})",
        gain=gain,
        advice="half precision halves the bytes; XLA (jit_compile=True) keeps results between operations out of the "
        "memory; fewer normalizations and activations between products",
        settings={} if gain is None else {"training.jit_compile": True},
    )


def throttled(measured: Measured) -> Diagnosis | str:
    """The GPU lowers its clocks."""
    load = _load(measured)
    shares = {name: _mean(values) for name, values in load.items() if name.endswith("_throttled")}
    known = {name.removesuffix("_throttled"): value for name, value in shares.items() if value is not None}
    if not known:
        raise CannotMeasureError("the driver does not say why clocks are low")
    gpu = max(known, key=lambda name: known[name])
    if known[gpu] < LOWERED:
        return f"clocks were lowered in {known[gpu]:.0%} of the samples"
    clocks = list(zip(load.get(f"{gpu}_sm_clock_mhz", ()), load[f"{gpu}_throttled"], strict=False))
    low = _mean([clock for clock, lowered in clocks if lowered])
    high = max((clock for clock, lowered in clocks if clock is not None and not lowered), default=None)
    gain, figures = None, ""
    if low is not None and high is not None and high > low:
        slower = known[gpu] * (1 - low / high)
        gain = share(measured.breakdown.compute_ms * slower, measured.breakdown.whole_ms)
        figures = f", at {low:,.0f} instead of {high:,.0f} MHz"
    return Diagnosis(
        cause="throttled",
        title=f"{gpu} lowers its clocks",
        evidence=f"in {known[gpu]:.0%} of the samples{figures} (threshold {LOWERED:.0%})",
        gain=gain,
        advice="cool the card better, or raise its power limit (nvidia-smi -pl); print(tfopt.GpuMonitor) names the "
        "reasons, such as temperature or power limit",
    )


def unused_memory(measured: Measured) -> Diagnosis | str:
    """Memory of the GPU is left over, which a larger batch could use."""
    peaks = [value for name, values in _load(measured).items() if name.endswith(PEAK) for value in values if value]
    total = min((gpu.memory_bytes for gpu in measured.hardware.gpus if gpu.memory_bytes), default=None)
    if not peaks or total is None:
        raise CannotMeasureError("TensorFlow gives no peak of the memory")
    used = max(peaks) / total
    if used > USED:
        return f"the training uses up to {used:.0%} of the memory"
    gain, longer = measured.gain_of_examples(LARGER)
    figures = f"{used:.0%} of the memory is used at most; {LARGER} times the examples take {longer:.2f} times as long"
    if gain < BATCH:
        return figures
    return Diagnosis(
        cause="unused_memory",
        title="memory is left over for a larger batch",
        evidence=f"{figures} (threshold {USED:.0%})",
        gain=gain,
        advice=f"batch_size={LARGER * measured.batch_size}, and a learning rate chosen for it. The gain is per example",
        settings={"training.global_batch_size": LARGER * measured.batch_size},
        changes_training=True,
    )


def _load(measured: Measured) -> dict[str, list[float | None]]:
    load = measured.observation.load
    if not measured.hardware.gpus and load is None:
        raise CannotMeasureError("there is no GPU")
    if load is None:
        raise CannotMeasureError("the GPU was not sampled")
    return {name: list(values) for name, values in load.series.items()}


def _saved_by_xla(measured: Measured) -> float | None:
    """Returns the share of the step that XLA saves; None if that is unknown, or too little to be the remedy."""
    try:
        gain, _ = measured.gain_of_other_xla()
    except CannotMeasureError:
        return None
    return gain if gain >= WORTH else None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
