"""The training benchmarks run, and count what they say they count."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def gpu_training(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu_training")


def test_resnet50_has_the_operations_that_its_paper_counts(gpu_training):
    # He et al. 2016, table 1: 3.8 * 10^9 multiplications with their additions, 25.6 million weights.
    model = gpu_training.resnet50()
    assert gpu_training.forward_flops(model) == pytest.approx(2 * 3.86e9, rel=0.005)
    assert model.count_params() == pytest.approx(25.6e6, rel=0.005)


def test_bert_base_has_two_operations_per_weight_and_token_and_those_of_attention(gpu_training):
    model = gpu_training.bert()
    tokens, depth, width = 128, 12, 768
    in_blocks = depth * (2 * tokens * 12 * width**2 + 2 * 2 * tokens**2 * width)
    assert gpu_training.forward_flops(model) == in_blocks + 2 * width * gpu_training.CLASSES
    assert model.count_params() == pytest.approx(109.5e6, rel=0.01)  # BERT-base: 110 million, with pooler


def test_the_count_is_tensorflows_own(gpu_training):
    model = gpu_training.bert(tokens=8, depth=2, width=32, heads=4, vocabulary=50)
    spec = tf.TensorSpec((1, 8), tf.int32)
    graph = tf.function(lambda x: model(x, training=False)).get_concrete_function(spec).graph
    with graph.as_default():
        options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation() | {"output": "none"}
        counted = tf.compat.v1.profiler.profile(graph=graph, cmd="scope", options=options)
    products = {op.name for op in graph.get_operations() if op.type in ("MatMul", "BatchMatMulV2", "Einsum")}
    assert gpu_training.forward_flops(model) == _operations(counted, products)


def _operations(node, names):
    return node.float_ops * (node.name in names) + sum(_operations(child, names) for child in node.children)


@pytest.mark.slow
def test_the_smoke_run_trains_both_sides_and_writes_nothing(tmp_path):
    run = _run("gpu_training.py", "--smoke", "--out", str(tmp_path))
    assert run.returncode == 0, run.stderr
    models = json.loads(run.stdout)["models"]
    assert set(models) == {"resnet50", "bert_base"}
    for figures in models.values():
        assert figures["keras"]["examples_per_second"] > 0
        assert figures["tfopt"]["examples_per_second"] > 0
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_the_gpu_benchmark_ends_with_code_2_and_the_reason(tmp_path):
    run = _run("gpu_training.py", "--out", str(tmp_path))
    assert run.returncode == 2
    assert "needs a GPU" in run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_overhead_benchmark_reports_every_pair(tmp_path):
    out = tmp_path / "overhead.json"
    run = _run("training_overhead.py", "--quick", "--only", "mlp", "--out", str(out))
    assert run.returncode == 0, run.stderr
    results = json.loads(out.read_text())
    assert [(case["jit_compile"], case["steps_per_execution"]) for case in results["overhead"]] == [
        (False, 1),
        (False, 10),
        (True, 1),
        (True, 10),
    ]
    for case in results["overhead"]:
        assert 0 < case["quartiles"][0] <= case["tfopt_over_keras"] <= case["quartiles"][1]
    assert results["gain"]["mlp"]["tfopt_chose"]["steps_per_execution"] == "10"


def _run(script, *arguments):
    # As where there is no GPU, also where there is one.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
