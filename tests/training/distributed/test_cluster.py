import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import tensorflow as tf

from tfopt.errors import ConfigError, TfoptError
from tfopt.training.distributed.cluster import (
    Cluster,
    find_cluster,
    keeping_port,
    lost_worker,
    meet,
    multi_worker_strategy,
    tf_config,
)

DOCS = Path(__file__).parents[3] / "docs" / "cluster"
TWO = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
# What srun gave the third of five tasks on three nodes.
STEP = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_NODELIST": "gpu[9-10],login1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "5",
}


def from_tf_config(**changes):
    return find_cluster({"TF_CONFIG": json.dumps({**TWO, **changes})})


def test_tf_config_is_read():
    task = {"type": "worker", "index": 1}
    assert from_tf_config(task=task) == Cluster(("a:1", "b:1"), 1, "TF_CONFIG")


def test_a_chief_is_the_first_worker():
    cluster = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    workers = ("a:1", "b:1", "c:1")
    assert from_tf_config(cluster=cluster, task={"type": "chief", "index": 0}) == Cluster(workers, 0, "TF_CONFIG")
    assert from_tf_config(cluster=cluster, task={"type": "worker", "index": "1"}) == Cluster(workers, 2, "TF_CONFIG")


def test_a_cluster_survives_tf_config():
    cluster = Cluster(("a:1", "b:1", "c:1"), 2, "TF_CONFIG")
    assert find_cluster({"TF_CONFIG": tf_config(cluster)}) == cluster


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster": {"worker": ["a:1"], "ps": ["b:1"]}}, "parameter servers.*'ps'"),
        ({"task": {"type": "evaluator", "index": 0}}, "evaluators.*'evaluator'"),
        ({"task": {"type": "chief", "index": 0}}, "'chief'"),
        ({"task": {"type": "worker", "index": 2}}, r"\[0, 2\).*index=2"),
        ({"task": {"type": "worker", "index": -1}}, r"\[0, 2\).*index='?-1"),
        ({"task": {"type": "worker"}}, "type and index"),
        ({"task": None}, "a cluster, and a task"),
        ({"cluster": ["a:1"]}, "a cluster, and a task"),
        ({"cluster": {"worker": "a:1"}}, "list of addresses.*'a:1'"),
        ({"cluster": {"worker": ["a", "b:1"]}}, "host:port.*'a'"),
        ({"cluster": {"worker": ["a:1", "a:1"]}}, "address of its own.*a:1, a:1"),
    ],
)
def test_a_wrong_tf_config_is_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        from_tf_config(**changes)


@pytest.mark.parametrize("text", ["{", "[]", "3", '"x"'])
def test_a_tf_config_that_is_no_object_is_named(text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        find_cluster({"TF_CONFIG": text})


def test_slurm_tasks_are_counted_node_by_node_in_the_order_of_the_list():
    cluster = find_cluster(STEP)
    assert (cluster.index, cluster.source) == (2, "Slurm")
    hosts, ports = zip(*(address.split(":") for address in cluster.workers), strict=True)
    assert hosts == ("gpu9", "gpu9", "gpu10", "gpu10", "login1")
    assert [int(port) - int(ports[0]) for port in ports] == [0, 1, 0, 1, 0]
    assert int(ports[0]) in range(12_000, 32_000)


def test_two_slurm_jobs_on_one_node_have_different_ports():
    assert not set(find_cluster(STEP).workers) & set(find_cluster({**STEP, "SLURM_JOB_ID": "1001"}).workers)


def test_no_cluster_without_srun_or_with_one_task():
    batch_script = {name: value for name, value in STEP.items() if "STEP" not in name}
    assert find_cluster(batch_script) is None
    one = {"SLURM_STEP_NODELIST": "a", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert find_cluster({**STEP, **one}) is None


def test_tf_config_counts_before_slurm():
    assert find_cluster({**STEP, "TF_CONFIG": json.dumps(TWO)}).source == "TF_CONFIG"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_NODEID": "2"}, "--distribution=block"),
        ({"SLURM_PROCID": "7"}, "--distribution=block"),
        ({"SLURM_STEP_NODELIST": "gpu[1-"}, r"gpu\[1-.*set TF_CONFIG"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, "set TF_CONFIG"),
        ({"SLURM_STEP_TASKS_PER_NODE": "many"}, "many"),
    ],
)
def test_wrong_slurm_variables_are_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        find_cluster({**STEP, **changes})


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def test_a_port_is_kept_without_an_answer_until_the_worker_joins():
    port = free_port()
    cluster = Cluster((f"localhost:{port}", "localhost:1"), 0, "TF_CONFIG")
    with keeping_port(cluster):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("localhost", port))
        with pytest.raises(TfoptError, match=f"own port. Received: port {port}"), keeping_port(cluster):
            pass
    taken = pytest.raises(TfoptError, match="End the process that holds it")
    with socket.create_server(("localhost", port)), taken, keeping_port(cluster):
        pass


def test_a_worker_that_never_comes_is_named():
    addresses = (f"localhost:{free_port()}", f"localhost:{free_port()}")
    with pytest.raises(TfoptError, match=f"within 0.5 s.*worker 0 of 2.*no answer from {addresses[1]}"):
        multi_worker_strategy(Cluster(addresses, 0, "TF_CONFIG"), start_timeout_s=0.5)


def test_a_taken_port_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(TfoptError, match=f"port {port}.*in use"):
            meet(Cluster((f"localhost:{port}", "localhost:1"), 0, "TF_CONFIG"), 1.0)


def test_joining_after_tensorflow_started_is_refused():
    tf.constant(0)
    with pytest.raises(ConfigError, match=r"before TensorFlow computes.*Call tfopt.plan first"):
        multi_worker_strategy(Cluster((f"localhost:{free_port()}",), 0, "TF_CONFIG"))


def test_nccl_needs_a_gpu():
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="needs a GPU"):
        multi_worker_strategy(Cluster(("localhost:1", "localhost:2"), 0, "TF_CONFIG"), "nccl")


def test_a_lost_worker_is_recognised_behind_other_errors():
    error = RuntimeError("fit failed")
    error.__cause__ = tf.errors.UnavailableError(None, None, "Collective ops is aborted by: Socket closed")
    assert lost_worker(error)
    assert not lost_worker(RuntimeError("Collective ops is aborted"))
    assert not lost_worker(tf.errors.UnavailableError(None, None, "the file system is away"))
    assert not lost_worker(tf.errors.InvalidArgumentError(None, None, "Collective ops is aborted by: shapes differ"))


TRAIN = """
    import os, signal, time
    from tfopt.training.distributed.cluster import find_cluster, lost_worker, multi_worker_strategy
    cluster = find_cluster()
    strategy = multi_worker_strategy(cluster, start_timeout_s=200)
    import tensorflow as tf
    @tf.function
    def step():
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones([])))
    print("handler", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
    try:
        while True:
            value = float(step())
            print("sum", value, flush=True)
            time.sleep(0.05)
    except Exception as error:
        print("lost" if lost_worker(error) else repr(error), flush=True)
"""


@pytest.mark.slow
def test_a_worker_that_hangs_ends_the_other(tmp_path):
    """test_multi_worker.py has those that die."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    addresses = tuple(f"localhost:{free_port()}" for _ in range(2))
    environments = [{**os.environ, "TF_CONFIG": tf_config(Cluster(addresses, index, "a test"))} for index in (0, 1)]
    # Each in a group of its own: Linux sends SIGHUP to a whole orphaned group with a stopped member, that of the tests.
    workers = [
        subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True, process_group=0)
        for environment in environments
    ]
    try:
        for worker in workers:
            assert worker.stdout.readline() == "handler True\n"
            assert worker.stdout.readline() == "sum 2.0\n"
        workers[1].send_signal(signal.SIGSTOP)
        output, _ = workers[0].communicate(timeout=300)
        assert output.splitlines()[-1] == "lost"
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_the_kubernetes_manifest_composes_tf_config():
    text = (DOCS / "kubernetes.yaml").read_text()
    assert "\t" not in text
    assert re.findall(r"^kind: (\w+)$", text, re.MULTILINE) == ["Service", "Job"]
    # The block of shell under "args: - |", as Kubernetes would pass it, with the training replaced.
    block = re.search(r"( +)- \|\n(.*?)\n +ports:", text, re.DOTALL)
    shell = textwrap.dedent(block[2]).replace("exec python -u /train/train.py", 'printf %s "$TF_CONFIG"')
    values = dict(re.findall(r'- name: (WORKERS|JOB)\n +value: "?(\w+)"?', text))
    assert values["WORKERS"] == re.search(r"completions: (\d+)", text)[1] == re.search(r"parallelism: (\d+)", text)[1]
    for index in range(int(values["WORKERS"])):
        environment = {**values, "JOB_COMPLETION_INDEX": str(index)}
        composed = subprocess.run(["/bin/sh", "-c", shell], env=environment, capture_output=True, text=True, check=True)
        cluster = find_cluster({"TF_CONFIG": composed.stdout})
        assert cluster == Cluster(("tfopt-0.tfopt:2222", "tfopt-1.tfopt:2222"), index, "TF_CONFIG")


@pytest.mark.parametrize(("ends_with", "requeued"), [(143, True), (1, False)])
def test_the_sbatch_file_requeues_after_sigterm_only_when_a_checkpoint_was_saved(ends_with, requeued, tmp_path):
    """Programs named srun and scontrol do here what Slurm's do: run the command, and record the job."""
    programs = {
        "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
        "scontrol": f'#!/bin/bash\necho "$@" > {tmp_path}/requeued\n',
        "python": f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "train.py"
    script.write_text(
        "import signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.5)\n"
        f"    print('saved', sys.argv[1:], flush=True)\n    sys.exit({ends_with})\n"
        "signal.signal(signal.SIGTERM, save)\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    command = ["bash", str(DOCS / "tfopt.sbatch"), str(script), "--epochs", "3"]
    batch = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert batch.stdout.readline() == "ready\n"
    batch.send_signal(signal.SIGTERM)
    output, _ = batch.communicate(timeout=300)
    assert output == "saved ['--epochs', '3']\n"
    assert batch.returncode == ends_with
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 77\n"
