"""The peak rates of this machine's processor, measured: no datasheet says what a virtual machine gets of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from tfopt.hardware.machine import computes_bfloat16, logical_cores
from tfopt.report import Record
from tfopt.timing import call_seconds

MATRIX_SIZE = 2048
# 256 MB for each array: far more than the caches of one processor.
ARRAY_VALUES = 2**26
SECONDS = 0.4
SMALL_KERNELS = 300


@dataclass(frozen=True, kw_only=True)
class CpuPeak(Record):
    """Rates that TensorFlow reaches on this processor with all cores of the process."""

    float32_gflops: float  # of a large float32 matrix product, in 10^9 operations per second
    # The same in bfloat16, lower without instructions for it. None under a limit for oneDNN that leaves no bfloat16.
    bfloat16_gflops: float | None
    memory_gb_per_s: float  # bandwidth of the memory in 10^9 bytes per second
    kernel_us: float  # time of a kernel with almost nothing to compute, in a graph, in microseconds
    logical_cores: int


@functools.cache
def cpu_peak() -> CpuPeak:
    """Measures the peak rates of this processor, in about three seconds. The result is kept for the process.

    The bandwidth is that of `a += c` on arrays far larger than the caches, with two reads and one write, as the sums
    of the STREAM benchmark count. The array is updated in place, because new memory would be measured with its page
    faults. The best of several runs counts: other processes can only make a run slower.

    Example:
        >>> peak = cpu_peak()
        >>> peak.float32_gflops > 1, peak.memory_gb_per_s > 0.1
        (True, True)

    Reference:
        McCalpin, "Memory Bandwidth and Machine Balance in Current High Performance Computers", 1995.
    """
    with tf.device("CPU:0"):
        return CpuPeak(
            float32_gflops=_matmul_gflops(tf.float32),
            bfloat16_gflops=_matmul_gflops(tf.bfloat16) if computes_bfloat16() else None,
            memory_gb_per_s=_memory_gb_per_s(),
            kernel_us=_kernel_us(),
            logical_cores=logical_cores(),
        )


def _matmul_gflops(dtype: tf.DType) -> float:
    matrix = tf.cast(tf.random.stateless_uniform((MATRIX_SIZE, MATRIX_SIZE), (1, 2)), dtype)
    return 2e-9 * MATRIX_SIZE**3 / _best_seconds(lambda: tf.matmul(matrix, matrix))


def _memory_gb_per_s() -> float:
    total, added = tf.Variable(tf.zeros(ARRAY_VALUES)), tf.ones(ARRAY_VALUES)
    return 1e-9 * 3 * 4 * ARRAY_VALUES / _best_seconds(lambda: total.assign_add(added, read_value=False))


def _kernel_us() -> float:
    vector = tf.ones((1, 8))
    matrix = tf.linalg.eye(8)

    @tf.function
    def chain(value: tf.Tensor) -> tf.Tensor:
        for _ in range(SMALL_KERNELS):  # each product needs the one before, so they run one after the other
            value = tf.matmul(value, matrix)
        return value

    return 1e6 * _best_seconds(lambda: chain(vector)) / SMALL_KERNELS


def _best_seconds(run: Callable[[], object]) -> float:
    """Returns the shortest time of a run. The first run is not counted, since it also prepares the kernel."""
    run()
    return min(call_seconds(run, SECONDS))
