import itertools
import json
import math
import sys
import threading
import time

import keras
import numpy as np
import psutil
import pytest

from tfopt.errors import ArtifactError, ConfigError
from tfopt.hardware import detect
from tfopt.profiling.monitoring.callback import LOGGED, GpuMonitor
from tfopt.profiling.monitoring.command import monitor_command
from tfopt.profiling.monitoring.workers import merge_workers

FIT_TWICE_THEN_RAISE = """
import json, os, time, warnings
import keras, numpy as np
from tfopt.profiling.monitoring.callback import GpuMonitor

class Raise(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise RuntimeError("fit failed on purpose")

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(loss="mse")
x, y = np.zeros((8, 4)), np.zeros((8, 1))
monitor = GpuMonitor(interval_s=0.05)
model.fit(x, y, epochs=3, verbose=0, callbacks=[monitor])
found = {"utilization": monitor.utilization.to_dict(), "summary": monitor.summary(), "text": str(monitor)}

class LoseForAWhile(keras.callbacks.Callback):  # NVML fails in some samples of the fit, and answers in those after
    def on_train_begin(self, logs=None):
        for lost in (True, False):
            if lost:
                os.environ["FAKE_NVML_LOST"] = "1"
            else:
                del os.environ["FAKE_NVML_LOST"]
            until = len(monitor.utilization.seconds) + 2  # the first may have begun before
            for _ in range(2000):  # twenty seconds; a lost GPU is looked for again after some tenths of one
                values = monitor.utilization.series["gpu0_gpu_utilization_percent"]
                if len(values) >= until and (values[-1] is None) == lost:
                    break
                time.sleep(0.01)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    history = model.fit(x, y, epochs=3, verbose=0, callbacks=[monitor, LoseForAWhile()])
found["with_failures"] = monitor.utilization.series["gpu0_gpu_utilization_percent"]
found["epochs"] = len(history.epoch)
found["warnings"] = [str(warning.message) for warning in caught if warning.category.__name__ == "TfoptWarning"]
print(json.dumps(found), flush=True)

model.fit(x, y, verbose=0, callbacks=[monitor, Raise()])
"""


@pytest.fixture(scope="module")
def on_gpus(run_with_fake_nvml):
    process = run_with_fake_nvml(FIT_TWICE_THEN_RAISE)
    assert "fit failed on purpose" in process.stderr, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_fit_on_gpus_records_what_nvml_reports(on_gpus):
    utilization, summary = on_gpus["utilization"], on_gpus["summary"]
    assert utilization["source"] == "NVML (NVIDIA A100-SXM4-40GB, NVIDIA T4-TEST)"
    assert set(utilization["series"]["gpu0_gpu_utilization_percent"]) == {37.0}
    assert set(utilization["series"]["gpu1_gpu_utilization_percent"]) == {83.0}
    assert summary["gpu0_power_watts_mean"] == summary["gpu0_power_watts_max"] == 250.5


def test_a_figure_the_gpu_does_not_support_is_unavailable(on_gpus):
    assert set(on_gpus["utilization"]["series"]["gpu1_power_watts"]) == {None}
    assert on_gpus["summary"]["gpu1_power_watts_mean"] is None
    line = next(line for line in on_gpus["text"].splitlines() if "gpu1_power_watts" in line)
    assert "unavailable (" in line


def test_a_failure_leaves_a_gap_and_sampling_goes_on(on_gpus):
    values = on_gpus["with_failures"]
    missing = values.index(None)
    assert values[:missing] == [37.0] * missing
    assert values[-1] == 37.0
    assert on_gpus["epochs"] == 3
    (warning,) = on_gpus["warnings"]
    assert "GpuMonitor could not read all values: GPU is lost (" in warning


class Occupy(keras.callbacks.Callback):
    """Makes each training batch last, with the processor idle or busy."""

    def __init__(self, seconds, busy):
        super().__init__()
        self.seconds, self.busy = seconds, busy

    def on_train_batch_begin(self, batch, logs=None):
        until = time.perf_counter() + self.seconds
        if not self.busy:
            time.sleep(self.seconds)
        while time.perf_counter() < until:
            pass


class Raise(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise RuntimeError("fit failed on purpose")


@pytest.fixture
def fit():
    """Returns a function that fits a small model for one step under the given callbacks."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    x, y = np.zeros((8, 4)), np.zeros((8, 1))

    def run(*callbacks):
        model.fit(x, y, verbose=0, callbacks=list(callbacks))

    run()  # tracing the train step keeps the processor busy; have it done
    return run


without_gpu = pytest.mark.skipif(bool(detect().gpus), reason="this machine has an NVIDIA GPU, so NVML is the source")


def sampling_threads():
    return [thread for thread in threading.enumerate() if thread.name == "tfopt-GpuMonitor"]


@without_gpu
def test_without_a_gpu_the_source_is_psutil_and_says_why(fit):
    monitor = GpuMonitor(interval_s=0.05)
    fit(monitor, Occupy(0.3, busy=False))
    series = monitor.utilization.series
    assert monitor.source.startswith("psutil (no NVIDIA GPU")
    assert monitor.source == monitor.utilization.source
    assert list(series) == [
        "process_cpu_percent",
        "system_cpu_percent",
        "process_memory_bytes",
        "system_memory_used_bytes",
    ]
    memory = psutil.virtual_memory().total
    assert all(2**20 < value < memory for value in series["process_memory_bytes"])
    assert all(2**20 < value < memory for value in series["system_memory_used_bytes"])
    assert all(value is None or 0 <= value <= 100 for value in series["system_cpu_percent"])


@without_gpu
def test_a_busy_processor_reads_higher_than_an_idle_one(fit):
    idle, busy = GpuMonitor(interval_s=0.2), GpuMonitor(interval_s=0.2)
    fit(idle, Occupy(1.0, busy=False))
    fit(busy, Occupy(1.0, busy=True))
    assert busy.summary()["process_cpu_percent_mean"] > idle.summary()["process_cpu_percent_mean"]


@without_gpu
def test_process_cpu_percent_is_the_time_this_process_computed(fit):
    monitor = GpuMonitor(interval_s=0.2)
    began, computed = time.perf_counter(), time.process_time()
    fit(monitor, Occupy(1.0, busy=True))
    expected = 100 * (time.process_time() - computed) / (time.perf_counter() - began)
    # Wide enough for uneven samples, narrow enough to tell one busy core from the average over two.
    assert monitor.summary()["process_cpu_percent_mean"] == pytest.approx(expected, rel=0.4)


@without_gpu
def test_the_first_cpu_percentage_is_unknown_rather_than_zero(fit):
    monitor = GpuMonitor(interval_s=0.2)
    fit(monitor, Occupy(0.5, busy=True))
    first, *others = monitor.utilization.series["process_cpu_percent"]
    assert first is None
    assert any(value is not None for value in others)


def test_a_fit_shorter_than_the_interval_has_a_sample_at_both_ends(fit):
    monitor = GpuMonitor(interval_s=3600)
    fit(monitor)
    assert len(monitor.utilization.seconds) == 2
    assert sampling_threads() == []


def test_a_second_fit_continues_the_timeline(fit):
    monitor = GpuMonitor(interval_s=0.1)
    fit(monitor, Occupy(0.2, busy=False))
    first = monitor.utilization
    fit(monitor, Occupy(0.2, busy=False))
    both = monitor.utilization
    assert both.seconds[: len(first.seconds)] == first.seconds
    assert len(both.seconds) >= len(first.seconds) + 2
    assert all(earlier < later for earlier, later in itertools.pairwise(both.seconds))
    assert {len(values) for values in both.series.values()} == {len(both.seconds)}


def test_after_fit_raised_sampling_ends_by_itself(fit):
    monitor = GpuMonitor(interval_s=0.05)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(monitor, Raise())
    for thread in sampling_threads():
        assert thread.daemon
        thread.join(10)
    assert sampling_threads() == []
    assert len(monitor.utilization.seconds) >= 2


def test_the_logs_of_an_epoch_have_the_figures_of_the_machine(fit, tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    callbacks = [GpuMonitor(interval_s=0.05), keras.callbacks.CSVLogger(tmp_path / "log.csv"), Occupy(0.2, busy=True)]
    history = model.fit(np.zeros((8, 4)), np.zeros((8, 1)), epochs=2, verbose=0, callbacks=callbacks)
    names = LOGGED[:3] if detect().gpus else LOGGED[3:]
    assert set(history.history) == {"loss", *names}
    assert all(value > 0 for name in names for value in history.history[name])
    assert set(names) < set((tmp_path / "log.csv").read_text().splitlines()[0].split(","))


def test_it_watches_a_loop_without_fit():
    with GpuMonitor(interval_s=0.05) as monitor:
        time.sleep(0.3)
    assert len(monitor.utilization.seconds) >= 3
    assert sampling_threads() == []
    with pytest.raises(RuntimeError, match="in the loop"), GpuMonitor(interval_s=0.05):
        raise RuntimeError("in the loop")
    assert sampling_threads() == []


def test_the_timelines_of_workers_are_put_together(tmp_path, monkeypatch):
    for index in range(2):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"task": {"type": "worker", "index": index}}))
        with GpuMonitor(interval_s=0.05, directory=tmp_path):
            time.sleep(0.1)
    merged = merge_workers(tmp_path)
    assert {name.split("_")[0] for name in merged.series} == {"worker0", "worker1"}
    assert merged.seconds == sorted(merged.seconds)
    assert {len(values) for values in merged.series.values()} == {len(merged.seconds)}
    (tmp_path / "utilization-worker1.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"A timeline is damaged. Received: .*worker1"):
        merge_workers(tmp_path)
    with pytest.raises(ArtifactError, match="must hold timelines of GpuMonitor"):
        merge_workers(tmp_path / "nothing")


def test_any_program_is_watched():
    program = "import sys, time; time.sleep(0.4); sys.exit(3)"
    code, timeline = monitor_command([sys.executable, "-c", program], interval_s=0.1)
    assert code == 3
    assert len(timeline.seconds) >= 3
    code, _ = monitor_command([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"])
    assert code == 128 + 15
    with pytest.raises(ConfigError, match=r"must be a program. Received: no-such-program"):
        monitor_command(["no-such-program"])


def test_fitting_again_after_fit_raised_leaves_one_thread_at_most(fit):
    monitor = GpuMonitor(interval_s=0.05)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(monitor, Raise())
    fit(monitor)
    assert sampling_threads() == []


def test_it_runs_under_mirrored_strategy(two_replicas):
    with two_replicas.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(loss="mse")
    monitor = GpuMonitor(interval_s=0.05)
    model.fit(np.zeros((8, 4)), np.zeros((8, 1)), verbose=0, callbacks=[monitor])
    assert len(monitor.utilization.seconds) >= 2


def test_it_prints_the_source_and_one_line_per_series(fit):
    monitor = GpuMonitor(interval_s=0.1)
    assert str(monitor) == "not sampled yet: 0 samples in 0.0 s"
    assert monitor.summary() == {}
    fit(monitor, Occupy(0.3, busy=False))
    title, *lines = str(monitor).splitlines()
    assert title.startswith(monitor.source)
    assert [line.split()[0] for line in lines] == list(monitor.utilization.series)


@pytest.mark.parametrize("interval_s", [0, -1.0, math.nan, math.inf])
def test_an_interval_that_is_not_above_zero_is_refused(interval_s):
    with pytest.raises(ConfigError, match=rf"interval_s must be .* Received: interval_s={interval_s}"):
        GpuMonitor(interval_s=interval_s)
