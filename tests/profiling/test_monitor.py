"""GpuMonitor in real fits: on a machine without a GPU, and over the stand-in for NVIDIA's driver."""

import contextlib
import csv
import itertools
import json
import math
import os
import threading
import time
from types import SimpleNamespace

import keras
import numpy as np
import psutil
import pytest

from tfopt.errors import ConfigError, TfoptWarning
from tfopt.hardware import detect
from tfopt.profiling import merge_workers
from tfopt.profiling.monitoring import callback, sampling
from tfopt.profiling.monitoring.callback import OF_PROCESS, GpuMonitor
from tfopt.profiling.monitoring.readers import ProcessReader

FIT_TWICE_THEN_RAISE = """
import json, os, pathlib, threading, time, warnings
import keras, numpy as np
from tfopt.compat.tensorflow import has_started
from tfopt.profiling.monitoring.callback import GpuMonitor

def held():
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    files = [os.readlink(each) for each in links if os.path.lexists(each)]  # the listing itself is closed by now
    return sorted(files), sorted(each.name for each in threading.enumerate() if each.name.startswith("tfopt"))

class Raise(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise RuntimeError("fit failed on purpose")

class Wait(keras.callbacks.Callback):  # until each GPU has had its turn for PCIe, and dcgmi has said something
    def on_train_batch_end(self, batch, logs=None):
        until = len(monitor.utilization.seconds) + 3
        for _ in range(12_000):
            load = monitor.utilization
            if len(load.seconds) >= until and load.series["gpu0_sm_active_percent"][-1] is not None:
                break
            time.sleep(0.01)

def tell(joules):
    state = pathlib.Path(os.environ["FAKE_NVML_STATE"])
    whole = state.with_suffix(".new")  # the thread must not read half a file
    whole.write_text(f"0 energy {1000 * joules}\\n1 error_clock 999\\n")
    whole.replace(state)

tell(100)
with GpuMonitor(interval_s=0.05):  # before anything of TensorFlow: memory growth can still be set afterwards
    time.sleep(0.1)
found = {"started": has_started()}

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(loss="mse")
x, y = np.zeros((8, 4)), np.zeros((8, 1))
model.fit(x, y, verbose=0)
found["held"] = [held()]
monitor = GpuMonitor(interval_s=0.05)

class Energy(keras.callbacks.Callback):  # after the monitor, or a sample may have it before the epoch begins
    def on_epoch_begin(self, epoch, logs=None):
        tell(100 + 50 * (epoch + 1))

logs = model.fit(x, y, epochs=3, verbose=0, callbacks=[monitor, Energy(), Wait()]).history
found |= {"utilization": monitor.utilization.to_dict(), "summary": monitor.summary(), "text": str(monitor)}
found["history"] = logs
found["held"].append(held())

class LoseForAWhile(keras.callbacks.Callback):  # NVML fails in some samples of the fit, and answers in those after
    def on_train_begin(self, logs=None):
        pathlib.Path(os.environ["END_DCGMI"]).write_text("")
        for lost in (True, False):
            if lost:
                os.environ["FAKE_NVML_LOST"] = "1"
            else:
                del os.environ["FAKE_NVML_LOST"]
            until = len(monitor.utilization.seconds) + 2  # the first may have begun before
            for _ in range(12_000):  # two minutes; a lost GPU is looked for again after some tenths of one
                values = monitor.utilization.series["gpu0_gpu_utilization_percent"]
                if len(values) >= until and (values[-1] is None) == lost:
                    break
                time.sleep(0.01)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    history = model.fit(x, y, epochs=3, verbose=0, callbacks=[monitor, LoseForAWhile()])
found["with_failures"] = monitor.utilization.series["gpu0_gpu_utilization_percent"]
found["after"] = monitor.utilization.to_dict()
found["epochs"] = len(history.epoch)
found["warnings"] = [str(warning.message) for warning in caught if warning.category.__name__ == "TfoptWarning"]

try:
    model.fit(x, y, verbose=0, callbacks=[monitor, Raise()])
except RuntimeError:
    pass
for _ in range(12_000):  # nobody tells the thread that fit has raised
    if not held()[1]:
        break
    time.sleep(0.01)
found["held"].append(held())
print(json.dumps(found), flush=True)
"""

DCGMI = """#!/bin/sh
while [ ! -e "$END_DCGMI" ]; do
    echo "#Entity   SMACT        TENSO"
    echo "GPU 0     0.913        0.402"
    echo "GPU 1     N/A          N/A"
    sleep 0.02
done
echo "Error: the host engine went away"
exit 3
"""


@pytest.fixture(scope="module")
def on_gpus(run_with_fake_nvml, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bin")
    (folder / "dcgmi").write_text(DCGMI)
    (folder / "dcgmi").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    files = {"FAKE_NVML_STATE": str(folder / "state"), "END_DCGMI": str(folder / "end")}
    process = run_with_fake_nvml(FIT_TWICE_THEN_RAISE, PATH=path, **files)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_fit_on_gpus_records_what_nvml_and_dcgm_report(on_gpus):
    utilization, summary = on_gpus["utilization"], on_gpus["summary"]
    assert utilization["source"] == "NVML (NVIDIA A100-SXM4-40GB, NVIDIA T4-TEST)"
    assert set(utilization["series"]["gpu0_gpu_utilization_percent"]) == {37.0}
    assert set(utilization["series"]["gpu1_gpu_utilization_percent"]) == {83.0}
    assert summary["gpu0_power_watts_mean"] == summary["gpu0_power_watts_max"] == 250.5
    assert summary["gpu0_sm_active_percent_max"] == pytest.approx(91.3)
    assert summary["gpu0_tensor_active_percent_max"] == pytest.approx(40.2)
    assert summary["gpu1_sm_active_percent_max"] is None


def test_a_figure_the_gpu_does_not_support_is_unavailable_with_its_reason(on_gpus):
    assert set(on_gpus["utilization"]["series"]["gpu1_power_watts"]) == {None}
    assert on_gpus["summary"]["gpu1_power_watts_mean"] is None
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in on_gpus["text"].splitlines()}
    assert lines["gpu1_power_watts"] == "unavailable (Not Supported)"
    assert lines["gpu1_sm_clock_mhz"] == "unavailable (no value could be read)"
    assert lines["tensorflow_memory_peak_bytes"].startswith("unavailable (TensorFlow uses no GPU")
    assert lines["gpu0_energy_joules"] == "total 150.0"


def test_the_logs_of_an_epoch_have_the_figures_of_all_gpus(on_gpus):
    history = on_gpus["history"]
    assert history["gpu_utilization_percent"] == [60.0] * 3  # of 37 and 83
    assert history["gpu_memory_used_bytes"] == [14 * 2**30] * 3
    assert history["gpu_power_watts"] == [250.5] * 3
    assert history["gpu_temperature_celsius"] == [61.0] * 3
    assert sum(history["gpu_energy_joules"]) == 150.0
    assert history["gpu_energy_joules"][1] == 50.0
    assert history["gpu_throttled"] == [0.0] * 3
    assert history["gpu_sm_active_percent"][-1] == pytest.approx(91.3)
    assert history["gpu_pcie_received_bytes_per_second"] == [2_500_000.0 + 3_500_000.0] * 3
    assert not [name for name in history if "nvlink" in name or "tensorflow" in name]  # this machine has none


def test_a_failure_leaves_a_gap_and_sampling_goes_on(on_gpus):
    values = on_gpus["with_failures"]
    missing = values.index(None)
    assert values[:missing] == [37.0] * missing
    assert values[-1] == 37.0
    assert on_gpus["epochs"] == 3
    (warning,) = on_gpus["warnings"]
    assert "GpuMonitor could not read all values: " in warning
    assert "GPU is lost (" in warning


def test_training_goes_on_when_dcgmi_ends(on_gpus):
    reason = "dcgmi ended with code 3: Error: the host engine went away"
    assert on_gpus["epochs"] == 3
    assert on_gpus["after"]["series"]["gpu0_sm_active_percent"][-1] is None
    assert on_gpus["after"]["unavailable"]["gpu0_sm_active_percent"] == reason
    assert reason in on_gpus["after"]["notes"]


def test_the_energy_of_a_second_fit_goes_on_from_the_first(on_gpus):
    known = [joules for joules in on_gpus["after"]["series"]["gpu0_energy_joules"] if joules is not None]
    assert known == sorted(known)
    assert (known[0], known[-1]) == (0.0, 150.0)


def test_no_thread_and_no_file_is_left_after_fit_also_when_it_raised(on_gpus):
    before, after_fit, after_error = on_gpus["held"]
    assert before[1] == []
    assert after_fit == before
    assert after_error == before


def test_the_monitor_does_not_start_tensorflows_devices(on_gpus):
    assert on_gpus["started"] is False


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


@pytest.fixture(scope="module")
def fit():
    """Returns a function that fits a small model for one step an epoch under the given callbacks."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    x, y = np.zeros((8, 4)), np.zeros((8, 1))

    def run(*callbacks, epochs=1):
        return model.fit(x, y, epochs=epochs, verbose=0, callbacks=list(callbacks)).history

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
def test_process_cpu_percent_is_the_time_this_process_computed(fit):
    idle = GpuMonitor(interval_s=0.15)
    fit(idle, Occupy(0.4, busy=False))
    for _ in range(5):  # other processes may leave this one so little time that the samples differ
        busy = GpuMonitor(interval_s=0.15)
        began, computed = time.perf_counter(), time.process_time()
        fit(busy, Occupy(0.8, busy=True))
        expected = 100 * (time.process_time() - computed) / (time.perf_counter() - began)
        # Wide enough for uneven samples, narrow enough to tell one busy core from the average over two.
        if (found := busy.summary()["process_cpu_percent_mean"]) == pytest.approx(expected, rel=0.4):
            break
    assert found == pytest.approx(expected, rel=0.4)
    assert found > idle.summary()["process_cpu_percent_mean"]
    assert busy.utilization.series["process_cpu_percent"][0] is None  # unknown, and not zero


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


def test_after_fit_raised_sampling_ends_by_itself_also_if_another_fit_follows(fit):
    monitor = GpuMonitor(interval_s=3600)  # the end is noticed before the next sample
    with contextlib.suppress(RuntimeError):  # no traceback keeps the frame of fit, so the next one may get its place
        fit(monitor, Raise())
    fit(Occupy(0.8, busy=False))
    assert sampling_threads() == []
    assert len(monitor.utilization.seconds) == 2


@without_gpu
def test_the_logs_of_an_epoch_have_the_figures_of_the_machine(fit, tmp_path):
    history = fit(
        GpuMonitor(interval_s=0.05),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        Occupy(0.1, busy=True),
        epochs=2,
    )
    assert set(history) == {"loss", *OF_PROCESS}
    assert all(value > 0 for name in OF_PROCESS for value in history[name])
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["process_memory_bytes"]) for row in rows] == history["process_memory_bytes"]


def test_tensorboard_has_the_figures_of_the_machine(fit, tmp_path):
    pytest.importorskip("tensorboard", reason="Keras' TensorBoard callback needs the package tensorboard")
    fit(GpuMonitor(interval_s=0.05), keras.callbacks.TensorBoard(tmp_path))
    (events,) = tmp_path.rglob("events*")
    assert b"epoch_process_memory_bytes" in events.read_bytes()


def test_epochs_shorter_than_the_interval_have_the_figures_of_the_last_sample(fit, monkeypatch):
    class OneGpu(ProcessReader):
        def read(self):
            self.joules = getattr(self, "joules", -2.0) + 2.0
            return {"gpu0_gpu_utilization_percent": 40.0, "gpu0_power_watts": None, "gpu0_energy_joules": self.joules}

    monkeypatch.setattr(callback, "open_reader", lambda interval_s: OneGpu("a stand-in"))
    history = fit(GpuMonitor(interval_s=3600), epochs=3)
    assert history["gpu_utilization_percent"] == [40.0] * 3
    assert history["gpu_energy_joules"] == [0.0] * 3
    assert all(math.isnan(value) for value in history["gpu_power_watts"])


def test_tensorflows_own_memory_is_that_of_the_gpus_it_uses(fit, monkeypatch):
    device = lambda number: SimpleNamespace(name=f"/device:GPU:{number}")  # noqa: E731
    asked = []

    def memory(name):
        asked.append(name)
        return {"current": 10 + len(asked), "peak": 1000 + len(asked)}

    config = SimpleNamespace(
        get_visible_devices=lambda kind: [device(1)],  # set_visible_devices has hidden the first
        list_logical_devices=lambda kind: [device(0)],
        experimental=SimpleNamespace(get_memory_info=memory),
    )
    monkeypatch.setattr(callback, "tf", SimpleNamespace(config=config, errors=callback.tf.errors))
    monitor = GpuMonitor(interval_s=3600)
    history = fit(monitor)
    assert set(asked) == {"/device:GPU:0"}
    assert monitor.utilization.series["gpu1_tensorflow_memory_peak_bytes"] == [1002, 1003]
    assert monitor.utilization.series["gpu1_tensorflow_memory_bytes"] == [12, 13]
    assert history["gpu_tensorflow_memory_peak_bytes"] == [1002]
    config.list_logical_devices = lambda kind: [device(0), device(1)]
    divided = GpuMonitor(interval_s=3600)
    fit(divided)
    assert "unavailable (TensorFlow has divided the GPUs" in str(divided).partition("tensorflow_memory_peak_bytes ")[2]


def test_it_watches_a_loop_without_fit():
    with GpuMonitor(interval_s=0.05) as monitor:
        time.sleep(0.3)
    assert len(monitor.utilization.seconds) >= 3
    assert sampling_threads() == []
    with pytest.raises(RuntimeError, match="in the loop"), GpuMonitor(interval_s=0.05):
        raise RuntimeError("in the loop")
    assert sampling_threads() == []


@without_gpu
def test_training_goes_on_when_nothing_can_be_read_or_written(fit, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monitor = GpuMonitor(interval_s=0.05, directory=tmp_path / "file" / "shared")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: 1 / 0)
    monkeypatch.setattr(psutil, "Process", lambda pid=None: (_ for _ in ()).throw(psutil.AccessDenied(1)))
    with pytest.warns(TfoptWarning) as caught:
        history = fit(monitor, Occupy(0.1, busy=False))
    assert math.isnan(history["process_memory_bytes"][0])
    unreadable, unwritable = sorted(str(each.message) for each in caught)
    assert unreadable.startswith("GpuMonitor could not read all values: AccessDenied")
    assert "directory must be a place that can be written. Received: directory=" in unwritable
    assert len(monitor.utilization.seconds) >= 2
    assert "AccessDenied" in str(monitor)


def test_training_goes_on_when_a_driver_hangs_or_no_thread_is_left(fit, monkeypatch):
    monkeypatch.setattr(sampling, "ANSWER_S", 0.1)
    release = threading.Event()
    monkeypatch.setattr(callback, "open_reader", lambda interval_s: release.wait(300) and ProcessReader("late"))
    hanging = GpuMonitor(interval_s=0.05)
    with pytest.warns(TfoptWarning, match="no answer for"):
        fit(hanging)
    release.set()
    for thread in sampling_threads():
        thread.join(300)
    assert hanging.utilization.seconds == []  # it answered when the fit had ended

    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.warns(TfoptWarning, match="can't start new thread"), GpuMonitor(interval_s=0.05) as without:
        pass
    assert without.source == "unavailable (RuntimeError: can't start new thread)"


def test_each_worker_writes_its_samples_as_they_come(fit, tmp_path, monkeypatch):
    for index in range(2):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"task": {"type": "worker", "index": index}}))
        monitor = GpuMonitor(interval_s=0.05, directory=tmp_path)
        for _ in range(2):
            fit(monitor, Occupy(0.1, busy=False))
    assert len(list(tmp_path.iterdir())) == 2
    merged = merge_workers(tmp_path)
    assert {name.split("_")[0] for name in merged.series} == {"worker0", "worker1"}
    assert {len(values) for values in merged.series.values()} == {len(merged.seconds)}
    lines = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines() if line.startswith("[")]
    assert len(lines) >= 2 * len(monitor.utilization.seconds) - 4


@pytest.mark.slow
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
    load = monitor.utilization
    assert [line.split()[0] for line in lines] == list(dict.fromkeys([*load.series, *load.unavailable]))


@pytest.mark.parametrize("interval_s", [0, -1.0, math.nan, math.inf])
def test_an_interval_that_is_not_above_zero_is_refused(interval_s):
    with pytest.raises(ConfigError, match=rf"interval_s must be .* Received: interval_s={interval_s}"):
        GpuMonitor(interval_s=interval_s)
