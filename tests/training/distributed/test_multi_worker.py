"""Workers in separate processes train the same model as one device, even if one of them is killed."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from scripts.multi_worker_training import train

from tfopt.training.checkpointing.store import CheckpointStore

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "multi_worker_training.py"
LAUNCH = "import sys; from tfopt.cli import main; sys.exit(main(sys.argv[1:]))"
# benchmarks/compatibility.py has every combination.
EQUAL_TO_ONE_DEVICE = {
    "plain": {},
    "jit_and_accumulate": {"jit_compile": True, "accumulate": 4, "steps_per_execution": 4},
}
OTHERS = {
    "norm_and_float16": {"norm": True, "precision": "mixed_float16", "accumulate": 2},
}
PRUNED = {
    "pruned": {"pruning": {"target_sparsity": 0.75, "frequency": 3}},
    "regrown": {
        "pruning": {"target_sparsity": 0.75, "frequency": 3, "criterion": "taylor", "regrowth": 0.3},
        "accumulate": 2,
    },
}
# Long enough to be interrupted.
LONG = {"norm": True, "epochs": 24, "checkpoint_every": 10}


def results(directory, name, worker):
    with np.load(directory / f"{name}-{worker}.npz") as found:
        arrays = dict(found)
    return json.loads(str(arrays.pop("history"))), arrays


def assert_same_bits(found, expected):
    assert found[0] == expected[0]  # the history
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert found[1][name].tobytes() == value.tobytes(), name


@pytest.fixture(scope="module")
def launched(tmp_path_factory, fresh_python, worker_id):
    """Returns the results of all cases, and of the long training without interruption, from one launch.

    The processes of pytest-xdist share it: each would wait a minute for one of its own.
    """
    if worker_id == "master":
        return launch(tmp_path_factory.mktemp("results"), fresh_python)
    directory = tmp_path_factory.getbasetemp().parent / "multi_worker"  # of this run of pytest
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = directory / "done"
        if not done.exists():
            launch(directory, fresh_python)
            done.touch()
    return directory


def launch(directory, fresh_python):
    cases = {
        **EQUAL_TO_ONE_DEVICE,
        **OTHERS,
        **PRUNED,
        "long": {**LONG, "checkpoint_dir": str(directory / "undisturbed")},
    }
    request = json.dumps({"results": str(directory), "cases": cases})
    fresh_python("-c", LAUNCH, "launch", "--workers", "2", SCRIPT, request, timeout=1200, check=True)
    return directory


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*EQUAL_TO_ONE_DEVICE, *OTHERS, *PRUNED, "long"])
def test_two_workers_end_with_the_same_bits_and_logs(launched, name):
    assert_same_bits(results(launched, name, 1), results(launched, name, 0))


@pytest.mark.parametrize("name", [*EQUAL_TO_ONE_DEVICE, *PRUNED])
def test_two_workers_train_what_one_device_does(launched, name):
    history, found = results(launched, name, 0)
    model, wanted = train("none", pruning=PRUNED.get(name, {}).get("pruning"))
    if name in PRUNED:
        assert [history["zeros_0"][-1], history["zeros_1"][-1]] == [72, 24]
    assert history.keys() == wanted.keys()
    for figure, values in wanted.items():
        np.testing.assert_allclose(history[figure], values, rtol=1e-5, err_msg=figure)
    variables = [*model.variables, *model.optimizer.variables]
    assert len(found) == len(variables)
    for variable, value in zip(variables, found.values(), strict=True):
        scale = max(np.abs(variable.numpy()).max(), 1e-3)
        assert np.abs(value - variable.numpy()).max() <= 1e-5 * scale, variable.path


@pytest.mark.parametrize("name", OTHERS)
def test_statistics_moved(launched, name):
    _, found = results(launched, name, 0)
    mean = found["arr_4"]  # after kernel, bias, gamma and beta
    assert mean.shape == (16,)
    assert np.abs(mean).max() > 0.01


def start(python, directory, checkpoints):
    """Starts two workers without the launcher, which would stop one if the other fails."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in sockets]
    for server in sockets:
        server.close()
    cases = {"resumed": {**LONG, "checkpoint_dir": str(checkpoints)}}
    return [
        subprocess.Popen(
            [python, str(SCRIPT), json.dumps({"results": str(directory), "cases": cases})],
            env={
                **os.environ,
                "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]


def wait_for_checkpoint_after(store, step, workers):
    while not (steps := store.steps()) or steps[-1] <= step:
        assert all(worker.poll() is None for worker in workers), [worker.communicate()[1] for worker in workers]
        time.sleep(0.01)


@pytest.fixture(scope="module")
def python(fresh_python):
    """The interpreter of the workers. It passes signals on to them, and is killed with them."""
    return fresh_python.interpreters["tfopt"]


@pytest.fixture
def workers():
    started = []
    yield started
    for worker in started:
        worker.kill()
        worker.communicate()


def finish(python, directory, checkpoints, workers):
    workers[:] = start(python, directory, checkpoints)
    for worker in workers:
        error = worker.communicate(timeout=600)[1]
        assert worker.returncode == 0, error[-5000:]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("killed", [1, 0])
def test_a_killed_worker_ends_the_other_and_a_restart_ends_as_if_nothing_had_been(
    python, launched, tmp_path, workers, killed
):
    store = CheckpointStore(tmp_path / "checkpoints")
    workers[:] = start(python, tmp_path, store.directory)
    wait_for_checkpoint_after(store, 30, workers)
    began = time.monotonic()
    workers[killed].kill()
    other = workers[1 - killed]
    error = other.communicate(timeout=300)[1]
    assert time.monotonic() - began < 180  # it takes ten seconds where nothing else runs
    assert other.returncode > 0
    last = error.strip().splitlines()[-1]
    assert last.startswith("tfopt.errors.TrainingError: Another worker ended or cannot be reached")
    assert "start all workers again" in last
    assert not (tmp_path / f"resumed-{1 - killed}.npz").exists()
    assert store.load_newest().step > 30
    if killed == 0:  # the chief, which writes the checkpoints
        finish(python, tmp_path, store.directory, workers)
        for worker in range(2):
            assert_same_bits(results(tmp_path, "resumed", worker), results(launched, "long", 0))


def test_sigterm_to_both_ends_both_with_143_and_one_checkpoint(python, launched, tmp_path, workers):
    store = CheckpointStore(tmp_path / "checkpoints", keep=1000)
    workers[:] = start(sys.executable, tmp_path, store.directory)
    wait_for_checkpoint_after(store, 30, workers)
    for worker in workers:
        listening = [each for each in psutil.Process(worker.pid).net_connections() if each.status == psutil.CONN_LISTEN]
        assert [each.laddr.ip for each in listening] == ["127.0.0.1"]
    workers[1].send_signal(signal.SIGTERM)  # at different moments, between which the other may go on
    time.sleep(0.05)
    workers[0].send_signal(signal.SIGTERM)
    errors = [worker.communicate(timeout=300)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [143, 143], errors
    step = store.steps()[-1]
    assert all(f"SIGTERM: saved step {step} in {store.directory}" in error for error in errors), errors
    assert store.load_newest().step == step
    assert len([name for name in store.steps() if name % LONG["checkpoint_every"]]) <= 1  # it was saved once
    assert step < LONG["epochs"] * 7

    finish(python, tmp_path, store.directory, workers)
    for worker in range(2):
        assert_same_bits(results(tmp_path, "resumed", worker), results(launched, "long", 0))
