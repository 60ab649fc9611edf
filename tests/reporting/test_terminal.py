"""The terminal's tables, rendered to text and read back."""

from dataclasses import replace

import pytest
from rich.console import Console

from tfopt.report import Change, Decision, PassReport, Receipt, Skip
from tfopt.reporting.receipts import ReceiptsTable
from tfopt.reporting.terminal import PlanTable, pass_summary

FLOAT32 = Receipt(
    artifact="out/float32",
    precision="float32",
    accuracy=0.9917,
    bytes_on_disk=250_000,
    gzip_bytes=200_000,
    weight_count=1000,
    zero_count=0,
    batch_size=8,
    latency_ms_median=1.0,
    latency_ms_p99=2.0,
    tensorflow_version="2.21.0",
    device="cpu",
    unavailable={"speedup": "it is the baseline"},
)
INT8 = replace(
    FLOAT32,
    artifact="out/int8",
    precision="int8",
    baseline="out/float32",
    accuracy=0.9889,
    bytes_on_disk=70_000,
    gzip_bytes=50_000,
    zero_count=750,
    speedup=2.049,
)


def text(renderable, width=200):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def rows(table):
    """The rendered table as label to cells; two blanks are the least that is between two columns."""
    lines = [line.strip().split("  ") for line in text(table).splitlines()]
    return {line[0]: [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}


def test_an_artifact_that_only_stores_int8_is_not_taken_for_int8():
    assert "computes" not in rows(ReceiptsTable({"float32": FLOAT32, "int8": INT8}))
    stored = replace(INT8, precision="int8_weight_only", kernels={"Conv2D": 4})
    found = rows(ReceiptsTable({"float32": FLOAT32, "int8": stored}))
    assert found["computes"] == ["float32", "float32, weights in int8"]


def test_plan_shows_value_and_reason():
    plan = [Decision(setting="jit_compile", value="False", reason="CudnnRNN layer 'lstm'")]
    assert rows(PlanTable(plan))["jit_compile"] == ["False", "CudnnRNN layer 'lstm'"]


def test_brackets_are_words_and_not_markup():
    plan = [Decision(setting="[bold]", value="[red]", reason="shape [none, 32] of [conv1]")]
    assert rows(PlanTable(plan))["[bold]"] == ["[red]", "shape [none, 32] of [conv1]"]
    skip = Skip(name="[conv1]", kind="Conv2D", reason="[red]")
    assert "[conv1]: [red]" in text(pass_summary(PassReport(name="[p]", skipped=[skip])))
    assert "[int8]" in text(ReceiptsTable({"[int8]": FLOAT32}))


def test_receipts_stand_side_by_side_with_ratios():
    found = rows(ReceiptsTable({"float32": FLOAT32, "int8": INT8}))
    assert found["float32"] == ["int8", "vs float32"]
    assert found["accuracy"] == ["99.17%", "98.89%", "-0.28 pt"]
    assert found["bytes"] == ["250,000", "70,000", "0.28x"]
    assert found["gzip bytes"] == ["200,000", "50,000", "0.25x"]
    assert found["sparsity"] == ["0.0%", "75.0%"]
    assert found["median ms"] == ["1.000", "1.000"]
    assert found["p99 ms"] == ["2.000", "2.000"]
    assert found["speed"] == ["2.05x", "faster"]
    assert "against" not in found  # it is what all figures are compared with


@pytest.mark.parametrize(
    ("speedup", "shown"), [(0.82, ["0.82x", "slower"]), (0.97, ["0.97x", "about even"]), (1.5, ["1.50x", "faster"])]
)
def test_slower_than_the_baseline_is_said_plainly(speedup, shown):
    assert rows(ReceiptsTable({"float32": FLOAT32, "int8": replace(INT8, speedup=speedup)}))["speed"] == shown


def test_a_baseline_that_is_not_the_first_artifact_is_named():
    found = rows(ReceiptsTable({"float32": FLOAT32, "int8": replace(INT8, baseline="out/pruned")}))
    assert found["against"] == ["pruned"]


def test_rows_that_would_be_empty_are_left_out():
    found = rows(ReceiptsTable({"float32": FLOAT32}))
    assert found["accuracy"] == ["99.17%"]
    assert not {"speed", "against"} & set(found)


@pytest.mark.parametrize(("accuracy", "shown"), [(0.9816, "▼ -1.01 pt"), (0.9817, "-1.00 pt"), (0.9989, "+0.72 pt")])
def test_a_loss_of_over_a_point_is_marked(accuracy, shown):
    found = rows(ReceiptsTable({"float32": FLOAT32, "int8": replace(INT8, accuracy=accuracy)}))
    assert found["accuracy"][-1] == shown


def test_an_unknown_value_gives_its_reason():
    receipt = replace(INT8, accuracy=None, speedup=None, unavailable={"accuracy": "no labels", "speedup": "timed out"})
    found = rows(ReceiptsTable({"float32": FLOAT32, "int8": receipt}))
    assert found["accuracy"] == ["99.17%", "unavailable (no labels)"]
    assert found["speed"] == ["unavailable (timed out)"]


def test_three_artifacts_fit_a_terminal():
    table = ReceiptsTable({"float32": FLOAT32, "pruned": INT8, "int8": INT8})
    assert "-0.28 pt" in text(table, width=80)
    assert "…" not in text(table, width=80)


def test_a_narrow_terminal_gets_comparisons_below_the_figures():
    table = ReceiptsTable({"float32": FLOAT32, "pruned": INT8, "int8": INT8})
    lines = [line.split() for line in text(table, width=60).splitlines()]
    assert ["bytes", "250,000", "70,000", "70,000"] in lines
    assert ["0.28x", "0.28x"] in lines
    assert "…" not in text(table, width=60)


@pytest.mark.parametrize("width", [40, 69, 70])
def test_a_narrow_terminal_gets_reasons_below_their_settings(width):
    reason = "fewer returns to Python between steps; 1 in a fit with a callback that acts on each batch"
    plan = [Decision(setting="steps_per_execution", value="10", reason=reason)] * 2
    lines = text(PlanTable(plan), width).splitlines()
    assert max(map(len, lines)) <= width
    below = ["steps_per_execution  10", "  fewer returns to Python"]
    beside = " steps_per_execution   10      fewer returns"
    if width < 70:
        assert lines[0].rstrip() == below[0]
        assert lines[1].startswith(below[1])
        assert "reason" not in lines[0]
    else:
        assert any(line.startswith(beside) for line in lines)


def test_pass_summary_gathers_kinds_and_reasons():
    report = PassReport(
        name="prune",
        changed=[Change(name=f"conv{i}", kind="Conv2D", detail="75.0% zeros") for i in range(12)],
        skipped=[Skip(name=f"norm{i}", kind="BatchNormalization", reason="no kernel") for i in range(5)],
        metrics={"sparsity": 0.75},
    )
    assert str(pass_summary(report)).splitlines() == [
        "prune: 12 changed, 5 skipped, sparsity 0.75",
        "  changed  12 Conv2D",
        "  skipped  norm0, norm1, norm2 and 2 more: no kernel",
    ]
    assert str(pass_summary(PassReport(name="prune"))) == "prune: 0 changed, 0 skipped"


def test_pass_summary_tells_the_steps_of_a_kind_in_one_line():
    clock = Change(name="", kind="clock", detail="int8 in 3 of 5 nodes")
    stored = [Change(name=f"dense{i}", kind="kernel stored in int8", detail=f"{i} values") for i in range(4)]
    assert str(pass_summary(PassReport(name="quantize", steps=[clock, *stored]))).splitlines() == [
        "quantize: 0 changed, 0 skipped",
        "  step     int8 in 3 of 5 nodes",
        "  step     4 kernel stored in int8",
    ]
