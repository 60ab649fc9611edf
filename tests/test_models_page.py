"""The builders do what docs/models.md says of them."""

import dataclasses
import importlib
import json
from pathlib import Path

import keras
import numpy as np
import pytest

import tfopt
from tfopt.models.table import SMALL_MODELS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# Their training step takes long to trace, also with few channels.
OF_MANY_LAYERS = ("efficientnet_v2", "mobilenet_v2", "mobilenet_v3", "resnet50", "convnext", "unet")


@pytest.fixture
def builders(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("builders")


def test_every_builder_has_recorded_cells_and_none_fails(builders):
    recorded = json.loads(builders.RESULTS.read_text())["builders"]
    assert sorted(recorded) == sorted(SMALL_MODELS), "Run benchmarks/builders.py --only-new, and commit what it writes."
    for name, outcomes in recorded.items():
        assert list(outcomes) == list(builders.CELLS), name
        assert [cell for cell, outcome in outcomes.items() if outcome["status"] == "fails"] == [], name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in OF_MANY_LAYERS)) for name in SMALL_MODELS]
)
def test_every_builder_trains_a_step_and_survives_save_and_reload(name, builders, tmp_path):
    trial = builders.Trial(name, tmp_path)  # trains a step in float32
    assert trial.save_and_reload() == ""
    assert isinstance(trial.model, keras.Model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["resnet_cifar", "lstm", "text_encoder", "unet"]
)  # one of a kind; the benchmark has all
def test_every_cell_of_a_builder_has_its_recorded_outcome(name, builders):
    recorded = json.loads(builders.RESULTS.read_text())["builders"][name]
    outcomes = builders.run(name, timeout_s=900)
    assert {cell: outcome["status"] for cell, outcome in outcomes.items()} == {
        cell: outcome["status"] for cell, outcome in recorded.items()
    }


def test_a_cell_is_refused_by_errors_of_tfopt_alone(builders):
    def refused():
        raise tfopt.ConfigError("It must not. Received: this. Do that.")

    def fails():
        np.testing.assert_array_equal(1, 2)

    assert builders.outcome(lambda: "75% zeros") == builders.Outcome(status="works", figure="75% zeros")
    assert dataclasses.asdict(builders.outcome(refused))["status"] == "refused"
    assert builders.outcome(fails).status == "fails"
