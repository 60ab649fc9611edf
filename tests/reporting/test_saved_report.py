"""Reports that are saved and read back, and the comparison of several."""

import json
from dataclasses import replace

import pytest
from test_html_page import Page, sample_report

from tfopt.atomic.checked_json import CHECKSUM, with_checksum
from tfopt.cli import main
from tfopt.data.measurement.report import InputReport, StageSpeed
from tfopt.errors import ArtifactError, ConfigError
from tfopt.report import Decision, Diagnosis, DiagnosisReport, OperatorTime, StepBreakdown, TraceSummary, Utilization
from tfopt.reporting.comparison import compare
from tfopt.reporting.saved_report import load_report, save_report

BREAKDOWN = StepBreakdown(step_ms=10, input_ms=6, host_ms=1, compute_ms=3, steps=100, batch_size=32)
TRACE = TraceSummary(
    directory="traces/a",
    steps=5,
    span_ms=50,
    idle_share=0.6,
    tensor_core_share=0.4,
    copy_ms_per_step=0.5,
    operators=[
        OperatorTime(
            name="sm80_gemm<float>",
            kind="MatMul",
            ms_per_step=2,
            share=1,
            calls_per_step=4,
            on_device=True,
            tensor_cores=True,
        )
    ],
)
DIAGNOSIS = DiagnosisReport(
    name="mlp",
    breakdown=BREAKDOWN,
    diagnoses=[
        Diagnosis(
            cause="slow_map",
            title="The input is slow",
            evidence="It waits 6 ms.",
            gain=0.6,
            advice="dataset.prefetch(2)",
            settings={"data.prefetch": "2"},
            source="the guide",
        )
    ],
    absent={"retraces": "none"},
    unchecked={"throttled": "no GPU"},
    trace=TRACE,
)
LOAD = Utilization(
    source="NVML", seconds=[0, 1], series={"gpu0_power_watts": [300, None], "gpu0_energy_joules": [5, 305]}
)


def full_report():
    stage = StageSpeed(name="map", examples_per_second=10, batch_ms=2)
    speed = InputReport(
        stages=[stage], examples_per_second=10, batch_ms=2, first_batch_ms=3, batches_per_epoch=None, slowest="map"
    )
    return replace(sample_report(), input=speed, diagnosis=DIAGNOSIS)


def test_a_report_comes_back_whole(tmp_path):
    saved = full_report()
    assert save_report(saved, tmp_path).name == "report.json"
    loaded = load_report(tmp_path)
    assert json.loads(loaded.to_json()) == json.loads(saved.to_json())
    assert isinstance(loaded.input, InputReport)
    assert loaded.receipts["int8"].speed == saved.receipts["int8"].speed
    assert loaded.diagnosis.breakdown == BREAKDOWN


def test_files_of_other_versions_are_read(tmp_path):
    path = save_report(full_report(), tmp_path)
    values = json.loads(path.read_text())
    values["new_in_some_later_version"] = {"a": 1}
    values["diagnosis"]["breakdown"]["new_too"] = 2
    del values["task"], values["diagnosis"]["trace"], values["diagnosis"]["breakdown"]["traces"]
    path.write_text(json.dumps(with_checksum(values)))
    loaded = load_report(tmp_path)
    assert (loaded.task, loaded.diagnosis.trace, loaded.diagnosis.breakdown.traces) == ("classification", None, 0)


def test_a_report_edited_by_hand_is_not_believed(tmp_path):
    path = save_report(full_report(), tmp_path)
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"task": "regression"}))
    with pytest.raises(ArtifactError, match=r"report.json \(its checksum does not match"):
        load_report(tmp_path)
    del values[CHECKSUM]  # as earlier versions wrote it
    path.write_text(json.dumps(values))
    assert load_report(tmp_path).task == "classification"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "Expecting value"),
        ('{"recipe": "a"', "Expecting ',' delimiter"),
        ("[]", "the whole file: "),
        ('{"recipe": "a"}', "description: Field required"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_broken_file_is_named_with_the_reason(content, reason, tmp_path):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(ArtifactError) as raised:
        load_report(tmp_path)
    assert "report.json" in str(raised.value)
    assert reason in str(raised.value)
    assert main(["report", str(tmp_path)]) == 2


def test_a_directory_without_a_report_is_an_error(tmp_path):
    with pytest.raises(ArtifactError, match=r"report\.json, diagnosis\.json or utilization\.json"):
        load_report(tmp_path)


def test_a_diagnosis_alone_and_a_timeline_alone_have_a_page(tmp_path):
    (tmp_path / "watched").mkdir()
    save_report(DIAGNOSIS, tmp_path)
    save_report(LOAD, tmp_path / "watched")
    assert main(["report", str(tmp_path)]) == 0
    page = Page((tmp_path / "report.html").read_text())
    assert "mlp" in page.text
    assert "Utilization" not in page.text
    assert "Artifacts" not in page.text
    assert main(["report", str(tmp_path / "watched")]) == 0
    page = Page((tmp_path / "watched" / "report.html").read_text())
    assert "watched" in page.text
    assert page.attributes("aria-label") == [
        "Watts over time: gpu0 power mean 300",
        "Joules over time: gpu0 energy total 300",
    ]


def test_a_diagnosis_beside_a_run_belongs_to_it(tmp_path):
    save_report(sample_report(), tmp_path)
    save_report(DIAGNOSIS, tmp_path)
    loaded = load_report(tmp_path)
    assert (loaded.recipe, loaded.diagnosis.name) == ("digits_cnn", "mlp")


def test_the_json_of_one_report_is_the_report(tmp_path, capsys):
    save_report(full_report(), tmp_path)
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(full_report().to_json())
    assert not (tmp_path / "report.html").exists()


@pytest.fixture
def two_runs():
    first = full_report()
    plan = (Decision(setting="precision", value="mixed_bfloat16", reason="a GPU"), *first.plan[1:])
    faster = replace(BREAKDOWN, step_ms=5, input_ms=1)
    phases = [replace(phase, step_time_ms=8.0) for phase in first.phases]
    second = replace(
        first,
        plan=plan,
        phases=[replace(phase, step_time_ms=4.0) for phase in phases],
        diagnosis=replace(DIAGNOSIS, breakdown=faster),
        utilization=LOAD,
        receipts={"float32": replace(first.receipts["float32"], bytes_on_disk=125_206, accuracy=0.99)},
    )
    return {"first": replace(first, phases=phases), "second": second}


def test_runs_are_compared_figure_by_figure(two_runs):
    found = compare(two_runs)
    assert found.plan == {"precision": ["float32", "mixed_bfloat16"]}
    assert found.step_time_ms["train"] == [8, 4]
    assert [each.step_ms for each in found.breakdowns] == [10, 5]
    assert found.scores["float32 accuracy"] == [0.9917, 0.99]
    assert found.bytes_on_disk == {"float32": [250_412, 125_206], "pruned": [250_412, None], "int8": [70_112, None]}
    assert found.utilization["gpu0_power_watts"] == [None, 300]
    assert found.utilization["gpu0_energy_joules"] == [None, 300]
    assert found.utilization["process_memory_bytes"][0] == pytest.approx(6e8 + 4e6 * 59 / 2)


def test_the_command_writes_the_comparison(two_runs, tmp_path, capsys):
    for name, report in two_runs.items():
        (tmp_path / name).mkdir()
        save_report(report, tmp_path / name)
    directories, out = [str(tmp_path / name) for name in two_runs], tmp_path / "both.html"
    assert main(["report", *directories, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == ["first", "second"]
    page = Page(out.read_text())
    assert page.row("whole step") == ["10 ms", "5 ms-50%"]
    assert page.row("phase train, median step") == ["8 ms", "4 ms-50%"]
    assert page.row("float32") == ["250 kB", "125 kB-50%"]
    assert page.row("float32, accuracy") == ["99.17%", "99.00%"]
    assert page.row("precision") == ["float32", "mixed_bfloat16"]
    assert page.row("gpu0 power watts") == ["\N{EN DASH}", "300"]
    assert [label.split(":")[0] for label in page.attributes("aria-label")] == ["Milliseconds per step"]
    assert "://" not in page.source
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "at least one directory"),
        (["{0}", "{0}"], "given once"),
        (["{0}", "--out", "no/such/a.html"], "Make no/such"),
    ],
)
def test_wrong_words_are_refused(words, message, tmp_path, capsys):
    save_report(DIAGNOSIS, tmp_path)
    assert main(["report", *(word.format(tmp_path) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_one_run_is_no_comparison():
    with pytest.raises(ConfigError, match=r"at least two runs\. Received: 1"):
        compare({"one": sample_report()})
