"""Each script in recipes/: its quick run without a network, and what its docstring says."""

import ast
import json
import os
import runpy
import socket
import sys
from pathlib import Path

import pytest

from tfopt.exporting import verify
from tfopt.recipes import RECIPES
from tfopt.report.formatting import show_score

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# A connection through this proxy is refused at once.
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


# They prune the network of resnet_cifar in other ways.
OF_RESNET_CIFAR = ("resnet_sparse", "resnet_2_4", "resnet_shrunk")
# The other stages run in tests/runner/test_four_tasks.py, for each task, and in test_architectures.py and
# test_models_page.py, for the other networks. benchmarks/recipes.py runs every stage of every recipe.
WITH_PRUNING = ("resnet_sparse", "resnet_2_4", "lstm")
WITH_INT8 = ("gpt", "lstm", "mobilenet_v3", "tcn", "vit")
# Networks of as many kinds of layers, but of fewer layers.
SHALLOW = {
    "convnext": ("depths=[1,1]", "widths=[64,128]", "patch_size=2", "layer_scale=1.0"),
    "gpt": ("width=128", "depth=1", "heads=4"),
    "resnet50": ("depths=[1,1]", "width=16", "small_images=True", "norm_momentum=0.9"),
    "resnet_cifar": ("depth=8", "width=16", "norm_momentum=0.9"),
    "tcn": ("filters=64", "blocks=2", "dropout=0.1", "norm_momentum=0.9"),
    "unet": ("width=16", "depth=2", "norm_momentum=0.9"),
    "vit": ("patch_size=8", "width=192", "depth=1", "heads=3"),
}
SHALLOW |= dict.fromkeys(OF_RESNET_CIFAR, SHALLOW["resnet_cifar"])


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


def no_network(host, *args, **kwargs):
    raise OSError(f"A quick run must not ask the network for {host}")


def check_artifacts(out):
    receipts = json.loads((out / "receipts.json").read_text())
    assert "float32" in receipts
    assert (out / "report.html").stat().st_size > 10_000
    assert verify(out / list(receipts)[-1], seconds=0.02).ok


@pytest.mark.slow
def test_a_script_runs_in_a_process_of_its_own(tmp_path, fresh_python):
    environment = {**os.environ, **NO_NETWORK}
    fresh_python(script("digits_cnn"), "--quick", imported="keras", cwd=tmp_path, env=environment, check=True)
    out = tmp_path / "saved_models" / "digits_cnn_quick"
    check_artifacts(out)
    receipts = json.loads((out / "receipts.json").read_text())
    assert list(receipts) == ["float32", "pruned", "int8"]
    assert receipts["pruned"]["zero_count"] / receipts["pruned"]["weight_count"] == pytest.approx(0.75, abs=0.001)
    assert receipts["int8"]["bytes_on_disk"] < 0.4 * receipts["float32"]["bytes_on_disk"]
    quick = RECIPES["digits_cnn"].form("quick")
    phases = json.loads((out / "report.json").read_text())["phases"]
    assert [len(phase["history"]["loss"]) for phase in phases] == [quick.training.epochs, quick.pruning.epochs]


@pytest.mark.slow
@pytest.mark.one_in(6)  # the audit traces the steps of all, and other tests run each stage and each network
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "digits_cnn"])
def test_the_quick_run_exports_artifacts_that_verify(name, tmp_path, monkeypatch):
    """The quick run with an epoch of each phase, in this process: an import of TensorFlow takes as long as an epoch."""
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.chdir(tmp_path)
    shorter = ["--epochs", "1", "--max-examples", "96", "--steps-per-execution", "1"]
    quick = RECIPES[name].form("quick")
    shorter += ["--pruning.epochs", "1"] if name in WITH_PRUNING else ["--no-pruning"]
    shorter += ["--shrink.epochs", "1"] if quick.shrink is not None else []
    shorter += ["--steps-per-epoch", "4"] if quick.training.steps_per_epoch is not None else []
    shorter += ["--int8-nodes", "all"] if name in WITH_INT8 else ["--no-quantization"]  # no kernel is timed
    shorter += ["--model.arguments", *SHALLOW[name]] if name in SHALLOW else []
    monkeypatch.setattr(sys, "argv", [str(script(name)), "--quick", *shorter])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert ended.value.code == 0
    check_artifacts(tmp_path / "saved_models" / f"{name}_quick")
