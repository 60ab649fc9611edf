"""Rules for the computation: batch, widths, precision, XLA, kernels, the GPU's memory and clocks, and replicas."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable

import keras
import tensorflow as tf

from tfopt.compat.layers import layers_inside
from tfopt.compat.tensorflow import uses_onednn
from tfopt.diagnosis.experiments import CannotMeasureError, usual_ms
from tfopt.diagnosis.measured import WORTH, Measured, share
from tfopt.hardware import KERNEL_START_US, cpu_peak
from tfopt.models.structure import layer_path
from tfopt.profiling.tensor_cores import Misalignment, tensor_core_alignment
from tfopt.report import Diagnosis
from tfopt.training.step.noise_scale import in_words, noise_of_fit
from tfopt.training.xla import xla_blockers

# Shares of the computation: of the starts of kernels, and of the bandwidth of the memory.
STARTS, BANDWIDTH = 0.2, 0.5
# Share of the samples with lowered clocks, and of the memory of a GPU that the training uses at most.
LOWERED, USED = 0.1, 0.5
# A tile of the tensor cores has 16 rows, so fewer examples leave it empty.
SMALL_BATCH = 16
# How many times as many examples are tried for a small batch and where memory is left, and what they must save.
LARGER, WHERE_LEFT, BATCH = 8, 2, 0.1
XLA = WIDTHS = 0.05
# A batch of so many times the noise scale needs less than 1.25 times the fewest steps, but five times the examples.
ABOVE_NOISE = 4
SLOWER, EXCHANGE = 1.2, 0.2
COMPUTES = 0.5
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
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
    peaks = [value for name, values in _load(measured).items() if name.endswith(PEAK) for value in values if value]
    total = min((gpu.memory_bytes for gpu in measured.hardware.gpus if gpu.memory_bytes), default=None)
    if not peaks or total is None:
        raise CannotMeasureError("TensorFlow gives no peak of the memory")
    used = max(peaks) / total
    if used > USED:
        return f"the training uses up to {used:.0%} of the memory"
    gain, longer = measured.gain_of_examples(WHERE_LEFT)
    times = f"{WHERE_LEFT} times the examples take {longer:.2f} times as long"
    figures = f"{used:.0%} of the memory is used at most; {times}"
    if gain < BATCH:
        return figures
    title, evidence = "memory is left over for a larger batch", f"{figures} (threshold {USED:.0%})"
    return _larger_batch(measured, "unused_memory", title, evidence, gain, WHERE_LEFT, WHERE_LEFT * measured.batch_size)


def _larger_batch(
    measured: Measured, cause: str, title: str, evidence: str, gain: float, factor: int, batch_size: int
) -> Diagnosis:
    return Diagnosis(
        cause=cause,
        title=title,
        evidence=evidence,
        gain=gain,
        advice=f"batch_size={batch_size}, and a learning rate chosen for it. The gain is per example",
        settings={"training.global_batch_size": factor * measured.batch_size},
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


def small_batch(measured: Measured) -> Diagnosis | str:
    own = measured.batch_size // measured.replicas
    if own >= SMALL_BATCH:
        return f"{own} examples per replica (threshold {SMALL_BATCH})"
    gain, longer = measured.gain_of_examples(LARGER)
    figures = f"{LARGER} times the examples take {longer:.1f} times as long"
    if gain < BATCH:
        return figures
    title = f"a batch of {own} examples uses the device badly"
    return _larger_batch(measured, "small_batch", title, figures, gain, LARGER, LARGER * own)


def large_batch(measured: Measured) -> Diagnosis | str:
    """The batch is so far above the noise scale of the gradients that a smaller one needs hardly more steps."""
    noise = noise_of_fit(measured.model)
    if noise is None:
        raise CannotMeasureError("tfopt.NoiseScale is not among the callbacks")
    size, figures = measured.batch_size, f"{measured.batch_size} examples in a step; noise scale {in_words(noise)}"
    if noise.most is None or size <= ABOVE_NOISE * noise.most:
        return figures
    smaller = max(round(noise.most), measured.replicas)
    return Diagnosis(
        cause="large_batch",
        title="the batch is above the noise scale of the gradients: larger ones save few steps",
        evidence=f"{figures} (threshold {ABOVE_NOISE} times the upper end)",
        gain=None,
        advice=f"batch_size={smaller}, and a learning rate chosen for it: fewer examples reach the same loss, unless "
        "steps are far slower per example. The noise scale grows in a training: measure it late",
        changes_training=True,
    )


def misaligned_widths(measured: Measured) -> Diagnosis | str:
    """Widths that are no multiple of 8 do not fit tensor cores, or the vectors of a processor."""
    alignment = tensor_core_alignment(measured.model)
    rows = [row for row in alignment.rows if not row.is_output]
    if not rows:
        return f"all {alignment.layers} widths inside the model are multiples of {alignment.multiple}"
    saved = sum(_padding_saves(measured, row) for row in rows)
    gain = share(saved, measured.breakdown.whole_ms)
    on_gpu = bool(measured.hardware.gpus)
    if gain < WIDTHS and not on_gpu:
        return f"padding {len(rows)} widths would save {gain:.1%} of the step on this processor"
    return Diagnosis(
        cause="misaligned_widths",
        title=f"{len(rows)} of {alignment.layers} widths are no multiple of {alignment.multiple}",
        evidence="; ".join(f"{row.name}: {row.what}={row.width}" for row in rows[:3]),
        gain=gain if gain >= WIDTHS else None,
        advice="; ".join(f"{row.name}: {row.what}={row.padded}" for row in rows[:3])
        + ". The model is then another one, and is trained anew",
        changes_training=True,
    )


def xla(measured: Measured) -> Diagnosis | str:
    """XLA could join operations, or slows this step down."""
    if measured.model.run_eagerly:
        return "the step runs eagerly; see eager"
    blockers = xla_blockers(measured.model)
    if blockers and not measured.model.jit_compile:
        return f"XLA cannot compile it: {blockers[0].name}: {blockers[0].reason}"
    kernels = small_kernels(measured)
    if not measured.model.jit_compile and isinstance(kernels, Diagnosis) and kernels.gain is not None:
        return "the kernels are small; see small_kernels"
    gain, figures = measured.gain_of_other_xla()
    if gain < XLA:
        return figures
    return Diagnosis(
        cause="xla",
        title="XLA slows this step down" if measured.model.jit_compile else "XLA is off",
        evidence=f"{figures} (threshold {XLA:.0%})",
        gain=gain,
        advice=f"model.compile(..., jit_compile={not measured.model.jit_compile})",
        settings={"training.jit_compile": not measured.model.jit_compile},
    )


def onednn_off(measured: Measured) -> Diagnosis | str:
    """TensorFlow trains with slower kernels: without VNNI, bfloat16 or AMX it leaves oneDNN off, as when told to."""
    if measured.hardware.gpus:
        return "a GPU computes"
    if uses_onednn():
        return "TensorFlow computes with oneDNN"
    if measured.model.jit_compile:
        return "XLA compiles the step"
    if platform.machine() not in ("x86_64", "AMD64"):
        raise CannotMeasureError(f"what oneDNN saves on {platform.machine()} is unknown")
    parts = measured.breakdown
    used = share(parts.compute_ms, parts.whole_ms)
    figures = f"the computation takes {used:.0%} of the step"
    if used < COMPUTES:
        return figures
    told = os.environ.get(ONEDNN)
    why = f"{ONEDNN}={told}" if told else "oneDNN is on by itself with VNNI, bfloat16 or AMX only"
    return Diagnosis(
        cause="onednn_off",
        title="TensorFlow computes without oneDNN",
        evidence=f"{figures} (threshold {COMPUTES:.0%}); {why}",
        gain=None,
        advice=f"set the environment variable {ONEDNN}=1 before Python imports TensorFlow, and measure. "
        "Results differ by rounding",
    )


def precision(measured: Measured) -> Diagnosis | str:
    """Tensor cores multiply half precision several times as fast."""
    rates = [gpu.peak_tflops for gpu in measured.hardware.gpus]
    if not rates:
        raise CannotMeasureError("there is no GPU")
    known = rates[0]
    policy = measured.model.dtype_policy.compute_dtype
    if known is None or "float16" not in known:
        raise CannotMeasureError("the rates of this GPU are unknown")
    if policy != "float32":
        return f"the model computes in {policy}"
    half = "bfloat16" if "bfloat16" in known else "float16"
    now = known.get("tensorfloat32", known["float32"])
    parts = measured.breakdown
    return Diagnosis(
        cause="precision",
        title="the model computes in float32",
        evidence=f"peak {now:g} TFLOP/s in float32, {known[half]:g} TFLOP/s in {half}",
        # At best the computation takes the share of the rates. Half of that is what memory-bound layers leave.
        gain=share(parts.compute_ms * (1 - now / known[half]) / 2, parts.whole_ms),
        advice=f'keras.config.set_dtype_policy("mixed_{half}") before the model is built',
        settings={"training.precision": f"mixed_{half}"},
        changes_training=True,
    )


def slow_replica(measured: Measured) -> Diagnosis | str:
    times = measured.replica_ms
    if not times:
        return "there is one replica"
    slowest = max(times)
    others = sorted(times)[:-1]
    usual = others[len(others) // 2]
    if slowest < SLOWER * usual:
        return f"the slowest replica takes {slowest / usual:.2f} times as long as the others (threshold {SLOWER})"
    return Diagnosis(
        cause="slow_replica",
        title=f"replica {times.index(slowest)} takes {slowest / usual:.1f} times as long as the others",
        evidence=", ".join(f"replica {index} {ms:.3g} ms" for index, ms in enumerate(times))
        + f" (threshold {SLOWER} times)",
        gain=share(slowest - usual, measured.breakdown.whole_ms),
        advice="look for other work on its device, a lower clock, or longer examples in its part of the batch",
    )


def communication(measured: Measured) -> Diagnosis | str:
    parts = measured.breakdown
    used = share(parts.communication_ms, parts.whole_ms)
    if used < EXCHANGE:
        return f"the exchange of gradients takes {used:.1%} of the step"
    return Diagnosis(
        cause="communication",
        title="replicas exchange gradients for a good part of the step",
        evidence=f"{parts.communication_ms:.3g} of {parts.whole_ms:.3g} ms (threshold {EXCHANGE:.0%})",
        gain=used / 2,
        advice="TrainingConfig(accumulate=2) exchanges half as often; a larger batch per replica computes more between "
        "two exchanges",
        settings={"training.accumulate": 2},
        changes_training=True,
    )


def _padding_saves(measured: Measured, row: Misalignment) -> float:
    """Returns the milliseconds of a training step that the padded width of a Dense layer saves."""
    layer = next(each for each in layers_inside(measured.model) if layer_path(measured.model, each) == row.name)
    if not isinstance(layer, keras.layers.Dense):
        return 0.0
    rows, width = measured.batch_size, int(layer.kernel.shape[0])
    now, padded = (usual_ms(dense_products(rows, width, units), seconds=0.1) for units in (row.width, row.padded))
    return now - padded


def dense_products(rows: int, width: int, units: int) -> Callable[[], tuple[tf.Tensor, ...]]:
    """Returns the three products of a Dense layer in a training step: forward, and both gradients."""
    shapes = ((rows, width), (width, units), (rows, units))
    x, kernel, gradient = (tf.random.stateless_normal(shape, (0, seed)) for seed, shape in enumerate(shapes))

    def products() -> tuple[tf.Tensor, ...]:
        return (
            tf.matmul(x, kernel),
            tf.matmul(gradient, kernel, transpose_b=True),
            tf.matmul(x, gradient, transpose_a=True),
        )

    return tf.function(products)
