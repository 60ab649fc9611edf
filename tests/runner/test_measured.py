"""Settings that were measured for a recipe: kept for its later runs on the same machine, and for no other training."""

import dataclasses
import json

import pytest
from rich.console import Console

import tfopt
from tfopt import TrainingConfig
from tfopt.errors import ConfigError, TfoptWarning
from tfopt.recipe import measured
from tfopt.recipe.measured import forget, keep, with_measured
from tfopt.report import Decision
from tfopt.timing import Estimate

FASTER = Estimate(median=1.25, least=1.1, most=1.3)
SETTINGS = {"training": {"steps_per_execution": 3, "prefetch": 5}, "data": {"cache": "memory"}}
RECIPE = tfopt.Recipe(
    name="tiny",
    model=tfopt.ModelConfig(builder="mlp", arguments={"units": [8]}),
    data=tfopt.DataConfig(source="synthetic", arguments={"examples": 96, "input_shape": [4]}),
    training=TrainingConfig(precision="float32", jit_compile=False, epochs=1, global_batch_size=8),
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TFOPT_CACHE_DIR", str(tmp_path))
    return tmp_path


def with_training(**changes):
    return dataclasses.replace(RECIPE, training=dataclasses.replace(RECIPE.training, **changes))


def test_a_run_takes_what_was_measured_for_it_and_says_so(folder):
    file = keep(RECIPE, SETTINGS, FASTER)
    assert [file] == list(folder.rglob("*.json"))
    result = tfopt.run(RECIPE, console=Console(quiet=True))
    assert result.model.steps_per_execution == 3
    assert result.plan.prefetch == 5
    decided = {each.setting: each for each in result.report.plan}
    assert {name for name, each in decided.items() if "tfopt tune measured 1.25x (1.10 to 1.30)" in each.reason} == {
        *("steps_per_execution", "prefetch", "cache")
    }
    assert str(file) in decided["cache"].reason
    assert decided["steps_per_execution"].value == "3"
    assert decided["cache"].value == "memory"
    assert isinstance(decided["precision"], Decision)
    assert decided["precision"].reason == "as asked"


def test_only_the_same_training_on_the_same_machine_takes_it(monkeypatch):
    keep(RECIPE, SETTINGS, FASTER)
    same = with_training(epochs=9, learning_rate=0.5, seed=3)
    assert with_measured(same)[0].training == dataclasses.replace(same.training, **SETTINGS["training"])
    for other in (
        with_training(global_batch_size=16),
        with_training(precision="auto"),
        with_training(prefetch=2),
        with_training(optimizer="sgd"),
        dataclasses.replace(RECIPE, model=tfopt.ModelConfig(builder="mlp", arguments={"units": [9]})),
        RECIPE.quick(),
    ):
        assert with_measured(other) == (other, {})
    machine = measured.detect()
    for another in ({"cpu_model": "another"}, {"logical_cores": 99}, {"tensorflow_version": "2.99.0"}):
        monkeypatch.setattr(measured, "detect", lambda another=another: dataclasses.replace(machine, **another))
        assert with_measured(RECIPE) == (RECIPE, {})


def test_what_the_recipe_asks_for_is_never_replaced(folder):
    assert keep(RECIPE, {"training": {"jit_compile": True}}, FASTER) is None
    assert keep(RECIPE, {"training": {"steps_per_execution": 3, "accumulate": 2}}, FASTER) is None
    assert list(folder.rglob("*.json")) == []


def test_an_empty_directory_keeps_and_takes_nothing(folder, monkeypatch):
    keep(RECIPE, SETTINGS, FASTER)
    monkeypatch.setenv("TFOPT_CACHE_DIR", "")
    assert keep(RECIPE, SETTINGS, FASTER) is None
    assert with_measured(RECIPE) == (RECIPE, {})


def test_a_later_search_replaces_it_or_takes_it_back(folder):
    keep(RECIPE, SETTINGS, FASTER)
    file = keep(RECIPE, {"training": {"prefetch": 7}}, FASTER)
    assert with_measured(RECIPE)[0] == with_training(prefetch=7)
    forget(RECIPE)
    assert not file.exists()
    forget(RECIPE)
    assert with_measured(RECIPE) == (RECIPE, {})


@pytest.mark.parametrize("spoil", ["cut", "foreign", "settings"])
def test_a_damaged_file_is_told_and_the_run_goes_without_it(spoil):
    file = keep(RECIPE, SETTINGS, FASTER)
    values = json.loads(file.read_text())
    values["settings"] = {"training": {"precise": 1}}
    file.write_text({"cut": file.read_text()[:40], "foreign": '{"mine": 1}', "settings": json.dumps(values)}[spoil])
    with pytest.warns(TfoptWarning, match="cannot be read, so it runs without them"):
        assert with_measured(RECIPE) == (RECIPE, {})
    if spoil == "foreign":
        with pytest.raises(ConfigError, match="only if tfopt wrote it"):
            keep(RECIPE, SETTINGS, FASTER)
        forget(RECIPE)
        assert file.read_text() == '{"mine": 1}'
