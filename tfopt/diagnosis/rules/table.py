"""All rules, in the order in which they are checked."""

from __future__ import annotations

from tfopt.diagnosis.rules import compute, device, host, input, replicas
from tfopt.diagnosis.rules.rule import Rule

_TF_DATA = "https://www.tensorflow.org/guide/data_performance"
_FUNCTION = "https://www.tensorflow.org/guide/function"
_KERAS_COMPILE = "https://keras.io/api/models/model_training_apis/"
_TENSOR_CORES = "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/"
_XLA = "https://openxla.org/xla/tf2xla"
_ROOFLINE = "https://docs.nvidia.com/deeplearning/performance/dl-performance-gpu-background/"
_NVML = "https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"

RULES: tuple[Rule, ...] = (
    Rule(
        cause="eager",
        check=host.eager,
        threshold="run_eagerly is set",
        remedy="run_eagerly=False",
        source=_KERAS_COMPILE,
    ),
    Rule(
        cause="recompilation",
        check=host.recompilation,
        threshold="a fit after a new compile traces again, 5% of the time",
        remedy="compile once",
        source=_FUNCTION,
    ),
    Rule(
        cause="retraces",
        check=host.retraces,
        threshold="new shapes trace or compile again, 5% of the time",
        remedy="one shape, or a few: drop_remainder, padding, buckets",
        source=_FUNCTION,
    ),
    Rule(
        cause="shuffle_buffer",
        check=input.full_shuffle,
        threshold="the first batches of epochs take 10% of the time",
        remedy="a smaller buffer, or shuffle before decoding",
        source=_TF_DATA,
    ),
    Rule(
        cause="short_epochs",
        check=input.short_epochs,
        threshold="the starts of epochs take 10% of the time, and no shuffle buffer is the reason",
        remedy="one iterator for all epochs: repeat() and steps_per_epoch",
        source="measured",
    ),
    Rule(
        cause="python_generator",
        check=input.slow_generator,
        threshold="batches come from Python, and the step waits for 10% of its time",
        remedy="TFRecord files or arrays",
        source=_TF_DATA,
    ),
    Rule(
        cause="float64",
        check=input.wide_dtype,
        threshold="the slowest stage gives float64, and the step waits for 10% of its time",
        remedy="compute in float32",
        source=_TF_DATA,
    ),
    Rule(
        cause="slow_map",
        check=input.slow_map,
        threshold="the slowest stage is serial, and the step waits for 10% of its time",
        remedy="num_parallel_calls=tf.data.AUTOTUNE",
        source=_TF_DATA,
    ),
    Rule(
        cause="host_augmentation",
        check=input.host_augmentation,
        threshold="the slowest stage draws random numbers, and the step waits for 10% of its time",
        remedy="augment on the device",
        source=_TF_DATA,
    ),
    Rule(
        cause="no_cache",
        check=input.no_cache,
        threshold="the slowest stage computes the same in every epoch, and the step waits for 10% of its time",
        remedy="cache()",
        source=_TF_DATA,
    ),
    Rule(
        cause="no_prefetch",
        check=input.no_prefetch,
        threshold="no prefetch at the end, and the step waits for 10% of its time",
        remedy="prefetch(tf.data.AUTOTUNE)",
        source=_TF_DATA,
    ),
    Rule(
        cause="input_bound",
        check=input.input_bound,
        threshold="the step waits for 10% of its time, and no rule above says why",
        remedy="more cores, a tf.data service, smaller examples",
        source=_TF_DATA,
    ),
    Rule(
        cause="blocking_callback",
        check=host.callbacks,
        threshold="callbacks take 5% of the time",
        remedy="less often, or at the end of an epoch",
        source="measured",
    ),
    Rule(
        cause="host_copies",
        check=host.host_copies,
        threshold="callbacks take 5% of the time, and half of it copies weights",
        remedy="copy at the end of an epoch",
        source="measured",
    ),
    Rule(
        cause="host_metric",
        check=host.host_metrics,
        threshold="the step calls Python, and the metrics take 5% of the time",
        remedy="a metric of keras.metrics",
        source=_FUNCTION,
    ),
    Rule(
        cause="small_batch",
        check=compute.small_batch,
        threshold="fewer than 16 examples per replica, and 8 times as many save 10% per example",
        remedy="a larger batch",
        source=_TENSOR_CORES,
    ),
    Rule(
        cause="short_steps",
        check=host.short_steps,
        threshold="Keras' loop and the start of calls take 10% of the step",
        remedy="steps_per_execution",
        source=_KERAS_COMPILE,
    ),
    Rule(
        cause="misaligned_widths",
        check=compute.misaligned_widths,
        threshold="widths are no multiple of 8, on a GPU, or where padding saves 5% of the step",
        remedy="the next multiple of 8",
        source=_TENSOR_CORES,
    ),
    Rule(
        cause="precision",
        check=compute.precision,
        threshold="float32 on a GPU whose tensor cores are faster in half precision",
        remedy="mixed_bfloat16 or mixed_float16",
        source=_TENSOR_CORES,
    ),
    Rule(
        cause="small_kernels",
        check=device.small_kernels,
        threshold="starting kernels takes 20% of the computation, at 4 us each on a GPU, measured on a processor",
        remedy="XLA, a larger batch",
        source=_XLA,
    ),
    Rule(
        cause="memory_bound",
        check=device.memory_bound,
        threshold="the computation reaches 50% of the memory bandwidth, and more of it than of the peak rate",
        remedy="half precision, XLA",
        source=_ROOFLINE,
    ),
    Rule(
        cause="throttled",
        check=device.throttled,
        threshold="the GPU lowers its clocks in 10% of the samples",
        remedy="cooling, or a higher power limit",
        source=_NVML,
    ),
    Rule(
        cause="unused_memory",
        check=device.unused_memory,
        threshold="tensors take at most 50% of the memory of the GPU, and twice the examples save 10% per example",
        remedy="a larger batch",
        source=_TENSOR_CORES,
    ),
    Rule(
        cause="xla",
        check=compute.xla,
        threshold="the other setting of jit_compile saves 5% of the step",
        remedy="jit_compile",
        source="measured",
    ),
    Rule(
        cause="slow_replica",
        check=replicas.slow_replica,
        threshold="one replica takes 1.2 times as long as the others",
        remedy="find what slows its device",
        source="measured",
    ),
    Rule(
        cause="communication",
        check=replicas.communication,
        threshold="the exchange of gradients takes 20% of the step",
        remedy="accumulate gradients, or a larger batch per replica",
        source="measured",
    ),
)
