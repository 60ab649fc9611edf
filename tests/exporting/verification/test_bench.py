"""Models side by side: what is measured of each, which are named, and what is said of those that cannot be measured."""

import json
from pathlib import Path

import keras
import numpy as np
import pydantic
import pytest
import tensorflow as tf
from keras import layers
from public_interface import without_words

from tfopt import benchmark
from tfopt.cli import main
from tfopt.errors import ArtifactError, ConfigError
from tfopt.exporting import ExportConfig, export
from tfopt.exporting.manifest import TensorRecord
from tfopt.exporting.verification.candidate import Candidate
from tfopt.exporting.verification.inputs import drawn_from
from tfopt.exporting.verification.process import RuntimeProcess
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
    code = main(["bench", "small", "text.onnx", "empty", "--seconds", "0", "--json"])
    found = {each["name"]: each["failure"] for each in json.loads(capfd.readouterr().out)["models"]}
    assert code == 1
    assert found["small"] == ""
    assert found["empty"].startswith("A model must be the directory of an artifact or a SavedModel, or a file with ")


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
        (["small", "--data", "xy.npz", "--gate", "99"], "gate must be in (0, 1] or None. Received: gate=99.0."),
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
    for shape, dtype in (((None,), "string"), (None, "float32"), ((), "float32")):
        spec = TensorRecord(shape=shape, dtype=dtype)
        with pytest.raises(ArtifactError, match="Inputs can be drawn of numbers in a known rank of at least 1"):
            drawn_from({"x": spec})


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
    inputs = keras.Input((5,), name="row")
    export(keras.Model(inputs, layers.Dense(1)(inputs)), tmp_path / "other", ExportConfig(format="onnx"))
    monkeypatch.setattr("tfopt.exporting.verification.bench.missing_instructions", lambda *given: "It needs VNNI.")
    found = benchmark([models / "foreign.onnx", tmp_path / "other"], seconds=0)
    assert "other was timed on inputs of the shape (None, 5), and foreign.onnx on (None, 32)" in found.warnings
    assert "other: It needs VNNI." in found.warnings
    assert len([each for each in found.warnings if "VNNI" in each]) == 1  # no manifest says what the other one needs


def test_examples_of_different_numbers_are_no_inputs(models):
    with pytest.raises(ConfigError, match="inputs must be an array, or arrays by the name of the input"):
        benchmark([models / "small"], inputs={"a": np.zeros(3), "b": np.zeros(2)})
