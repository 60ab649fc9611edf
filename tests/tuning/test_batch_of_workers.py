"""The batch size of a training of several workers, which are real processes: each searches, and all agree."""

import contextlib
import json
import os
import socket
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tfopt import BatchSizeReport, TrainingConfig
from tfopt.hardware import detect
from tfopt.recipe import Recipe
from tfopt.training.distributed.cluster import Cluster, tf_config
from tfopt.tuning.limit import Limit, find_limit
from tfopt.tuning.memory import MemoryReport, MemoryTrial
from tfopt.tuning.throughput import throughput_of
from tfopt.tuning.workers import agreed, cluster_of, sharing

PROGRAM = """
import sys
import keras
import numpy as np
import tfopt
from tfopt import BatchSizeConfig, TrainingConfig

most, joins = int(sys.argv[1]), sys.argv[2:] == ["joins"]
training = TrainingConfig(strategy="multi_worker", global_batch_size=8)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
data = np.zeros((300, 8), np.float32), np.zeros(300, np.int32)
config = BatchSizeConfig(
    max_batch_size=most or None, memory_limit_bytes=None if most else 1, window_s=0.02, turns=6, throughput=not joins
)

def build():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])

if joins:
    plan = tfopt.plan(training)
    with plan.scope():
        model = build()
    tfopt.compile(model, plan, loss=loss)
    training = None
else:
    model = build()
    model.compile("adam", loss)
print(tfopt.find_batch_size(model, data, config, training=training, directory="run").to_json())
"""


def search(fresh_python, folder, most, *words):
    """Lets a worker search for each of `most`. Returns their exit codes, and the texts that they printed."""
    (folder / "program.py").write_text(PROGRAM)
    with contextlib.ExitStack() as running:
        with contextlib.ExitStack() as taken:
            sockets = [taken.enter_context(socket.create_server(("localhost", 0))) for _ in most]
            addresses = tuple(f"localhost:{each.getsockname()[1]}" for each in sockets)
        processes = []
        for index, size in enumerate(most):
            config = tf_config(Cluster(addresses, index, "a test"))
            environment = {**os.environ, "TF_CONFIG": config, "CUDA_VISIBLE_DEVICES": ""}
            program = fresh_python.running("program.py", size, *words, cwd=folder, stderr=-1, env=environment)
            processes.append(running.enter_context(program))
        texts = [each.communicate(timeout=300) for each in processes]
        return [(process.returncode, *found) for process, found in zip(processes, texts, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("joins",)])
def test_workers_agree_on_the_least_batch(fresh_python, tmp_path, words):
    reports = []
    for code, text, error in search(fresh_python, tmp_path, [24, 16], *words):
        assert code == 0, error[-3000:]
        reports.append(BatchSizeReport.from_json(text))
    for index, report in enumerate(reports):
        memory = report.memory
        assert (memory.workers, memory.per_replica_batch_size, memory.replicas) == ((24, 16), 16, 2)
        assert max(each.per_replica_batch_size for each in memory.trials) == (24, 16)[index]
        assert "shared by 2 workers" in memory.limit.source
        assert "found 24, 16 on a replica" in str(report)
        settings = tomllib.loads(Path(tmp_path, "run", f"worker-{index}", "batch_size.toml").read_text())
        assert settings == {"training": report.settings}
    assert reports[0].settings == reports[1].settings
    if words:  # without the speeds
        assert reports[0].settings["global_batch_size"] == 32
        return
    one, other = (report.throughput for report in reports)
    assert one.knee == other.knee == reports[0].settings.get("global_batch_size", 8)
    for each in (*one.curve, *other.curve):  # of both workers together
        assert each.step_ms == pytest.approx(1e3 * each.global_batch_size / each.examples_per_s)
    assert [each.global_batch_size for each in one.curve] == [2, 4, 8, 16, 32]
    assert [each.step_ms for each in one.curve] != [each.step_ms for each in other.curve]


@pytest.mark.slow
def test_all_workers_of_a_launch_end_with_the_cause_of_one(fresh_python, tmp_path):
    (tmp_path / "program.py").write_text(
        "import json, os, sys\n"
        "index = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        "sys.argv[1:] = ['0' if index else '8']\n" + PROGRAM
    )
    done = fresh_python("-m", "tfopt", "launch", "--workers", "2", "program.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "One example on each replica must fit into the memory" in done.stderr.splitlines()[-1]


def test_workers_of_a_host_share_its_free_memory(monkeypatch):
    monkeypatch.setattr("tfopt.hardware.detect", lambda: replace(detect(), gpus=()))
    assert sharing(Cluster(("a:1", "b:1", "b:2"), 0, "a test")) == 1
    whole, half = (find_limit(None, 0.0, hard=False, sharing=count) for count in (1, 2))
    assert half.bytes < 0.7 * whole.bytes


def test_numbers_of_every_worker_make_what_all_have():
    def found(largest, replicas, rates):
        trial = MemoryTrial(per_replica_batch_size=largest, fits=True, peak_bytes=1, seconds=1.0)
        limit = Limit(bytes=100, margin=0.0, source="a test")
        memory = MemoryReport(
            per_replica_batch_size=largest,
            replicas=replicas,
            limit=limit,
            estimated=None,
            trials=(trial,),
            ended_by="a test",
        )
        return memory, throughput_of(rates)

    rates = {4: [40.0, 40.0], 8: [80.0, 80.0], 16: [160.0, 160.0]}
    rows = [[8, 2, 8], [6, 2, 4], [7, 1, 3]]  # the largest and the knee of a replica
    memory, own = found(8, 2, rates)
    memory, throughput = agreed(memory, replace(own, undecided=(4,)), rows)
    assert (memory.per_replica_batch_size, memory.replicas, memory.workers) == (6, 5, (8, 6, 7))
    assert (throughput.knee, throughput.undecided) == (6 * 5, ())  # one of 8 does not fit everywhere
    assert [(each.global_batch_size, each.examples_per_s) for each in throughput.curve] == [(10, 100.0), (20, 200.0)]
    assert [each.step_ms for each in throughput.curve] == [100.0, 100.0]


@pytest.mark.parametrize(
    ("workers", "strategy", "joins"),
    [
        (2, "auto", True),
        (2, "multi_worker", True),
        (2, "mirrored", False),
        (2, "none", False),
        (1, "auto", False),
        (1, "multi_worker", True),
    ],
)
def test_which_trainings_have_other_workers(monkeypatch, workers, strategy, joins):
    addresses = ["a:1", "b:1"][:workers]
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    recipe = Recipe(name="mine", training=TrainingConfig(strategy=strategy))
    assert (cluster_of(recipe) is not None) == joins
