"""What only a GPU can show of profiling: NVML during a fit, TensorFlow's memory, the diagnosis, kernels in a trace."""

import itertools
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.hardware import detect

pytestmark = pytest.mark.gpu

INPUTS, WIDTH, SECONDS = 256, 4096, 4.0


class Until(keras.callbacks.Callback):
    """Ends `fit` some seconds after the first step, which is traced and compiled."""

    def on_train_begin(self, logs=None):
        self.first = None

    def on_train_batch_end(self, batch, logs=None):
        self.first = self.first or time.perf_counter()
        self.model.stop_training = time.perf_counter() - self.first > SECONDS


def batch_size():
    """Returns so many examples that a step takes some ten milliseconds: then the start of a step does not count."""
    return 16384 if (detect().gpus[0].compute_capability or (0, 0)) >= (8, 0) else 4096


def network(precision="float32", **options):
    """Two large products, so that the device computes for nearly all of the step. The input is small to copy."""
    plan = tfopt.plan(tfopt.TrainingConfig(precision=precision, strategy="none", global_batch_size=batch_size()))
    with plan.scope():
        hidden = [keras.layers.Dense(WIDTH, "relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((INPUTS,)), *hidden, keras.layers.Dense(8, dtype="float32")])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def examples(batches=1):
    count = batches * batch_size()
    return np.random.default_rng(0).random((count, INPUTS), dtype=np.float32), np.arange(count) % 8


def half_precision():
    capability = detect().gpus[0].compute_capability or (0, 0)
    if capability < (7, 0):
        pytest.skip(f"compute capability {capability} has no tensor cores")
    return "mixed_bfloat16" if capability >= (8, 0) else "mixed_float16"


@pytest.fixture(scope="module")
def watched():
    """A fit of some seconds under the monitor: the model, the monitor, the logs, and TensorFlow's peak after it."""
    model, monitor = network(), tfopt.GpuMonitor(interval_s=0.1)
    data = tf.data.Dataset.from_tensors(examples()).cache().repeat(100_000)
    history = model.fit(data, shuffle=False, verbose=0, callbacks=[monitor, Until()]).history
    return model, monitor, history, tf.config.experimental.get_memory_info("GPU:0")["peak"]


def known(monitor, name):
    """Returns the values of a series of the first GPU; skips with the reason if the card does not give them."""
    load = monitor.utilization
    values = [value for value in load.series[f"gpu0_{name}"] if value is not None]
    if not values and f"gpu0_{name}" in load.unavailable:
        pytest.skip(f"{detect().gpus[0].name}: {load.unavailable[f'gpu0_{name}']}")
    return values


def test_a_busy_gpu_is_seen_busy(watched):
    _, monitor, history, _ = watched
    assert monitor.source.startswith("NVML (")
    assert len(monitor.utilization.seconds) > 5 * SECONDS  # of ten per second
    assert max(known(monitor, "gpu_utilization_percent")) > 30
    assert 0 < history["gpu_utilization_percent"][0] <= 100
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tfopt")]


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        ("power_watts", 10, 2000),
        ("temperature_celsius", 15, 110),
        ("sm_clock_mhz", 200, 5000),
        ("memory_utilization_percent", 0, 100),
        ("throttled", 0, 1),
        ("pcie_received_bytes_per_second", 0, 2e11),
        ("nvlink_received_bytes_per_second", 0, 2e12),
    ],
)
def test_a_figure_has_the_size_that_its_unit_says(watched, name, lowest, highest):
    values = known(watched[1], name)
    assert values
    assert lowest <= min(values) <= max(values) <= highest


def test_energy_grows_as_the_power_says(watched):
    _, monitor, history, _ = watched
    energy, power = known(monitor, "energy_joules"), known(monitor, "power_watts")
    assert energy[0] == 0
    assert all(later >= earlier for earlier, later in itertools.pairwise(energy))
    # NVML's power is a mean of up to a second before the sample, so the start of the load counts late.
    expected = np.mean(power) * monitor.utilization.seconds[-1]
    assert energy[-1] == pytest.approx(expected, rel=0.5)
    assert 0 < history["gpu_energy_joules"][0] <= energy[-1]


def test_tensorflows_own_peak_holds_the_tensors_and_fits_into_the_card(watched):
    model, monitor, history, peak = watched
    peaks, now = known(monitor, "tensorflow_memory_peak_bytes"), known(monitor, "tensorflow_memory_bytes")
    assert peaks == sorted(peaks)
    assert all(most >= current for most, current in zip(peaks, now, strict=True))
    assert 4 * model.count_params() < peaks[-1] < detect().gpus[0].memory_bytes
    assert peaks[-1] == peak
    assert history["gpu_tensorflow_memory_peak_bytes"][0] <= peaks[-1]
    assert max(known(monitor, "memory_used_bytes")) >= max(now)  # NVML counts what TensorFlow has taken


def test_doctor_names_the_precision_and_its_parts_add_up():
    rates = detect().gpus[0].peak_tflops
    report = tfopt.diagnose(network(), *examples(4), batch_size=batch_size(), steps=60)
    parts = report.breakdown
    assert abs(parts.unexplained_ms) < 0.25 * parts.step_ms, parts
    if rates is None or "float16" not in rates:
        assert report.unchecked["precision"] == "the rates of this GPU are unknown"
        return
    found = {each.cause: each for each in report.diagnoses}
    half_precision()
    assert 0 < found["precision"].gain < 1
    assert "TFLOP/s" in found["precision"].evidence
    assert 0.02 < report.efficiency.mfu < 1.05, report.efficiency


def test_a_trace_has_the_kernels_and_half_precision_runs_in_tensor_cores(tmp_path):
    model = network(half_precision(), jit_compile=False)  # the names of XLA's own kernels do not say what they use
    report = tfopt.diagnose(model, *examples(4), batch_size=batch_size(), steps=20, trace_dir=tmp_path)
    assert report.absent["precision"].startswith("the model computes in")
    trace = report.trace
    assert trace.unavailable == {}  # otherwise the profiler had no rights on the GPU
    assert trace.tensor_core_share > 0.3, trace
    assert trace.copy_ms_per_step >= 0
    assert 0 <= trace.idle_share < 0.9
    assert all(each.on_device for each in trace.operators)
