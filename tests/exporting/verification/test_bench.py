"""Models side by side: what is measured of each, which are named, and what is said of those that cannot be measured."""

import collections
import json
import os
import tracemalloc
from pathlib import Path

import keras
import numpy as np
import onnx
import pydantic
import pytest
import tensorflow as tf
from keras import layers
from public_interface import without_words

from tfopt import benchmark
from tfopt.cli import main
from tfopt.errors import ArtifactError, ConfigError
from tfopt.exporting import ExportConfig, export, inspect
from tfopt.exporting.manifest import TensorRecord
from tfopt.exporting.onnx import external
from tfopt.exporting.verification import litert_only, onnxruntime_only
from tfopt.exporting.verification.candidate import Candidate
from tfopt.exporting.verification.inputs import drawn_from
from tfopt.exporting.verification.process import RuntimeProcess
from tfopt.exporting.verification.sizes import bytes_on_disk, gzip_bytes
from tfopt.report import BenchmarkReport
from tfopt.reporting.benchmark_page import write_benchmark_html

X = np.random.default_rng(0).normal(size=(48, 32)).astype("float32")
SCHEMA = Path(__file__).parents[3] / "docs" / "bench_schema.json"


def classifier(units):
    model = keras.Sequential([keras.Input((32,), name="row"), *(layers.Dense(each) for each in units), layers.Dense(4)])
    model.name = f"units_{'_'.join(map(str, units))}"
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A small classifier in four forms, one of 100 times the size, and the labels that the small one finds."""
    keras.utils.set_random_seed(0)
    directory = tmp_path_factory.mktemp("bench")
    small, large = classifier([16]), classifier([1024, 1024])
    small.save(directory / "small.keras")
    export(small, directory / "saved_model")
    export(small, directory / "small", ExportConfig(format="onnx"))
    export(large, directory / "large", ExportConfig(format="onnx"))
    (directory / "foreign.onnx").write_bytes((directory / "small" / "model.onnx").read_bytes())
    np.savez(directory / "xy.npz", x=X, y=np.asarray(small(X)).argmax(axis=1))
    (directory / "text.onnx").write_text("not a model")
    (directory / "empty").mkdir()
    return directory


@pytest.fixture(scope="module", autouse=True)
def _no_pauses():
    """Threads that spin after their turn do not matter to what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tfopt.exporting.verification.bench.PAUSE_S", 0.0)
        yield


@pytest.fixture(scope="module")
def report(models):
    paths = [models / name for name in ("large", "saved_model", "small.keras", "foreign.onnx", "text.onnx")]
    labels = np.load(models / "xy.npz")["y"]
    return benchmark(
        paths,
        batch_sizes=(1, 4),
        threads=(1,),
        data=(X, labels),
        baseline=models / "saved_model",
        gate=0.99,
        seconds=0.01,
    )


def row(report, name):
    return next(each for each in report.models if each.name == name)


def test_the_figures_of_each_model(models, report):
    assert [each.name for each in report.models] == ["large", "saved_model", "small.keras", "foreign.onnx", "text.onnx"]
    assert [each.format for each in report.measured] == ["onnx", "saved_model", "keras", "onnx"]
    assert [each.precision for each in report.measured] == ["float32", "float32", None, None]
    assert row(report, "foreign.onnx").bytes_on_disk == (models / "foreign.onnx").stat().st_size
    assert row(report, "large").bytes_on_disk > 4 * 1024 * 1024
    for each in report.measured:
        assert [(times.batch_size, times.threads) for times in each.times] == [(1, 1), (4, 1)]
        assert each.runtime.startswith("TensorFlow" if each.format in ("saved_model", "keras") else "ONNX Runtime")
        assert None not in (each.load_ms, each.first_call_ms, each.memory_peak_bytes)
        assert each.gzip_bytes > 0
        for times in each.times:
            assert len(times.round_ms) == report.rounds == 9
            assert times.calls >= 27
            assert 0 < times.latency_ms_median <= times.latency_ms_p90 <= times.latency_ms_p99


def test_scores_are_compared_with_the_baseline_and_the_gate_names_no_worse_model(report):
    for name in ("saved_model", "small.keras", "foreign.onnx"):
        assert (row(report, name).scores, row(report, name).score_share) == ({"accuracy": 1.0}, 1.0)
    share = row(report, "large").scores["accuracy"]
    assert share == row(report, "large").score_share
    assert 0 < share < 0.9
    assert report.baseline == "saved_model"
    assert not report.reaches_gate(row(report, "large"))
    assert report.smallest == "foreign.onnx"


def test_the_fastest_is_the_one_of_a_hundredth_of_the_size(report):
    """TensorFlow takes several times as long for a call as ONNX Runtime does for the whole small model."""
    assert [each.model for each in report.fastest] == ["foreign.onnx", "foreign.onnx"]
    assert report.fastest[0].threads == 1


def test_a_failure_is_a_row_and_the_others_go_on(report):
    failed = row(report, "text.onnx")
    assert failed.failure.startswith("The ONNX file cannot be served. Received: ")
    assert (failed.times, failed.bytes_on_disk) == ((), None)
    assert not report.ok
    assert len(report.measured) == 4


def test_the_text_fits_100_columns_and_names_everything(report):
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(str(report).split())
    assert "fastest, batch 4 foreign.onnx on 1 thread" in text
    assert "gate 99% of the score of saved_model" in text
    assert "% below" in text
    assert "problem text.onnx: The ONNX file cannot be served." in text


def test_the_json_is_as_documented(report):
    adapter = pydantic.TypeAdapter(BenchmarkReport)
    schema = json.loads(json.dumps(adapter.json_schema()), object_hook=without_words)
    assert json.loads(SCHEMA.read_text()) == schema, f"Write this to {SCHEMA}:\n{json.dumps(schema, indent=2)}"
    assert adapter.validate_json(report.to_json(), strict=True) == report


def test_the_page_has_a_plot_for_each_figure_and_every_problem(report, tmp_path):
    page = write_benchmark_html(report, tmp_path / "bench.html").read_text()
    for title in ("Median latency, batch 1", "Throughput, batch 4", "Size on disk", "Accuracy"):
        assert f"<strong>{title}</strong>" in page
    assert page.count("<svg") == 6
    assert "text.onnx</strong>: The ONNX file cannot be served" in page


def test_the_command_says_which_models_failed_and_why(models, capfd, monkeypatch):
    monkeypatch.chdir(models)
    Path("both").mkdir(exist_ok=True)
    for name in ("model.onnx", "model.tflite"):
        Path("both", name).touch()
    code = main(["bench", "small", "text.onnx", "empty", "both", "--seconds", "0", "--json"])
    found = {each["name"]: each["failure"] for each in json.loads(capfd.readouterr().out)["models"]}
    assert code == 1
    assert found["small"] == ""
    assert found["empty"].startswith("A model must be the directory of an artifact or a SavedModel, or a file with ")
    assert found["both"].startswith("A directory must hold one model. Received: both with model.onnx, model.tflite.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "A model must exist. Received: nowhere"),
        (["small", "nowhere"], "A model must exist. Received: nowhere"),
        (["text.onnx"], "At least one model must run. Received: 1 that cannot be measured. text.onnx: The ONNX file"),
        (["empty"], "At least one model must run. Received: 1 that cannot be measured. empty: A model must be"),
        (["xy.npz"], "At least one model must run. Received: 1 that cannot be measured. xy.npz: A model must be"),
        ([], "models must be at least one path."),
        (["small", "--gate", "99%"], "gate needs labelled examples. Received: gate=0.99 without data."),
        (["small", "--gate", "much"], "gate must be a share of the baseline's score. Received: gate='much'."),
        (["small", "--data", "xy.npz", "--gate", "99.9"], "Received: gate='99.9'. Write 99.9%, or a number up to 1."),
        (["small", "--data", "xy.npz", "--gate", "-1"], "gate must be in (0, 1] or None. Received: gate=-1.0."),
        (["small", "--baseline", "large"], "baseline must be one of the models. Received: baseline='large'."),
        (["small", "--html", "no/page.html"], "html must lie in an existing directory."),
        (["small", "--html", "text.onnx"], "A file may be replaced only if tfopt wrote it."),
        (["small", "--batch-sizes", "0"], "batch_sizes must be a tuple of whole numbers of at least 1 and not empty."),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(models, words, message, capfd, monkeypatch):
    monkeypatch.chdir(models)
    assert main(["bench", *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line


def test_a_damaged_artifact_is_refused_before_it_runs(models, tmp_path):
    copied = tmp_path / "small"
    copied.mkdir()
    for file in (models / "small").iterdir():
        content = bytearray(file.read_bytes())
        if file.suffix == ".onnx":
            content[len(content) // 2] ^= 1
        (copied / file.name).write_bytes(content)
    with pytest.raises(ArtifactError, match=r"must be as it was written. Received: .*model.onnx, which has changed"):
        benchmark([copied], seconds=0)


def test_models_that_reach_outside_are_refused_unless_trusted(tmp_path):
    (tmp_path / "words.txt").write_text("7")

    class Reads(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None, 2))])
        def serve(self, x):
            return {"y": x + tf.strings.to_number(tf.io.read_file(str(tmp_path / "words.txt")))}

    module = Reads()
    tf.saved_model.save(module, tmp_path / "reads", signatures={"serving_default": module.serve})
    coded = keras.Sequential([keras.Input((2,)), layers.Lambda(lambda x: x + 1)])
    coded.save(tmp_path / "coded.keras")
    paths = [tmp_path / "reads", tmp_path / "coded.keras"]
    with pytest.raises(ArtifactError, match=r"ReadFile at .* touches files.*A .keras file must hold no code"):
        benchmark(paths, seconds=0)
    assert benchmark(paths, seconds=0, trusted=True).ok


def test_a_model_that_fails_in_a_later_round_leaves_the_others(models, monkeypatch):
    time_calls, turns = RuntimeProcess.time_calls, []

    def failing(process, *arguments):
        turns.append(process.path.name)
        if process.path.name == "large" and turns.count("large") == 3:
            raise ArtifactError("It has crashed.")
        return time_calls(process, *arguments)

    monkeypatch.setattr(RuntimeProcess, "time_calls", failing)
    found = benchmark([models / "small", models / "large"], seconds=0)
    assert turns[:6] == ["small", "large", "large", "small", "small", "large"]  # in turns, forwards and backwards
    assert turns.count("large") == 3
    assert turns.count("small") == 9
    assert [each.failure for each in found.models] == ["", "It has crashed."]
    assert [each.model for each in found.fastest] == ["small"]


@pytest.mark.parametrize(("seconds", "rounds", "fastest"), [(0, 9, None), (0.1, 27, "small")])
def test_models_that_nine_rounds_leave_undecided_have_more(seconds, rounds, fastest, models, monkeypatch):
    taken = collections.Counter()

    def beside_other_work(process, *_):
        name = process.path.name
        taken[name] += 1
        disturbed = name == "small" and taken[name] in (3, 6, 9)
        return [13.0] if disturbed else [{"small": 10.0, "foreign.onnx": 12.0, "large": 30.0}[name]]

    monkeypatch.setattr(RuntimeProcess, "time_calls", beside_other_work)
    found = benchmark([models / "large", models / "foreign.onnx", models / "small"], seconds=seconds)
    assert taken == {"small": rounds, "foreign.onnx": rounds, "large": 9}
    assert [len(each.times[0].round_ms) for each in found.models] == [9, rounds, rounds]
    assert found.fastest[0].model == fastest


def test_each_number_of_threads_has_a_process_and_given_inputs_reach_it(models, monkeypatch):
    seen, time_calls = [], RuntimeProcess.time_calls

    def kept(process, inputs, *arguments):
        seen.append((process.threads, inputs))
        return time_calls(process, inputs, *arguments)

    monkeypatch.setattr(RuntimeProcess, "time_calls", kept)
    found = benchmark([models / "foreign.onnx"], threads=(0, 1, 10**6), batch_sizes=(3,), inputs=X[:2], seconds=0)
    assert found.threads[:2] == (0, 1)
    assert found.threads[-1] == found.cores
    assert {threads for threads, _ in seen} == {count or None for count in found.threads}
    for _, inputs in seen:
        np.testing.assert_array_equal(inputs["row"], X[[0, 1, 0]])
    with pytest.raises(ArtifactError, match=r"inputs must be those that the model takes, row float32 \[None, 32\]"):
        benchmark([models / "foreign.onnx"], inputs=X[:, :5], seconds=0)


def candidate(**specs):
    found = Candidate(Path("model"), "model", False)
    found.specs = {name: TensorRecord(shape=shape, dtype=dtype) for name, (shape, dtype) in specs.items()}
    return found


def test_a_foreign_model_gets_the_inputs_of_another_that_has_such(models):
    first = candidate(ids=((None, None), "int32"), image=((None, 8, 8, 3), "uint8"))
    first.choose_inputs([], {}, None)
    assert first.check.shapes == {"ids": (1, 64), "image": (1, 8, 8, 3)}
    assert first.check.ranges == {"ids": (0.0, 1.0), "image": (0.0, 255.0)}
    same = candidate(a=((None, 8, 8, 3), "int8"), b=((None, 64), "int64"))
    same.choose_inputs([first], {}, None)
    assert same.check.shapes == {"b": (1, 64), "a": (1, 8, 8, 3)}
    assert same.check.ranges["a"] == (0.0, 255.0)
    other = candidate(b=((None, None), "float32"))
    other.choose_inputs([first, same], {}, 9)
    assert other.check.shapes == {"b": (1, 9)}


def test_inputs_cannot_be_drawn_of_strings_or_without_a_rank():
    own, none = "Pass inputs", "Give it an axis for the examples"
    for shape, dtype, remedy in (((None,), "string", own), (None, "float32", own), ((), "float32", none)):
        spec = TensorRecord(shape=shape, dtype=dtype)
        with pytest.raises(
            ArtifactError, match=rf"Inputs can be drawn of numbers in a known rank of at least 1.*{remedy}"
        ):
            drawn_from({"x": spec})


def test_inputs_that_no_memory_holds_are_the_failure_of_their_model():
    for sizes, kind in (((2**30, 2**20), "MemoryError"), ((2**40, 2**40), "ValueError")):
        large = candidate(x=((None, *sizes), "float32"))
        with large.noting_failure():
            large.choose_inputs([], {}, None)
            large.make_batches((1,))
        assert kind in large.failure


def test_weights_beside_an_onnx_file_are_part_of_it(models, tmp_path):
    file = tmp_path / "weights_beside.onnx"
    model = onnx.load(models / "foreign.onnx")
    onnx.save(model, file, save_as_external_data=True, location="weights.data", size_threshold=0)
    found = benchmark([file], batch_sizes=(2,), seconds=0).models[0]
    assert not found.failure
    assert found.bytes_on_disk == file.stat().st_size + (tmp_path / "weights.data").stat().st_size
    assert inspect(file).bytes_on_disk == found.bytes_on_disk
    assert not inspect(file).outside


def test_weights_behind_the_links_of_a_cache_are_part_of_a_model(models, tmp_path):
    """A cache of Hugging Face: snapshots/REVISION/FILE links to ../../blobs/HASH, as do the weights."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    model = onnx.load(models / "foreign.onnx")
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    for number, name in enumerate(("model.onnx", "model.onnx_data")):
        (tmp_path / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(Path("..", "..", "blobs", str(number)))
    with RuntimeProcess(snapshot / "model.onnx") as process, RuntimeProcess(models / "foreign.onnx") as plain:
        np.testing.assert_array_equal(*(each.predict({"row": X})["output_0"] for each in (process, plain)))
    size = sum(each.stat().st_size for each in blobs.iterdir())
    assert bytes_on_disk(snapshot / "model.onnx") == size
    assert gzip_bytes(snapshot / "model.onnx") > size / 2  # of weights, not of links
    assert not inspect(snapshot / "model.onnx").outside


@pytest.mark.parametrize("lies_beside", [external.lies_beside, onnxruntime_only.lies_beside])
def test_a_directory_holds_no_weights_of_a_linked_model(lies_beside, tmp_path):
    (tmp_path / "one" / "two").mkdir(parents=True)
    (tmp_path / "model.onnx").touch()
    for directory, location in ((tmp_path / "one", ""), (tmp_path / "one" / "two", "..")):
        (directory / "model.onnx").symlink_to(tmp_path / "model.onnx")
        assert not lies_beside(directory / "model.onnx", location)
        assert lies_beside(directory / "model.onnx", "data")


def test_packing_a_model_holds_no_archive_in_memory(tmp_path):
    (tmp_path / "model.tflite").write_bytes(np.random.default_rng(0).bytes(2**23))
    tracemalloc.start()
    try:
        size = gzip_bytes(tmp_path / "model.tflite")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**21 < 2**23 < size


def test_a_model_that_vanishes_is_a_row_and_the_others_go_on(models, tmp_path):
    (tmp_path / "gone.onnx").write_bytes((models / "foreign.onnx").read_bytes())

    def remove(words):
        if words.startswith("timing"):
            (tmp_path / "gone.onnx").unlink()

    found = benchmark([tmp_path / "gone.onnx", models / "foreign.onnx"], seconds=0, on_step=remove)
    assert row(found, "gone.onnx").failure.startswith("The files of a model must stay until it is measured.")
    assert [each.name for each in found.measured] == ["foreign.onnx"]


def test_an_output_may_hold_strings_and_no_maps(tmp_path):
    x = onnx.helper.make_tensor_value_info("x", 1, [None, 2])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.STRING, [None])
    names = onnx.helper.make_tensor("names", onnx.TensorProto.STRING, [2], [b"red", "grün".encode()])
    best = onnx.helper.make_node("ArgMax", ["x"], ["i"], axis=1, keepdims=0)
    strings = onnx.helper.make_graph(
        [best, onnx.helper.make_node("Gather", ["names", "i"], ["y"])], "s", [x], [y], [names]
    )
    entry = onnx.helper.make_map_type_proto(onnx.TensorProto.INT64, onnx.helper.make_tensor_type_proto(1, None))
    many = onnx.helper.make_value_info("y", onnx.helper.make_sequence_type_proto(entry))
    zipped = onnx.helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    maps = onnx.helper.make_graph([zipped], "maps", [x], [many])
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("ai.onnx.ml", 1)]
    given = {"x": np.array([[1, 2], [2, 1]], np.float32)}
    for graph in (strings, maps):
        onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / f"{graph.name}.onnx")
    with RuntimeProcess(tmp_path / "s.onnx") as process:
        assert [each.decode() for each in process.predict(given)["y"]] == ["grün", "red"]
    refused = pytest.raises(ArtifactError, match="its outputs must be tensors of numbers or strings")
    with RuntimeProcess(tmp_path / "maps.onnx") as process, refused:
        process.predict(given)


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "*/_ORT_MEM_ADDR_/*", "..", "", "link"])
def test_tensors_of_other_directories_are_never_read(location, tmp_path):
    (tmp_path / "secret").write_bytes(b"1234")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "link").symlink_to(tmp_path / "secret")
    tensor = onnx.TensorProto(name="t", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    constant = onnx.helper.make_node("Constant", [], ["y"], value=tensor)
    held = onnx.helper.make_node("Identity", ["t"], ["y"])
    y = onnx.helper.make_tensor_value_info("y", 1, [1])
    bodies = (([held], [tensor]), ([constant], []))  # as an initializer, and as an attribute
    for nodes, tensors in bodies:
        body = onnx.helper.make_graph(nodes, "body", [], [y], tensors)
        choice = onnx.helper.make_node("If", ["b"], ["y"], then_branch=body, else_branch=body)
        b = onnx.helper.make_tensor_value_info("b", 9, [])
        for graph in (body, onnx.helper.make_graph([choice], "outer", [b], [y])):
            onnx.save(onnx.helper.make_model(graph), inner / "model.onnx")
            with pytest.raises(ValueError, match="its weights must be in the file itself or in one beside it, and t "):
                onnxruntime_only.Runtime().load(str(inner / "model.onnx"))
            assert inspect(inner / "model.onnx").outside == (f"weights of {location!r} touch files",)


def test_litert_has_the_cores_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    assert litert_only.cores() == 1


def test_a_fixed_batch_size_is_the_only_one(tmp_path):
    module = tf.Module()
    module.serve = tf.function(lambda x: {"y": 2 * x}, input_signature=[tf.TensorSpec((2, 3))])
    tf.saved_model.save(module, tmp_path / "two", signatures={"serving_default": module.serve})
    found = benchmark([tmp_path / "two"], batch_sizes=(1, 2), seconds=0)
    assert found.models[0].skipped == {1: "its batch size is fixed to 2"}
    assert pydantic.TypeAdapter(BenchmarkReport).validate_json(found.to_json(), strict=True) == found
    assert [each.batch_size for each in found.models[0].times] == [2]
    with pytest.raises(ArtifactError, match="Add 2 to batch_sizes"):
        benchmark([tmp_path / "two"], seconds=0)


def test_a_warning_says_that_inputs_differ_or_that_results_are_wrong_here(models, tmp_path, monkeypatch):
    inputs = keras.Input((None, 5), name="row")
    mean = layers.GlobalAveragePooling1D()(inputs)
    export(keras.Model(inputs, layers.Dense(1)(mean)), tmp_path / "other", ExportConfig(format="onnx"))
    monkeypatch.setattr("tfopt.exporting.verification.bench.missing_instructions", lambda *given: "It needs VNNI.")
    found = benchmark([models / "foreign.onnx", tmp_path / "other"], seconds=0, open_size=7)
    assert "other was timed on inputs of the shape (None, 7, 5), and foreign.onnx on (None, 32)" in found.warnings
    assert len([each for each in found.warnings if "pass open_size (--open-size)" in each]) == 1
    assert "other: It needs VNNI." in found.warnings
    assert len([each for each in found.warnings if "VNNI" in each]) == 1  # no manifest says what the other one needs


def test_an_open_rank_needs_given_inputs_and_nan_is_told(tmp_path):
    x, y = (onnx.helper.make_tensor_value_info(name, 1, None) for name in "xy")
    nodes = [onnx.helper.make_node("Sqrt", ["x"], ["y"])]
    graph = onnx.helper.make_graph(nodes, "root", [x], [y])
    opset = onnx.helper.make_opsetid("", 18)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9), tmp_path / "root.onnx")
    with pytest.raises(ArtifactError, match=r"known rank of at least 1.*Pass inputs"):
        benchmark([tmp_path / "root.onnx"], seconds=0)
    found = benchmark([tmp_path / "root.onnx"], inputs=np.full((1, 3), -1, np.float32), seconds=0)
    assert found.ok
    assert found.warnings == ("root.onnx: its outputs hold NaN on the inputs of the timed calls",)


def test_a_model_without_inputs_cannot_be_measured():
    with pytest.raises(ArtifactError, match="must have an input"):
        candidate().choose_inputs([], {}, None)


def test_a_gate_that_nothing_can_reach_is_told(models):
    wrong = (np.load(models / "xy.npz")["y"] + 1) % 4  # the baseline is never right
    found = benchmark([models / "foreign.onnx"], data=(X, wrong), gate=0.99, seconds=0)
    assert found.warnings == ("no model can reach the gate: the baseline, foreign.onnx, has no score above 0",)
    assert not found.ok


def test_examples_of_different_numbers_are_no_inputs(models):
    with pytest.raises(ConfigError, match="inputs must be an array, or arrays by the name of the input"):
        benchmark([models / "small"], inputs={"a": np.zeros(3), "b": np.zeros(2)})
