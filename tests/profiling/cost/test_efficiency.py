"""MFU and the roof that binds, for machines with known figures, and for this processor."""

import keras
import numpy as np
import pytest
from keras import layers

from tfopt.errors import ConfigError
from tfopt.hardware import Gpu, Hardware, cpu_peak, detect, peak_tflops
from tfopt.profiling.cost import Roofs, efficiency, train_cost
from tfopt.profiling.cost.efficiency import compare, roofs_of

ROOFS = Roofs(device="a GPU", dtype="float16", flops_per_s=1e12, bytes_per_s=1e11)


def machine(*names):
    gpus = tuple(Gpu(name=name, compute_capability=(8, 0), peak_tflops=peak_tflops(name)) for name in names)
    return Hardware(logical_cores=8, memory_bytes=2**36, gpus=gpus, tensorflow_version="2.21.0")


@pytest.mark.parametrize(
    ("flops", "moved", "bound"),
    [
        (8e9, 1e8, "compute"),  # 80% and 10% of the roofs
        (1e9, 9e8, "memory"),  # 10% and 90%
        (1e9, 1e8, "overhead"),  # 10% and 10%
    ],
)
def test_the_roof_that_binds(flops, moved, bound):
    reached = compare(int(flops), int(moved), 10.0, ROOFS)
    assert reached.bound == bound
    assert reached.mfu == pytest.approx(flops / 1e10)
    assert reached.bandwidth_share == pytest.approx(moved / 1e9)
    assert reached.intensity == pytest.approx(flops / moved)
    assert reached.ridge == 10


@pytest.mark.parametrize(
    ("name", "precision", "dtype", "rate", "bandwidth"),
    [
        ("NVIDIA A100-SXM4-40GB", "float32", "tensorfloat32", 156e12, 1555e9),
        ("NVIDIA A100-SXM4-40GB", "mixed_bfloat16", "bfloat16", 312e12, 1555e9),
        ("Tesla T4", "float32", "float32", 8.1e12, 320e9),
        ("Tesla T4", "mixed_float16", "float16", 65e12, 320e9),
    ],
)
def test_the_peaks_follow_from_the_card_and_the_precision(name, precision, dtype, rate, bandwidth):
    roofs = roofs_of(machine(name), precision)
    assert (roofs.dtype, roofs.flops_per_s, roofs.bytes_per_s) == (dtype, rate, bandwidth)
    both = roofs_of(machine(name, name), precision, replicas=2)
    assert (both.flops_per_s, both.bytes_per_s) == (2 * rate, 2 * bandwidth)


def test_what_is_unknown_is_none_with_the_reason():
    unknown = compare(10**9, 10**8, 10.0, roofs_of(machine("NVIDIA X"), "float32"))
    assert (unknown.mfu, unknown.bound, unknown.ridge) == (None, None, None)
    assert unknown.flops_per_s == 1e11
    assert "NVIDIA X is not among the GPUs" in unknown.unavailable["mfu"]
    assert "mfu        unavailable (NVIDIA X" in str(unknown)
    half = compare(10**9, 10**8, 10.0, roofs_of(machine("Tesla T4"), "mixed_bfloat16"))
    assert half.mfu is None
    assert half.bandwidth_share == pytest.approx(1e10 / 320e9)
    assert "no fast arithmetic in bfloat16" in half.unavailable["mfu"]


def test_a_step_of_this_processor_is_compared_with_its_measured_peaks():
    model = keras.Sequential([keras.Input((64,)), layers.Dense(32)])
    model.compile("sgd", "mse")
    batch = np.zeros((128, 64)), np.zeros((128, 32))
    reached = efficiency(model, batch, step_ms=2.0)
    assert reached.flops_per_step == train_cost(model, batch).flops == 2 * 2 * 128 * 64 * 32
    if not detect().gpus:
        assert reached.peak_flops_per_s == 1e9 * cpu_peak().float32_gflops
        assert reached.mfu == pytest.approx(reached.flops_per_step / 2e-3 / (1e9 * cpu_peak().float32_gflops))
    assert reached.unavailable == {}


def test_a_time_that_is_not_positive_is_refused():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="step_ms=0"):
        efficiency(model, (np.zeros((2, 4)), np.zeros((2, 2))), step_ms=0)
