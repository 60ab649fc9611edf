"""Timelines of several workers in one directory, also of a worker that was killed and started again."""

import json

import pytest

from tfopt.errors import ArtifactError
from tfopt.profiling.monitoring import workers
from tfopt.profiling.monitoring.workers import WorkerFile, merge_workers, worker_path


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Returns a function that writes the file of a worker: its samples by their times, and whether it is killed."""

    def run(worker, samples, *, killed=False, task=True):
        variable = json.dumps({"task": {"type": "worker", "index": worker}}) if task else ""
        monkeypatch.setenv("TF_CONFIG", variable)
        path = worker_path(tmp_path / "shared")
        file = WorkerFile(path, f"NVML (of {worker})")
        for moment, figures in samples.items():
            monkeypatch.setattr(workers.time, "time", lambda moment=moment: moment)
            file.write(figures)
        if not killed:
            file.close({"gpu0_power_watts": "Not Supported"} if worker == 1 else {}, ["a note"])
        assert file.problem is None
        return path

    return run


def test_workers_are_put_on_common_times(write, tmp_path):
    # The second starts 0.25 s later, and its clock is a little off the grid.
    write(0, {100.0 + 0.5 * n: {"gpu0_utilization_percent": float(n)} for n in range(5)})
    write(1, {100.25 + 0.51 * n: {"gpu0_utilization_percent": 10.0 + n} for n in range(5)})
    load = merge_workers(tmp_path / "shared")
    assert load.source == "worker0: NVML (of 0); worker1: NVML (of 1)"
    assert load.seconds == [0, 0.5, 1, 1.5, 2, 2.5]
    assert load.series["worker0_gpu0_utilization_percent"] == [0, 1, 2, 3, 4, 4]
    assert load.series["worker1_gpu0_utilization_percent"] == [None, 10, 11, 12, 13, 14]
    assert load.unavailable == {"worker1_gpu0_power_watts": "Not Supported"}
    assert load.notes == ["worker0: a note", "worker1: a note"]


def test_a_worker_that_is_started_again_goes_on_in_its_series(write, tmp_path):
    figures = {100.0 + n: {"gpu0_energy_joules": 10.0 * n} for n in range(3)}
    path = write(1, figures, killed=True)
    with path.open("a") as file:  # it was killed while it wrote
        file.write("[103.0, 3")
    write(1, {110.0 + n: {"gpu0_energy_joules": 10.0 * n, "gpu0_power_watts": 9.0} for n in range(3)})
    write(0, {100.0 + n: {"gpu0_energy_joules": 1.0} for n in range(13)})
    load = merge_workers(tmp_path / "shared")
    energy = load.series["worker1_gpu0_energy_joules"]
    assert energy[:4] == [0, 10, 20, 20]
    assert energy[4:10] == [None] * 6
    assert energy[10:] == [20, 30, 40]  # and not from zero again
    assert load.series["worker1_gpu0_power_watts"][9:] == [None, 9, 9, 9]


def test_times_at_which_no_worker_ran_are_left_out(write, tmp_path):
    write(0, {100.0 + n: {"gpu0_power_watts": 1.0} for n in range(3)})
    write(0, {1_000_000.0 + n: {"gpu0_power_watts": 2.0} for n in range(3)})
    load = merge_workers(tmp_path / "shared")
    assert load.series["worker0_gpu0_power_watts"] == [1, 1, 1, 1, 2, 2, 2]
    assert load.seconds[-1] == 999_902


def test_processes_without_a_number_are_told_apart_by_their_host(write, tmp_path, monkeypatch):
    monkeypatch.setattr(workers.socket, "gethostname", lambda: "node-7")
    for _ in range(2):
        write(0, {100.0 + n: {"gpu0_power_watts": 1.0} for n in range(3)}, task=False)
    assert list(merge_workers(tmp_path / "shared").series) == ["node-7_gpu0_power_watts", "node-7.2_gpu0_power_watts"]
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node-7")
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert write(0, {100.0: {}}, task=False).name.startswith("utilization-worker3-")


def test_a_damaged_timeline_and_an_empty_directory_are_refused(write, tmp_path):
    path = write(1, {100.0: {"gpu0_power_watts": 1.0}})
    path.write_text("[1, 2\n" + path.read_text())
    with pytest.raises(ArtifactError, match=r"A timeline is damaged. Received: .*worker1"):
        merge_workers(tmp_path / "shared")
    with pytest.raises(ArtifactError, match="must hold timelines of GpuMonitor"):
        merge_workers(tmp_path / "nothing")
