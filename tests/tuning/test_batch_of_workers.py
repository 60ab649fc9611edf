"""The batch size of a training of several workers, which are real processes: each searches, and all agree."""

import contextlib
import os
import socket
from pathlib import Path

import pytest

from tfopt import BatchSizeReport
from tfopt.training.distributed.cluster import Cluster, tf_config
from tfopt.tuning.limit import find_limit
from tfopt.tuning.workers import sharing

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
        processes = [
            running.enter_context(
                fresh_python.running(
                    "program.py",
                    *(str(size), *words),
                    cwd=folder,
                    stderr=-1,
                    env={**os.environ, "TF_CONFIG": tf_config(Cluster(addresses, index, "a test"))},
                )
            )
            for index, size in enumerate(most)
        ]
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
        assert Path(tmp_path, "run", f"worker-{index}", "batch_size.json").is_file()
    assert reports[0].settings == reports[1].settings
    if words:
        assert reports[0].settings["global_batch_size"] == 32
    else:
        (one, other) = (report.throughput for report in reports)
        assert one.knee == other.knee == reports[0].settings.get("global_batch_size", 8)
        assert [each.global_batch_size for each in other.curve] == [2, 4, 8, 16, 32]
        assert [each.step_ms for each in one.curve] != [each.step_ms for each in other.curve]


@pytest.mark.slow
def test_a_worker_that_finds_none_tells_the_others(fresh_python, tmp_path):
    (code, _, error), (failed, _, cause) = search(fresh_python, tmp_path, [2, 0])
    assert code == failed == 1
    assert "TrainingError: Every worker must find a batch. Received: none from worker 1 of 2" in error
    assert "ConfigError: One example on each replica must fit into the memory" in cause


def test_workers_of_a_host_share_its_free_memory():
    assert sharing(Cluster(("a:1", "b:1", "b:2"), 0, "a test")) == 1
    whole, half = (find_limit(None, 0.0, hard=False, sharing=count) for count in (1, 2))
    assert half.bytes < 0.7 * whole.bytes
