"""The records: how they print, that they serialise, and that a file is written whole or not at all."""

import dataclasses
import json
import resource
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfopt.atomic.files import write_text
from tfopt.errors import ExportError, TfoptWarning
from tfopt.report import (
    Change,
    Decision,
    PassReport,
    Phase,
    Receipt,
    RunReport,
    ServingTimes,
    Skip,
    ThreadTimes,
    Utilization,
    lost_score,
)

RECEIPT = Receipt(
    artifact="out/int8",
    precision="int8",
    baseline="out/float32",
    parity_max_abs_error=0.25,
    parity_relative_error=0.0125,
    agreement=0.99,
    accuracy=0.9889,
    baseline_accuracy=0.9917,
    bytes_on_disk=70_000,
    gzip_bytes=50_000,
    weight_count=1000,
    zero_count=750,
    batch_size=8,
    latency_ms_median=1.25,
    latency_ms_p99=2.5,
    speedup=2.049,
    kernels={"_FusedQuantizedConv2D": 2, "MatMul": 1},
    tensorflow_version="2.21.0",
    device="a processor",
)


def line(receipt, label):
    (found,) = [line for line in str(receipt).splitlines() if line.strip().startswith(label)]
    return found.strip().removeprefix(label).strip()


def test_a_receipt_prints_every_figure():
    assert str(RECEIPT).splitlines()[0] == "out/int8"
    assert line(RECEIPT, "accuracy") == "98.89% (baseline 99.17%)"
    assert line(RECEIPT, "parity (relative error)") == "1.25% on random inputs"
    assert line(RECEIPT, "precision") == "int8 in 2 of 3 products"
    assert line(RECEIPT, "agreement with baseline") == "99.00%"
    assert line(RECEIPT, "bytes on disk") == "70,000"
    assert line(RECEIPT, "zeros") == "750 of 1,000 weights (75.0%)"
    assert line(RECEIPT, "latency") == "1.250 ms median, 2.500 ms p99 (batch 8)"
    assert line(RECEIPT, "speed against baseline") == "2.05x (faster)"
    assert line(RECEIPT, "kernels") == "2 _FusedQuantizedConv2D, 1 MatMul"
    assert line(RECEIPT, "device") == "a processor, TensorFlow 2.21.0"
    assert "problem" not in str(RECEIPT)


@pytest.mark.parametrize(
    ("precision", "kernels", "words"),
    [
        ("float32", {"MatMul": 3}, "float32"),
        ("int8", {"QuantizeV2": 1, "_QuantizedMatMul": 3}, "int8"),
        ("int8", {"_QuantizedMatMul": 1, "Conv2D": 3}, "int8 in 1 of 4 products"),
        ("int8", {"Conv2D": 4}, "float32, weights in int8"),  # the signature serving_float
        ("int8_weight_only", {"Conv2D": 4}, "float32, weights in int8"),
        ("int4_weight_only", {"Conv2D": 4}, "float32, weights in int4"),
        ("float16", {"Conv2D": 4}, "float32, weights in float16"),
    ],
)
def test_what_stores_int8_is_not_called_int8(precision, kernels, words):
    receipt = dataclasses.replace(RECEIPT, precision=precision, kernels=kernels)
    assert receipt.computes == line(receipt, "precision") == words


@pytest.mark.parametrize(
    ("speedup", "verdict"),
    [(0.5, "slower"), (0.949, "slower"), (0.95, "about even"), (1.0, "about even"), (1.05, "faster"), (3, "faster")],
)
def test_slower_is_said_plainly(speedup, verdict):
    receipt = dataclasses.replace(RECEIPT, speedup=speedup)
    assert receipt.verdict == verdict
    assert receipt.speed == f"{speedup:.2f}x ({verdict})"


def test_what_is_unknown_prints_as_unavailable_and_never_as_0():
    receipt = dataclasses.replace(
        RECEIPT, accuracy=None, speedup=None, unavailable={"accuracy": "no labels were given"}
    )
    assert receipt.show("accuracy") == "unavailable (no labels were given)"
    assert line(receipt, "accuracy") == "unavailable (no labels were given)"
    assert line(receipt, "speed against baseline") == "unavailable (not measured)"
    assert receipt.verdict == ""


def test_what_is_zero_is_not_unknown():
    receipt = dataclasses.replace(RECEIPT, accuracy=0.0, zero_count=0)
    assert line(receipt, "accuracy") == "0.00% (baseline 99.17%)"
    assert receipt.sparsity == 0.0


def test_sparsity_of_a_model_without_weights():
    assert dataclasses.replace(RECEIPT, weight_count=0, zero_count=0).sparsity == 0.0


SERVING = ServingTimes(
    device="a processor",
    cores=4,
    calls=(
        ThreadTimes(batch_size=1, threads=(1, 4), latency_ms_median=(7.0, 10.0), best_threads=1),
        ThreadTimes(batch_size=8, threads=(1, 4), latency_ms_median=(40.0, 20.0), best_threads=4),
        ThreadTimes(batch_size=16, threads=(1, 4), latency_ms_median=(80.0, 80.5), best_threads=None),
    ),
    parallel_calls=4,
    parallel_threads=1,
    parallel_examples_per_s=500.0,
    batch_examples_per_s=400.0,
    parallel_speedup=1.25,
    parallel_speedup_range=(1.2, 1.3),
)


def test_a_receipt_says_which_threads_are_best_and_what_to_tell_a_server():
    receipt = dataclasses.replace(RECEIPT, serving=SERVING)
    assert line(receipt, "threads, batch 1 ") == "best on 1: 7.000 ms on 1, 10.000 ms on 4"
    assert line(receipt, "threads, batch 16") == "about even: 80.000 ms on 1, 80.500 ms on 4"
    assert line(receipt, "throughput").startswith(
        "500 examples/s in 4 calls at a time of batch 1 on 1 thread each, 400"
    )
    assert line(receipt, "throughput").endswith("in calls of batch 16 on 4 threads (faster)")
    single, default, many = SERVING.advice
    assert "--tensorflow_intra_op_parallelism=1; in Python tf.config.threading.set_intra_op" in single
    assert default == "batch 8: leave the threads at TensorFlow's default, all cores"
    assert (
        "(--tensorflow_intra_op_parallelism=1 --tensorflow_inter_op_parallelism=4) compute more examples than calls of"
        in many
    )
    assert [SERVING.best_threads(size) for size in (1, 8, 16, 32)] == [1, 4, None, None]
    both = [dataclasses.replace(each, best_threads=1) for each in SERVING.calls[:2]]
    assert dataclasses.replace(SERVING, calls=both).advice[0].startswith("batch 1 and 8: tensorflow_model_server")
    slower = dataclasses.replace(SERVING, parallel_speedup=0.5, parallel_speedup_range=(0.4, 0.6))
    assert slower.advice[-1] == "many requests: join them to batches of 16 (--enable_batching)"
    onnx, openvino, litert = (
        dataclasses.replace(SERVING, format=each).advice for each in ("onnx", "openvino", "litert")
    )
    assert onnx[0] == "batch 1: SessionOptions.intra_op_num_threads = 1"
    assert onnx[1] == "batch 8: leave the threads at ONNX Runtime's default, all cores"
    assert "({'NUM_STREAMS': 4, 'INFERENCE_NUM_THREADS': 4}, and an infer request for each)" in openvino[-1]
    assert litert[0] == "batch 1: leave the threads at LiteRT's default, one thread"
    assert litert[1] == "batch 8: Interpreter(path, num_threads=4)"
    assert "tensorflow" not in " ".join([*onnx, *openvino, *litert]).lower()
    for runtime, form, shown in [("ONNX Runtime 1", "onnx", 3), ("ONNX Runtime 1", "saved_model", 0)]:  # of before
        other = dataclasses.replace(receipt, runtime=runtime, serving=dataclasses.replace(SERVING, format=form))
        assert str(other).count("  advice ") == shown
    assert json.loads(receipt.to_json())["serving"]["calls"][0]["best_threads"] == 1
    assert "threads" not in str(RECEIPT)


def test_problems_make_it_not_ok_and_are_printed():
    receipt = dataclasses.replace(RECEIPT, problems=("outputs differ", "a file is damaged"))
    assert RECEIPT.ok
    assert not receipt.ok
    assert str(receipt).splitlines()[-2:] == ["  problem  outputs differ", "  problem  a file is damaged"]


def test_a_pass_that_changed_nothing_warns_with_the_reasons():
    skips = (Skip(name="a", kind="Dense", reason="too small"), Skip(name="b", kind="Dense", reason="excluded"))
    with pytest.warns(TfoptWarning, match="^prune changed nothing: excluded; too small.$"):
        PassReport(name="prune", skipped=skips).warn_if_unchanged()
    with pytest.warns(TfoptWarning, match="the model has no layer or node that it can change"):
        PassReport(name="prune").warn_if_unchanged()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PassReport(name="prune", changed=(Change(name="a", kind="Dense", detail="zeros"),)).warn_if_unchanged()


def test_a_pass_report_lists_changes_before_skips():
    report = PassReport(
        name="quantize",
        changed=[Change(name="conv", kind="Conv2D", detail="int8")],
        skipped=[Skip(name="head", kind="MatMul", reason="excluded")],
        metrics={"sparsity": 0.75},
    )
    assert str(report).splitlines() == [
        "quantize: 1 changed, 1 skipped, sparsity 0.75",
        "  changed  conv (Conv2D): int8",
        "  skipped  head (MatMul): excluded",
    ]


def test_a_run_report_serialises_whole():
    report = RunReport(
        recipe="mine",
        description="",
        created="2026-01-01T00:00:00+00:00",
        environment={"Python": "3.11"},
        plan=(Decision(setting="precision", value="float32", reason="no GPU"),),
        phases=[Phase(name="train", history={"loss": [1.0, 0.5]})],
        utilization=Utilization(source="psutil", seconds=[0.0], series={"cpu_percent": [None]}),
        passes=[PassReport(name="prune")],
        receipts={"int8": RECEIPT},
    )
    values = json.loads(report.to_json())
    assert values["plan"] == [{"setting": "precision", "value": "float32", "reason": "no GPU"}]
    assert values["phases"][0]["history"]["loss"] == [1.0, 0.5]
    assert values["utilization"]["series"]["cpu_percent"] == [None]
    assert values["receipts"]["int8"]["kernels"] == {"_FusedQuantizedConv2D": 2, "MatMul": 1}
    assert Receipt(**values["receipts"]["int8"]) == dataclasses.replace(RECEIPT, notes=[], problems=[])


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECEIPT.accuracy = 1.0


def test_write_text_replaces_a_file_and_leaves_nothing_else(tmp_path):
    file = tmp_path / "receipts.json"
    for text in ("first", "zweite Fassung: äöü €"):
        write_text(file, text)
        assert file.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [file]


def test_write_text_keeps_what_was_there_when_writing_fails(tmp_path):
    file = tmp_path / "receipts.json"
    write_text(file, "first")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "\ud800")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(ExportError, match=r"receipts.json .*it takes 101 bytes. Make room"):
            write_text(file, 101 * "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]


def test_write_text_from_several_threads(tmp_path):
    file = tmp_path / "receipts.json"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: write_text(file, 10_000 * str(number % 10)), range(100)))
    assert len(set(file.read_text())) == 1
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("speedup", "rounds", "verdict"),
    [
        (1.3, (1.1, 1.6), "faster"),
        (1.3, (0.9, 1.6), "about even"),
        (0.8, (0.7, 0.9), "slower"),
        (0.8, (0.7, 1.1), "about even"),
        (1.02, (1.01, 1.03), "about even"),
        (None, None, ""),
    ],
)
def test_a_verdict_needs_a_difference_that_every_round_showed(speedup, rounds, verdict):
    receipt = dataclasses.replace(RECEIPT, speedup=speedup, speedup_range=rounds)
    assert receipt.verdict == verdict
    assert ("the rounds disagree" in receipt.speed) == (speedup in (1.3, 0.8) and verdict == "about even")


@pytest.mark.parametrize(("error", "is_lost"), [(202.0, False), (202.1, True), (100.0, False)])
def test_a_loss_of_another_score_counts_in_per_cent(error, is_lost):
    scored = {"accuracy": None, "baseline_accuracy": None, "higher_is_better": False}
    before, after = (
        dataclasses.replace(RECEIPT, scores={"mean_absolute_error": value}, **scored) for value in (200.0, error)
    )
    assert lost_score("mean_absolute_error", before, after) == is_lost
