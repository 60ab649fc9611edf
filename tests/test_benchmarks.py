"""The benchmarks run, and count what they say they count."""

import json
import os
from inspect import signature
from pathlib import Path

import gpu_profile
import gpu_serving
import gpu_startup
import gpu_training
import input_pipeline
import int8_models
import int8_savedmodel
import keras
import numpy as np
import pytest
import time_by_op
import training_overhead
from runtimes import worker

import tfopt
from tfopt.exporting.verification.served import Runner
from tfopt.hardware import detect

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_a_part_of_the_input_cases_keeps_the_others_of_the_same_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(input_pipeline, "all_cases", lambda directory: iter([("a case", None, None)]))
    out = tmp_path / "results.json"
    options = input_pipeline.Options(only="none has this name", out=out)
    header = input_pipeline.main(options)
    assert header["cases"] == {}
    out.write_text(json.dumps({**header, "cases": {"crop": 1}, "placement": 2}))
    results = input_pipeline.main(options)
    assert (results["cases"], results["placement"]) == ({"crop": 1}, 2)
    assert json.loads(out.read_text()) == results
    out.write_text(json.dumps({**header, "device": "another one"}))
    with pytest.raises(SystemExit, match=r"--only needs results of the same device.*another one"):
        input_pipeline.main(options)


@pytest.mark.slow
def test_bert_base_has_two_operations_per_weight_and_token_and_those_of_attention():
    model = gpu_training.bert()
    tokens, depth, width = 128, 12, 768
    in_blocks = depth * (2 * tokens * 12 * width**2 + 2 * 2 * tokens**2 * width)
    pooler_and_logits = 2 * width * (width + gpu_training.CLASSES)
    assert tfopt.count_flops(model).flops == in_blocks + pooler_and_logits


def test_kernels_are_added_up_by_kind_also_under_the_names_of_onednn():
    kernels = {
        ("a", "_MklSwish"): 2.0,
        ("b", "_MklNativeFusedConv2D"): 3.0,
        ("c", "MatMul"): 1.0,
        ("d", "Shape"): 0.004,
    }
    found = time_by_op.by_op(kernels | {("e", "_QuantizedMatMul"): 4.0, ("f", "_MklQuantizeV2"): 0.5})
    assert {kind: each["ms"] for kind, each in found.items()} == {
        "products in int8": 4.0,
        "other products": 4.0,
        "activations": 2.0,
        "conversions": 0.5,
        "the rest": 0.004,
    }
    assert found["other products"]["ops"] == {"_MklNativeFusedConv2D": 3.0, "MatMul": 1.0}


@pytest.mark.slow
def test_the_rehearsal_of_the_gpu_training_trains_all_sides_and_writes_what_it_returns(tmp_path):
    results = gpu_training.main(gpu_training.Options(smoke=True, models=("bert_base",), out=tmp_path))
    assert set(results["models"]) == {"bert_base"}
    for side in gpu_training.Options().sides:
        assert results["models"]["bert_base"][side]["examples_per_second"] > 0
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text())["models"] == results["models"]


@pytest.mark.slow
def test_the_rehearsal_of_the_start_on_a_gpu_times_it_and_ends_what_takes_too_long(tmp_path):
    settings = ("plain", "cached")
    options = gpu_startup.Options(smoke=True, networks=("dense",), settings=settings, jobs=2, out=tmp_path)
    found = gpu_startup.main(options)["networks"]["dense"]
    assert all(found[each]["first_s"] > 0 and found[each]["step_ms"] > 0 for each in settings)
    assert gpu_startup.fresh_process("dense", "plain", "", limit_s=0.1) == {"ended": "after 0.1 s"}
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text())["networks"]["dense"] == found


@pytest.mark.slow
def test_the_rehearsal_of_serving_on_a_gpu_runs_every_artifact(tmp_path):
    results = gpu_serving.main(gpu_serving.Options(smoke=True, out=tmp_path))
    tiny = results["models"]["tiny"]
    assert not tiny["failed"]
    assert tiny["artifacts"].keys() > {"keras", *gpu_serving.ARTIFACTS}
    for artifact in tiny["artifacts"].values():
        assert artifact["ms"][1] > 0
        assert artifact["against_keras"]["relative_error"] < 0.05
    assert "_FusedQuantizedConv2D" in tiny["artifacts"]["int8"]["on_host"]


@pytest.mark.slow
def test_the_rehearsal_of_the_gpu_profile_has_no_part_that_failed(tmp_path):
    out = tmp_path / "profile.json"
    results = gpu_profile.main(gpu_profile.Options(smoke=True, out=out))
    assert json.loads(out.read_text()).keys() == results.keys()
    assert "failed" not in out.read_text()


def test_without_a_gpu_the_gpu_benchmark_ends_with_code_2_and_the_reason(tmp_path, capsys):
    if detect().gpus:
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit) as ended:
        gpu_training.main(gpu_training.Options(out=tmp_path))
    assert ended.value.code == 2
    assert "needs a GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_the_profile_of_a_gpu_is_skipped_with_the_reason(tmp_path, capsys):
    assert gpu_profile.joules([0, 1, 2, 4], [100.0, None, 300.0, 300.0]) == 2 * 200 + 2 * 300
    assert gpu_profile.joules([0, 1], [None, 100.0]) is None
    if detect().gpus:
        pytest.skip("this machine has a GPU")
    assert gpu_profile.main(gpu_profile.Options(out=tmp_path / "profile.json")) == {}
    assert "skipped, because it needs a GPU: TensorFlow sees none" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_overhead_benchmark_reports_every_pair(tmp_path):
    out = tmp_path / "overhead.json"
    training_overhead.main(training_overhead.Options(quick=True, only=("mlp",), out=out))
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


def test_batch_norm_has_the_statistics_of_the_inputs_as_after_training():
    case = int8_models.MODELS["tiny"]
    model = int8_models.make(case)
    norm = model.get_layer("last_bn")
    values = keras.Model(model.input, norm.input)(case.inputs(32, 0)).numpy()
    np.testing.assert_allclose(norm.moving_mean, values.mean(axis=(0, 1, 2)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, values.var(axis=(0, 1, 2)), rtol=1e-3)
    np.testing.assert_allclose(norm.gamma, int8_models.DAMPING)
    assert norm.momentum == 0.99


@pytest.mark.parametrize("command", ["predict", "time"])
def test_a_worker_takes_the_commands_of_tfopts_processes(command):
    sent, taken = signature(getattr(Runner, command)), signature(getattr(worker.Worker, f"do_{command}"))
    assert [*taken.parameters] == [*sent.parameters]


def test_a_worker_opens_what_the_batch_size_needs_and_keeps_outputs_that_are_overwritten(tmp_path):
    class Doubling(worker.Worker):
        packages = ("numpy",)
        opened = ()

        def open(self, path, threads):
            self.opened += (Path(path).name,)
            self.shared = np.empty(int(path.rpartition("_")[2]))

        def call(self, batch):
            return np.multiply(batch, 2, out=self.shared)

    doubling = Doubling()
    doubling.do_load(str(tmp_path), threads=1)
    np.savez(tmp_path / "in.npz", x=np.arange(6.0))
    doubling.do_predict(str(tmp_path / "in.npz"), str(tmp_path / "out.npz"), batch_size=2)
    np.testing.assert_array_equal(worker.only_array(tmp_path / "out.npz"), 2 * np.arange(6))
    assert doubling.opened == ("batch_2",)
    assert len(doubling.do_time(str(tmp_path / "in.npz"), seconds=0, at_least=3)["ms"]) == 3
    assert doubling.opened == ("batch_2", "batch_6")


def test_an_unknown_runtime_is_refused_before_the_work():
    with pytest.raises(SystemExit, match=r"Unknown runtime 'onnx'. Expected some of: .*onnxruntime"):
        int8_savedmodel.main(int8_savedmodel.Options(models=("tiny",), runtimes=("onnx",)))


@pytest.mark.slow
def test_the_int8_benchmark_compares_and_times_and_says_what_it_could_not_run(fresh_python, tmp_path):
    out, blocked = tmp_path / "results.json", tmp_path / "blocked"
    out.write_text('{"models": {"earlier": {}}}')
    blocked.write_text("A file, so that no environment can be made in it.")
    runtimes = ("keras_export", "tfopt_float32", "tfopt_int8", "tfopt_int8_one_thread")
    quick = ("--models", "tiny", "--batch-sizes", "2", "--rounds", "2", "--seconds", "0.05")
    run = _run(
        fresh_python,
        "int8_savedmodel.py",
        *quick,
        "--runtimes",
        *runtimes,
        "litert",
        "--cache",
        str(blocked),
        "--out",
        str(out),
    )
    assert run.returncode == 0, run.stderr
    models = json.loads(out.read_text())["models"]
    assert list(models) == ["earlier", "tiny"]
    tiny = models["tiny"]
    assert list(tiny["failed"]) == ["litert"]
    assert "blocked" in tiny["failed"]["litert"]
    assert tuple(tiny["bytes_on_disk"]) == runtimes
    assert sum(tiny["tfopt_int8_nodes"].values()) == 3  # in int8 or in float32, as the clock had it
    assert tiny["against_float"]["tfopt_float32"]["relative_error"] < 1e-4
    assert tiny["against_float"]["tfopt_int8"]["relative_error"] < 0.05
    (latency,) = tiny["latency"]
    assert min(latency["calls"].values()) >= 6
    assert latency["speed_against_keras_export"]["keras_export"] == 1
    assert list(tiny["throughput"]) == ["tfopt_int8"]
    assert tiny["throughput"]["tfopt_int8"]["batch_sizes"] == [2, 2]
    assert tiny["throughput"]["tfopt_int8"]["parallel_examples_per_s"] > 0


def _run(fresh_python, script, *arguments):
    # As where there is no GPU, also where there is one.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    return fresh_python(BENCHMARKS / script, *arguments, env=environment)


@pytest.mark.slow
def test_the_sweep_over_layers_times_plain_operations_that_compute_the_same(fresh_python, tmp_path):
    out, names = tmp_path / "sweep.json", ["Conv2D, 64 groups", "TimeDistributed", "GRU"]
    quick = ["--networks", "--rounds", "1", "--seconds", "0.01", "--out", str(out)]
    run = _run(fresh_python, "layer_sweep.py", "--layers", *names, *quick)
    assert run.returncode == 0, run.stderr
    results = json.loads(out.read_text())["layers"]
    assert set(results) == set(names)
    for row in results.values():
        assert max(row["forward"]["difference"].values()) < 1e-5
        assert set(row["training"]["over_plain"]) == {"keras", "tfopt"}


@pytest.mark.slow
def test_the_benchmark_of_upsampling_compares_the_resize_with_the_repetition(fresh_python, tmp_path):
    out = tmp_path / "upsampling.json"
    chosen = ["--networks", "decoder", "--formats", "onnx", "--precisions", "float32"]
    run = _run(fresh_python, "upsampling.py", *chosen, "--seconds", "0.01", "--out", str(out))
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())["networks"]["decoder"]["float32"]["onnx"]["batch_8"]
    assert found["gain"] == pytest.approx(found["ms"]["repeated"] / found["ms"]["resized"], abs=0.001)


@pytest.mark.slow
def test_the_benchmark_of_grouped_convolutions_compares_exports_and_trainings(fresh_python, tmp_path):
    out = tmp_path / "grouped.json"
    run = _run(fresh_python, "grouped_convolutions.py", "--quick", "--models", "regnet", "convnext", "--out", str(out))
    assert run.returncode == 0, run.stderr
    results = json.loads(out.read_text())
    (export,), (training,) = results["export"], results["training"]
    assert set(training["loss_difference"]) == {"tfopt", "accelerate"}
    assert max(training["loss_difference"].values()) < 1e-5
    assert set(export["batch"]) == {"1", "8"}
    assert all(row["difference"] < 1e-5 for row in export["batch"].values())
    assert all(row["int8_difference"] < 0.1 for row in export["batch"].values())


@pytest.mark.slow
def test_the_benchmark_of_recurrent_layers_compares_both_exports(fresh_python, tmp_path):
    out = tmp_path / "recurrent.json"
    run = _run(fresh_python, "recurrent.py", "--quick", "--out", str(out))
    assert run.returncode == 0, run.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["LSTM", "GRU", "Bidirectional LSTM", "Bidirectional GRU"]
    assert all(figures["difference"] < 1e-5 for row in rows for figures in row["batch"].values())


@pytest.mark.slow
def test_trained_models_leave_memory(fresh_python, tmp_path):
    out = tmp_path / "memory_kept.json"
    _run(fresh_python, "memory_kept.py", "--quick", "--out", str(out))
    growth = json.loads(out.read_text())["growth_mib"]
    assert growth["tfopt"] < 0.5 * growth["keras"]
