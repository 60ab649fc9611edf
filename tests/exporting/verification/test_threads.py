"""The threads of calls: what is measured in which process, which number is best, and where it is recorded."""

import threading
import time
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import layers

from tfopt.cli import main
from tfopt.errors import ConfigError, TfoptWarning
from tfopt.exporting import ExportConfig, SavedModelProcess, export, verify
from tfopt.exporting.manifest import read_manifest
from tfopt.exporting.verification import process, threads
from tfopt.exporting.verification.served import Runner
from tfopt.hardware import detect
from tfopt.report import ServingTimes, ThreadTimes

MEASURED = ServingTimes(
    device="a processor",
    cores=2,
    calls=(ThreadTimes(batch_size=1, threads=(1, 2), latency_ms_median=(7.0, 10.0), best_threads=1),),
    parallel_calls=2,
    parallel_threads=1,
    parallel_examples_per_s=240.0,
    batch_examples_per_s=200.0,
    parallel_speedup=1.2,
    parallel_speedup_range=(1.1, 1.3),
)


@pytest.fixture(scope="module")
def model():
    return keras.Sequential([keras.Input((8, 8, 3), name="image"), layers.Conv2D(4, 3), layers.Flatten()])


@pytest.fixture(scope="module")
def artifact(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("artifact") / "float32"
    export(model, path)
    return path


@pytest.fixture
def cores(monkeypatch):
    """Sets the number of cores that this machine seems to have."""

    def set_cores(count):
        machine = replace(detect(), logical_cores=count)
        monkeypatch.setattr(threads, "detect", lambda: machine)

    return set_cores


@pytest.mark.parametrize(
    ("one", "two", "best"),
    [
        ([7, 7, 8, 7, 7], [10, 11, 10, 10, 10], 1),
        ([10, 11, 10, 10, 10], [7, 7, 8, 7, 7], 2),
        ([7, 7, 11, 7, 7], [10, 10, 10, 10, 10], None),  # one round shows the opposite
        ([10, 10, 10, 10, 10], [10.3, 10.3, 10.3, 10.3, 10.3], None),  # every round shows it, but it is under 5%
    ],
)
def test_a_number_of_threads_is_best_if_every_round_shows_it(one, two, best):
    found = threads.thread_times(8, (1, 2), [[[ms] for ms in rounds] for rounds in (one, two)])
    assert found.latency_ms_median == (np.median(one), np.median(two))
    assert (found.batch_size, found.best_threads) == (8, best)


def test_of_three_numbers_the_best_must_beat_both_others():
    slow, fast, tie = [[[10.0]] * 5, [[7.0]] * 5, [[7.1]] * 5]
    assert threads.thread_times(1, (1, 2, 4), [slow, fast, tie]).best_threads is None
    assert threads.thread_times(1, (1, 2, 4), [slow, fast, slow]).best_threads == 2


def test_the_receipt_has_the_times_of_each_number_of_threads_and_of_calls_at_the_same_time(
    artifact, cores, monkeypatch
):
    cores(2)
    started, ask = [], SavedModelProcess._ask

    def kept(self, **command):
        started.append((command["do"], self.threads, command.get("callers")))
        return ask(self, **command)

    monkeypatch.setattr(SavedModelProcess, "_ask", kept)
    receipt = verify(artifact, seconds=0, threads=(64, 1), batch_size=3)
    found = receipt.serving
    assert [(each.batch_size, each.threads) for each in found.calls] == [(1, (1, 2)), (3, (1, 2))]
    assert all(min(each.latency_ms_median) > 0 for each in found.calls)
    assert {(count, callers) for do, count, callers in started if do == "throughput"} == {(1, 2), (2, 1)}
    assert sum(do == "load" for do, *_ in started) == 3
    assert found.parallel_speedup_range[0] <= found.parallel_speedup <= found.parallel_speedup_range[1]
    assert "threads, batch 3" in receipt.rows()
    assert receipt.ok


def test_the_process_has_as_many_threads_as_it_was_told(artifact):
    with SavedModelProcess(artifact, threads=1) as served:
        assert served.loaded["threads"] == 1


def test_callers_call_at_the_same_time_and_all_of_their_calls_count(tmp_path):
    lock, running, most, calls = threading.Lock(), 0, 0, 0

    def serve(x):
        nonlocal running, most, calls
        with lock:
            running, calls = running + 1, calls + 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return {"y": x}

    np.savez(tmp_path / "in.npz", x=np.ones(3))
    runtime = SimpleNamespace(place=lambda inputs: inputs, call=lambda batch: serve(**batch))
    runner = Runner(runtime, lambda: None)
    start = time.perf_counter()
    rate = runner.throughput(str(tmp_path / "in.npz"), seconds=0.2, callers=3)["calls_per_s"]
    elapsed = time.perf_counter() - start
    assert most == 3
    assert (calls - 2) / elapsed <= rate <= 3 / 0.02  # 2 calls warm up


def test_one_core_has_nothing_to_compare(artifact, model, tmp_path, cores, monkeypatch):
    cores(1)
    receipt = verify(artifact, seconds=0, threads=(1, 2))
    assert receipt.serving is None
    assert receipt.rows()["threads"].startswith("unavailable (nothing to compare: on this machine's cores, 1,")
    monkeypatch.setattr(process, "PYTHON", "/nowhere/python")
    with pytest.warns(TfoptWarning, match="without times by threads: nothing to compare"):
        export(model, tmp_path / "a", ExportConfig(threads=(1, 2)))
    assert read_manifest(tmp_path / "a").serving is None


@pytest.mark.parametrize("counts", [(0,), (1, 1.5), 2])
def test_threads_must_be_whole_numbers(counts, artifact):
    with pytest.raises(ConfigError, match="threads must be"):
        verify(artifact, threads=counts)


def test_the_command_takes_numbers_of_threads(artifact, capsys):
    assert main(["verify", str(artifact), "--threads", "1", "0"]) == 2
    assert "threads must be" in capsys.readouterr().err


def test_an_export_records_the_times_in_the_manifest(model, tmp_path, monkeypatch):
    asked = {}

    def measured(path, signature, check, counts, batch_sizes, **options):
        asked.update(counts=counts, batch_sizes=batch_sizes, files=[file.name for file in path.iterdir()])
        return MEASURED, ""

    monkeypatch.setattr(import_module("tfopt.exporting.export"), "measure_threads", measured)
    export(model, tmp_path / "a", ExportConfig(threads=(1, 2), batch_sizes=(1, 16)))
    assert (asked["counts"], asked["batch_sizes"]) == ((1, 2), (1, 16))
    assert "saved_model.pb" in asked["files"]
    assert read_manifest(tmp_path / "a").serving == MEASURED
    receipt = verify(tmp_path / "a", seconds=0)
    assert receipt.serving == MEASURED
    assert "advice" in str(receipt)


@pytest.mark.slow
def test_an_export_times_the_artifact_before_it_appears(model, tmp_path, cores):
    cores(2)
    export(model, tmp_path / "a", ExportConfig(threads=(1, 2)))
    found = read_manifest(tmp_path / "a").serving
    assert [(each.batch_size, each.threads) for each in found.calls] == [(1, (1, 2)), (8, (1, 2))]
    assert found.parallel_examples_per_s > 0
