"""The compatibility matrix: its cells reach the weights of one device, and its page shows the recorded results."""

import dataclasses
import json

import compatibility as matrix
import compatibility_cell as cells
import compatibility_page as whole_page
import numpy as np
import pytest

FIELDS = [field.name for field in dataclasses.fields(cells.Cell)]
QUICK = [("none", "float32", False, 4, 4)]


def words(cell):
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(cell).items())


@pytest.fixture(scope="module")
def reference():
    return cells.train_reference()


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cells.Cell(**dict(zip(FIELDS, row, strict=True))) for row in QUICK], ids=words)
def test_a_cell_trains_and_in_float32_equals_one_device(cell, reference, two_replicas):
    outcome = cells.run(cell, "tfopt", reference)
    assert (outcome.status, outcome.words) == ("trains", "")


@pytest.mark.slow
def test_the_cell_in_which_all_is_on_trains(reference, two_replicas):
    """Also with a scaled loss. test_parity.py has that in float32; benchmarks/compatibility.py runs every cell."""
    (cell,) = (
        cell
        for cell in cells.every_cell(["mirrored"])
        if cell.jit_compile
        and cell.accumulate > 1
        and cell.steps_per_execution > 1
        and cell.precision == "mixed_float16"
    )
    outcome = cells.run(cell, "tfopt", reference)
    assert (outcome.status, outcome.words) == ("trains", "")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", ["weights", "losses", "evaluated", "predicted"])
def test_a_thousandth_is_a_difference(what, reference):
    off = scaled(getattr(reference, what))
    status, by = cells._difference(dataclasses.replace(reference, **{what: off}), reference)
    assert status.endswith("differ from one device's")
    assert by == pytest.approx(1e-3, rel=0.01)
    assert cells._difference(reference, reference) == ("", None)


def scaled(values):
    if isinstance(values, list):
        return [np.multiply(value, 1.001) for value in values]
    return np.multiply(values, 1.001)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "accumulate", "examples", "status"),
    [("none", 4, 128, "trains"), ("mirrored", 1, 135, "differs")],
)
def test_plain_keras_differs_by_the_uneven_batch_alone(
    strategy, accumulate, examples, status, two_replicas, monkeypatch
):
    """The comparison finds one batch of 9 with a wrong weight, and reports no difference between equal trainings."""
    monkeypatch.setattr(cells, "EXAMPLES", examples)
    monkeypatch.setattr(cells, "_keras_strategy", {"none": None, "mirrored": two_replicas}.get)
    settings = {"precision": "float32", "jit_compile": False, "steps_per_execution": 1}
    outcome = cells.run(
        cells.Cell(strategy=strategy, accumulate=accumulate, **settings), "keras", cells.train_reference()
    )
    assert outcome.status == status


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_told_and_the_next_cell_goes_on(tmp_path):
    todo = cells.every_cell(["none"])[:2]
    outcomes = list(matrix.run_cells(todo, "tfopt", tmp_path / "missing.npz", timeout_s=300))
    assert [cell for cell, _ in outcomes] == todo
    for _, outcome in outcomes:
        assert outcome.status == "fails"
        assert "exit code 1: FileNotFoundError" in outcome.words
    ((_, outcome),) = matrix.run_cells(todo[:1], "tfopt", tmp_path / "missing.npz", timeout_s=0.1)
    assert outcome.words.startswith("hangs")


def test_results_merge_in_the_order_of_the_tables():
    first, second, *_ = cells.every_cell(["none"])
    trains, fails = cells.Outcome(status="trains"), cells.Outcome(status="fails", words="fit: why")
    results = matrix.merge({"cells": []}, second, "tfopt", trains)
    results = matrix.merge(results, first, "keras", fails)
    results = matrix.merge(results, second, "keras", fails)
    results = matrix.merge(results, second, "keras", trains)
    assert [entry["cell"]["steps_per_execution"] for entry in results["cells"]] == [1, 4]
    assert [entry["keras"]["status"] for entry in results["cells"]] == ["fails", "trains"]
    text = whole_page.page(results, json.loads(whole_page.MODELS.read_text()))
    assert "tfopt trains **1 of 1** cells; Keras 3 trains **1 of 2** cells, 1 fail." in text
    assert "| float32 | off | 1 | 1 | not run | fails (1) |" in text
    assert "1. fit: why" in text


def test_the_page_is_what_was_recorded_and_tfopt_trains_every_cell_of_one_process():
    results = json.loads(whole_page.RESULTS.read_text())
    models = json.loads(whole_page.MODELS.read_text())
    assert whole_page.PAGE.read_text() == whole_page.page(results, models)
    assert [cells.Cell(**entry["cell"]) for entry in results["cells"]] == cells.every_cell(whole_page.STRATEGIES)
    for entry in results["cells"]:
        assert set(entry) == {"cell", *matrix.SIDES}
        accepted = ("trains", "refused") if entry["cell"]["strategy"] == "multi_worker" else ("trains",)
        assert entry["tfopt"]["status"] in accepted, entry
