"""The builders do what docs/models.md says of them."""

import dataclasses
import json

import builders
import keras
import numpy as np
import pytest

import tfopt
from tfopt.models.table import SMALL_MODELS

# Their training step takes long to trace, also with few channels. tests/test_recipe_scripts.py trains them, and
# tests/models/test_builders.py saves and reloads them.
OF_MANY_LAYERS = ("efficientnet_v2", "mobilenet_v2", "mobilenet_v3", "resnet50", "convnext", "unet")


def test_every_builder_has_recorded_cells_and_none_fails():
    assert {cell for cells in SOME_CELLS.values() for cell in cells} == set(builders.CELLS)
    recorded = json.loads(builders.RESULTS.read_text())["builders"]
    assert sorted(recorded) == sorted(SMALL_MODELS), "Run benchmarks/builders.py --only-new, and commit what it writes."
    for name, outcomes in recorded.items():
        assert list(outcomes) == list(builders.CELLS), name
        assert [cell for cell, outcome in outcomes.items() if outcome["status"] == "fails"] == [], name


# tests/pruning/structured/test_structured_models.py trains and reloads others.
FAST = ("mlp", "simple_cnn", "lstm", "tcn")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in SMALL_MODELS
        if name not in OF_MANY_LAYERS
    ],
)
def test_every_builder_trains_a_step_and_survives_save_and_reload(name, tmp_path):
    trial = builders.Trial(name, tmp_path)  # trains a step in float32
    assert trial.save_and_reload() == ""
    assert isinstance(trial.model, keras.Model)


# Each cell once, and int8 for three kinds of networks; the benchmark runs every cell of every builder.
SOME_CELLS = {
    "resnet_cifar": ("xla", "int8_export"),
    "lstm": ("mirrored", "float32_export"),
    "text_encoder": ("mixed_float16", "int8_export"),
    "unet": ("mixed_bfloat16", "save_and_reload", "pruning", "int8_export"),
}


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SOME_CELLS)
def test_a_cell_of_a_builder_has_its_recorded_outcome(name, tmp_path, two_replicas):
    recorded = json.loads(builders.RESULTS.read_text())["builders"][name]
    trial = builders.Trial(name, tmp_path)
    for cell in SOME_CELLS[name]:
        assert builders.outcome(getattr(trial, cell)).status == recorded[cell]["status"], cell


def test_a_cell_is_refused_by_errors_of_tfopt_alone():
    def refused():
        raise tfopt.ConfigError("It must not. Received: this. Do that.")

    def fails():
        np.testing.assert_array_equal(1, 2)

    assert builders.outcome(lambda: "75% zeros") == builders.Outcome(status="works", figure="75% zeros")
    assert dataclasses.asdict(builders.outcome(refused))["status"] == "refused"
    assert builders.outcome(fails).status == "fails"
