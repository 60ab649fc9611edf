"""Each script in recipes/: its quick run in a process of its own without a network, and what its docstring says."""

import ast
import json
import os
from pathlib import Path

import pytest

from tfopt.exporting import verify
from tfopt.recipes import RECIPES
from tfopt.report.formatting import show_score

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# A connection through this proxy is refused at once.
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


def script(name):
    return ROOT / "recipes" / f"{name}.py"


def words(name):
    return " ".join(ast.get_docstring(ast.parse(script(name).read_text())).split())


def test_every_recipe_has_a_script_and_no_other():
    assert {path.stem for path in (ROOT / "recipes").glob("*.py")} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_a_quick_and_a_full_form(name):
    assert {"quick", "full"} <= set(RECIPES[name].forms)
    assert RECIPES[name].export_dir == f"saved_models/{name}"


@pytest.mark.parametrize("name", RECIPES)
def test_the_docstring_quotes_the_recorded_run(name):
    record = json.loads((RESULTS / f"{name}.json").read_text())
    said = words(name)
    assert f"benchmarks/results/{name}.json" in said
    assert f"python recipes/{name}.py --quick" in said
    assert "has not been run" in said, "the full form needs a GPU"
    for value in record["median_scores"].values():
        assert show_score(record["score"], value) in said


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_quick_run_exports_artifacts_that_verify(name, tmp_path, fresh_python):
    fresh_python(script(name), "--quick", cwd=tmp_path, env={**os.environ, **NO_NETWORK}, check=True)
    out = tmp_path / "saved_models" / f"{name}_quick"
    receipts = json.loads((out / "receipts.json").read_text())
    assert "float32" in receipts
    assert (out / "report.html").stat().st_size > 10_000
    last = out / list(receipts)[-1]
    assert verify(last).ok
