"""The features of tfopt on six kinds of models: every recorded cell is a success, and some cells run again here."""

import json

import compatibility_page as whole_page
import models_cell as cells
import models_compatibility as matrix
import pytest

RECORDED = json.loads(whole_page.MODELS.read_text())
PROMISED = ("fit_auto", "mirrored", "accumulate", "xla", "kill_and_resume", "float_export")
# Each cell once, and each kind of model at least once.
PAIRS = {
    "fit_auto": "two_by_two",
    "mirrored": "two_by_two",
    "accumulate": "siamese",
    "mixed_bfloat16": "penalized",
    "mixed_float16": "bilstm",
    "xla": "siamese",
    "pruning": "penalized",
    "kill_and_resume": "siamese",
    "float_export": "transformer",
    "int8_export": "transformer",
    "int8_weight_only": "unet",
    "int4_weight_only": "two_by_two",
    "verify": "unet",
    "quantization_aware": "siamese",
}


def test_every_cell_was_run_and_none_fails():
    assert set(PAIRS) == set(cells.CELLS)
    assert list(RECORDED["kinds"]) == list(cells.KINDS)
    for name, found in RECORDED["kinds"].items():
        assert list(found) == list(cells.CELLS)
        for cell, outcome in found.items():
            assert outcome["status"] == ("equal" if cell in PROMISED else "works") or outcome["words"], (name, cell)
            assert outcome["status"] != "fails", (name, cell)


def test_the_table_has_a_row_for_each_cell_and_the_reason_of_what_is_refused():
    kinds = {name: dict(found) for name, found in RECORDED["kinds"].items()}
    kinds["unet"]["verify"] = {"status": "refused", "figure": "", "words": "Why. Not."}
    del kinds["siamese"]["verify"]
    notes = {"of the first part": 1}
    text = whole_page.models_section({**RECORDED, "kinds": kinds}, notes)
    (row,) = [line for line in text.splitlines() if line.startswith("| verify")]
    assert "refused (" in row
    assert row.endswith("| not run |")
    assert notes["Why. Not."] > 1


def test_a_process_that_dies_is_told_and_the_other_cells_go_on(monkeypatch, tmp_path):
    script = tmp_path / "cell.py"
    script.write_text(
        "import json, os, sys\n"
        "for cell in sys.argv[3:]:\n"
        "    if cell == 'xla': os.abort()\n"
        "    with open(sys.argv[2], 'a') as out:\n"
        "        print(json.dumps({'cell': cell, 'status': 'works'}), file=out)\n"
    )
    monkeypatch.setattr(matrix, "SCRIPT", script)
    outcomes = matrix.run_cells("unet", ["fit_auto", "xla", "verify"], timeout_s=300)
    assert [outcome.status for outcome in outcomes.values()] == ["works", "fails", "works"]
    assert "SIGABRT" in outcomes["xla"].words


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return {name: cells.Trial(name, tmp_path_factory.mktemp(name)) for name in set(PAIRS.values())}


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(("cell", "name"), PAIRS.items())
def test_a_cell_is_what_was_recorded(cell, name, trials, two_replicas):
    outcome = cells.run(trials[name], cell)
    assert outcome.status == RECORDED["kinds"][name][cell]["status"], outcome.words


def test_a_thousandth_is_a_difference():
    exact = {"kernel": cells.np.ones(3), "noise": cells.np.full(3, 1e-9)}
    assert cells._difference({**exact, "noise": -exact["noise"]}, exact, "weights") is None
    found = cells._difference({**exact, "kernel": exact["kernel"] * 1.001}, exact, "weights")
    assert (found.status, found.words) == ("fails", "weights differ by 1.0e-03")
