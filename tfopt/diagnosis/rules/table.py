"""All rules, in the order in which they are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tfopt.compat.plain import DETOURS
from tfopt.diagnosis.measured import Measured
from tfopt.diagnosis.rules import compute, detours, gpu, host, input, memory
from tfopt.report import Diagnosis

_TF_DATA = "https://www.tensorflow.org/guide/data_performance"
_FUNCTION = "https://www.tensorflow.org/guide/function"
_KERAS_COMPILE = "https://keras.io/api/models/model_training_apis/"
_TENSOR_CORES = "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/"
_XLA = "https://openxla.org/xla/tf2xla"
_ROOFLINE = "https://docs.nvidia.com/deeplearning/performance/dl-performance-gpu-background/"
_NOISE = "https://arxiv.org/abs/1812.06162"
_DEVICES = "https://www.tensorflow.org/guide/gpu"
_CUDA = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/"
_NVML = "https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One cause of a slow step, and how to find it."""

    cause: str  # name of the cause
    # Returns the diagnosis, or the figure that says that the cause is absent. Raises CannotMeasureError if it cannot
    # be checked.
    check: Callable[[Measured], Diagnosis | str]
    threshold: str  # what must hold for the diagnosis, in words
    remedy: str  # what to change, in words
    source: str  # where the rule comes from


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule(cause="eager", check=host.eager, source=_KERAS_COMPILE,
         threshold="run_eagerly is set", remedy="run_eagerly=False"),
    Rule(cause="recompilation", check=host.recompilation, source=_FUNCTION,
         threshold="a fit after a new compile traces again, 5% of the time", remedy="compile once"),
    Rule(cause="retraces", check=host.retraces, source=_FUNCTION,
         threshold="new shapes trace or compile again, 5% of the time",
         remedy="one shape, or a few: drop_remainder, padding, buckets"),
    Rule(cause="shuffle_buffer", check=input.full_shuffle, source=_TF_DATA,
         threshold="the first batches of epochs take 10% of the time",
         remedy="a smaller buffer, or shuffle before decoding"),
    Rule(cause="short_epochs", check=input.short_epochs, source="measured",
         threshold="the starts of epochs take 10% of the time, and no shuffle buffer is the reason",
         remedy="one iterator for all epochs: repeat() and steps_per_epoch"),
    Rule(cause="python_generator", check=input.slow_generator, source=_TF_DATA,
         threshold="batches come from Python, and the step waits for 10% of its time",
         remedy="TFRecord files or arrays"),
    Rule(cause="float64", check=input.wide_dtype, source=_TF_DATA,
         threshold="the slowest stage gives float64, and the step waits for 10% of its time",
         remedy="compute in float32"),
    Rule(cause="slow_map", check=input.slow_map, source=_TF_DATA,
         threshold="the slowest stage is serial, and the step waits for 10% of its time",
         remedy="num_parallel_calls=tf.data.AUTOTUNE"),
    Rule(cause="host_augmentation", check=input.host_augmentation, source=_TF_DATA,
         threshold="the slowest stage draws random numbers, and the step waits for 10% of its time",
         remedy="augment on the device"),
    Rule(cause="no_cache", check=input.no_cache, source=_TF_DATA,
         threshold="the slowest stage computes the same in every epoch, and the step waits for 10% of its time",
         remedy="cache()"),
    Rule(cause="no_prefetch", check=input.no_prefetch, source=_TF_DATA,
         threshold="no prefetch at the end, and the step waits for 10% of its time",
         remedy="prefetch(tf.data.AUTOTUNE)"),
    Rule(cause="input_bound", check=input.input_bound, source=_TF_DATA,
         threshold="the step waits for 10% of its time, and no rule above says why",
         remedy="more cores, a tf.data service, smaller examples"),
    Rule(cause="blocking_callback", check=host.callbacks, source="measured",
         threshold="callbacks take 5% of the time", remedy="less often, or at the end of an epoch"),
    Rule(cause="host_copies", check=host.host_copies, source="measured",
         threshold="callbacks take 5% of the time, and half of it copies weights",
         remedy="copy at the end of an epoch"),
    Rule(cause="host_metric", check=host.host_metrics, source=_FUNCTION,
         threshold="the step calls Python, and the metrics take 5% of the time", remedy="a metric of keras.metrics"),
    Rule(cause="host_operations", check=gpu.host_operations, source=_DEVICES,
         threshold="operations of the step have no kernel for GPUs, on a GPU without XLA",
         remedy="other operations, or the input pipeline"),
    Rule(cause="no_machine_code", check=gpu.no_machine_code, source=_CUDA,
         threshold="TensorFlow was not built for the compute capability of the GPU",
         remedy="keep the driver's cache, or another TensorFlow"),
    Rule(cause="growing_memory", check=memory.growing_memory, source=_FUNCTION,
         threshold="the memory of the process grows by 1 MB in each quarter of the watched steps",
         remedy="keep numbers, not tensors; build and compile one model"),
    Rule(cause="growing_predictions", check=memory.growing_predictions, source=_FUNCTION,
         threshold="the memory of the process grows by 1 MB in each quarter of the calls of predict",
         remedy="model(x) in a loop; build and compile one model"),
    Rule(cause="small_batch", check=compute.small_batch, source=_TENSOR_CORES,
         threshold="fewer than 16 examples per replica, and 8 times as many save 10% per example",
         remedy="a larger batch"),
    Rule(cause="large_batch", check=compute.large_batch, source=_NOISE,
         threshold="more than 4 times the upper end of the noise scale, which tfopt.NoiseScale measured",
         remedy="a smaller batch"),
    Rule(cause="short_steps", check=host.short_steps, source=_KERAS_COMPILE,
         threshold="Keras' loop and the start of calls take 10% of the step", remedy="steps_per_execution"),
    Rule(cause="misaligned_widths", check=compute.misaligned_widths, source=_TENSOR_CORES,
         threshold="widths are no multiple of 8, on a GPU, or where padding saves 5% of the step",
         remedy="the next multiple of 8"),
    Rule(cause="precision", check=compute.precision, source=_TENSOR_CORES,
         threshold="float32 on a GPU whose tensor cores are faster in half precision",
         remedy="mixed_bfloat16 or mixed_float16"),
    Rule(cause="onednn_off", check=compute.onednn_off, source="measured",
         threshold="a processor on which TensorFlow leaves oneDNN off, and the computation takes 50% of the step",
         remedy="TF_ENABLE_ONEDNN_OPTS=1"),
    Rule(cause="small_kernels", check=compute.small_kernels, source=_XLA,
         threshold="starting kernels takes 20% of the computation, at 4 us each on a GPU, measured on a processor",
         remedy="XLA, a larger batch"),
    Rule(cause="memory_bound", check=compute.memory_bound, source=_ROOFLINE,
         threshold="the computation reaches 50% of the memory bandwidth, and more of it than of the peak rate",
         remedy="half precision, XLA"),
    Rule(cause="throttled", check=compute.throttled, source=_NVML,
         threshold="the GPU lowers its clocks in 10% of the samples", remedy="cooling, or a higher power limit"),
    Rule(cause="unused_memory", check=compute.unused_memory, source=_TENSOR_CORES,
         threshold="tensors take at most 50% of the memory of the GPU, and twice the examples save 10% per example",
         remedy="a larger batch"),
    *(Rule(cause=cause, check=partial(detours.taken, cause), source="measured",
           threshold=detours.threshold(detour), remedy=detours.remedy(detour))
      for cause, detour in DETOURS.items() if detours.remedy(detour)),
    Rule(cause="xla", check=compute.xla, source="measured",
         threshold="the other setting of jit_compile saves 5% of the step", remedy="jit_compile"),
    Rule(cause="slow_replica", check=compute.slow_replica, source="measured",
         threshold="one replica takes 1.2 times as long as the others", remedy="find what slows its device"),
    Rule(cause="communication", check=compute.communication, source="measured",
         threshold="the exchange of gradients takes 20% of the step",
         remedy="accumulate gradients, or a larger batch per replica"),
)
# fmt: on
