"""Settings that were measured for a recipe: kept for its later runs on the same machine, and for no other training."""

import contextlib
import dataclasses
import json
import os

import pytest
from rich.console import Console

import tfopt
from tfopt import TrainingConfig
from tfopt.errors import ConfigError, TfoptWarning
from tfopt.hardware import CPU_FEATURES
from tfopt.recipe import TeacherConfig, kept
from tfopt.recipe.kept import Reason, keep, with_kept
from tfopt.report import Decision
from tfopt.runner.recipe_run import told
from tfopt.timing import Estimate

FASTER = Estimate(median=1.25, least=1.1, most=1.3)
SETTINGS = {"training": {"steps_per_execution": 3, "prefetch": 5}}
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
        *("steps_per_execution", "prefetch")
    }
    assert str(file) in decided["prefetch"].reason
    assert decided["steps_per_execution"].value == "3"
    assert decided["precision"].reason == "as asked"


def test_a_reason_is_told_for_its_own_value_alone():
    others = Decision(setting="prefetch", value="2", reason="no room for more")
    assert told([others], {"prefetch": Reason("5", "measured")}) == (others,)


def test_only_the_same_training_on_the_same_machine_takes_it(monkeypatch):
    keep(RECIPE, SETTINGS, FASTER)
    same = with_training(epochs=9, learning_rate=0.5, seed=3)
    assert with_kept(same)[0].training == dataclasses.replace(same.training, **SETTINGS["training"])
    for other in (
        with_training(global_batch_size=16),
        with_training(precision="auto"),
        with_training(prefetch=2),
        with_training(optimizer="sgd"),
        dataclasses.replace(RECIPE, model=tfopt.ModelConfig(builder="mlp", arguments={"units": [9]})),
        RECIPE.quick(),
        with_training(checkpoint_dir="steps"),  # it may have begun with other settings
    ):
        assert with_kept(other) == (other, {})
    machine = kept.detect()
    newest = machine.cpu_features[-1:] == CPU_FEATURES[-1:]
    for another in (
        {"cpu_model": "another"},
        {"cpu_features": CPU_FEATURES[:-1] if newest else CPU_FEATURES},
        {"logical_cores": 99},
        {"tensorflow_version": "2.99.0"},
    ):
        monkeypatch.setattr(kept, "detect", lambda another=another: dataclasses.replace(machine, **another))
        assert with_kept(RECIPE) == (RECIPE, {})


def test_workers_and_trainings_with_checkpoints_keep_nothing(folder, monkeypatch):
    assert keep(with_training(checkpoint_dir="steps"), SETTINGS, FASTER) is None
    alone = {"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(alone))
    assert keep(RECIPE, SETTINGS, FASTER) is None
    monkeypatch.setenv("TF_CONFIG", "of something else")
    assert keep(with_training(strategy="none"), SETTINGS, FASTER) is not None  # which does not look at it


def test_a_relative_path_names_files_of_the_working_directory(folder, monkeypatch):
    data = tfopt.DataConfig(source="image_folder", arguments={"directory": "photos"})
    recipe = dataclasses.replace(RECIPE, data=data)
    for name in ("here", "there"):
        (folder / name / "photos").mkdir(parents=True)
    monkeypatch.chdir(folder / "here")
    keep(recipe, SETTINGS, FASTER)
    assert with_kept(recipe)[1]
    monkeypatch.chdir(folder / "there")
    assert with_kept(recipe) == (recipe, {})


def test_a_parent_teaches_later_stages_so_its_recipe_takes_what_its_training_was_measured_with():
    taught = dataclasses.replace(
        RECIPE, distillation=TeacherConfig(teacher="parent"), pruning=tfopt.PruningConfig(epochs=1)
    )
    keep(RECIPE, SETTINGS, FASTER)  # the recipe of a search has neither
    assert with_kept(taught)[0].training.prefetch == 5


def test_what_the_recipe_asks_for_is_never_replaced(folder):
    assert keep(RECIPE, {"training": {"jit_compile": True}}, FASTER) is None
    assert keep(RECIPE, {"training": {"steps_per_execution": 3, "accumulate": 2}}, FASTER) is None
    assert keep(RECIPE, {"training": {"prefetch": 5}, "data": {"cache": "memory"}}, FASTER) is None  # may not fit later
    assert list(folder.rglob("*.json")) == []


def test_an_empty_directory_keeps_and_takes_nothing(folder, monkeypatch):
    keep(RECIPE, SETTINGS, FASTER)
    monkeypatch.setenv("TFOPT_CACHE_DIR", "")
    assert keep(RECIPE, SETTINGS, FASTER) is None
    assert with_kept(RECIPE) == (RECIPE, {})


def test_a_later_search_replaces_it():
    keep(RECIPE, SETTINGS, FASTER)
    keep(RECIPE, {"training": {"prefetch": 7}}, FASTER)
    assert with_kept(RECIPE)[0] == with_training(prefetch=7)


SPOILT = {
    "cut": lambda values: json.dumps(values)[:40],
    "foreign": lambda values: '{"mine": 1}',
    "unknown": lambda values: json.dumps(values | {"settings": {"training": {"precise": 1}}}),
    "asked": lambda values: json.dumps(values | {"settings": {"training": {"precision": "mixed_bfloat16"}}}),
    "code": lambda values: json.dumps(values | {"settings": {"model": {"builder": "evil:build"}}}),
    "other": lambda values: json.dumps(values | {"of": {}}),
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_damaged_file_is_told_and_the_run_goes_without_it(spoil):
    file = keep(RECIPE, SETTINGS, FASTER)
    file.write_text(SPOILT[spoil](json.loads(file.read_text())))
    with pytest.warns(TfoptWarning, match="cannot be read, so it runs without"):
        assert with_kept(RECIPE) == (RECIPE, {})
    if spoil == "foreign":
        with pytest.raises(ConfigError, match="only if tfopt wrote it"):
            keep(RECIPE, SETTINGS, FASTER)
        assert file.read_text() == '{"mine": 1}'


def test_what_is_no_file_is_told():
    file = keep(RECIPE, SETTINGS, FASTER)
    file.unlink()
    os.mkfifo(file)
    with pytest.warns(TfoptWarning, match="it is no file on disk"):
        assert with_kept(RECIPE) == (RECIPE, {})


@pytest.mark.parametrize("place", ["/dev/null/below", "~nobody-of-this-name/x", "/proc/none", "a" * 300])
def test_a_place_that_cannot_be_stops_no_run_and_loses_no_result(place, monkeypatch):
    monkeypatch.setenv("TFOPT_CACHE_DIR", place)
    assert with_kept(RECIPE) == (RECIPE, {})
    with contextlib.suppress(tfopt.TfoptError, OSError):  # which a search tells as a warning
        assert keep(RECIPE, SETTINGS, FASTER) is None
