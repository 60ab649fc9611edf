"""The settings: what is refused and in which words, and that a command line and a TOML file can hold them."""

import numpy as np
import pydantic
import pytest
import tyro

from tfopt.errors import ConfigError
from tfopt.pruning import PruningConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_sparsity": 90},
            "target_sparsity must be in [0, 1). Received: target_sparsity=90. "
            "Sparsity is a fraction; did you mean 0.9?",
        ),
        (
            {"target_sparsity": 1.0},
            "target_sparsity must be in [0, 1). Received: target_sparsity=1.0. Sparsity is a fraction.",
        ),
        (
            {"target_sparsity": float("nan")},
            "target_sparsity must be in [0, 1). Received: target_sparsity=nan. Sparsity is a fraction.",
        ),
        (
            {"initial_sparsity": -0.1},
            "initial_sparsity must be in [0, 1). Received: initial_sparsity=-0.1. Sparsity is a fraction.",
        ),
        (
            {"initial_sparsity": 0.8},
            "initial_sparsity must not exceed target_sparsity. Received: initial_sparsity=0.8, target_sparsity=0.75. "
            "Sparsity only rises during a fit. Set a smaller initial_sparsity.",
        ),
        (
            {"criterion": "magnitud"},
            "Unknown criterion 'magnitud'. Expected one of: 'magnitude', 'movement', 'random', 'snip', 'taylor'. "
            "Did you mean 'magnitude'?",
        ),
        (
            {"schedule": "polynom"},
            "Unknown schedule 'polynom'. Expected one of: 'constant', 'cyclic', 'exponential', 'one_cycle', "
            "'polynomial'. Did you mean 'polynomial'?",
        ),
        (
            {"schedule": 3},
            "schedule must be a name or a function. Received: schedule=3. The names are 'constant', 'cyclic', "
            "'exponential', 'one_cycle', 'polynomial'.",
        ),
        ({"scope": "model"}, "Unknown scope 'model'. Expected one of: 'erk', 'global', 'layer'."),
        ({"begin_step": -1}, "begin_step must be a whole number of at least 0. Received: begin_step=-1."),
        ({"frequency": 0}, "frequency must be a whole number of at least 1. Received: frequency=0."),
        (
            {"regrowth": 1.0},
            "regrowth must be in [0, 1). Received: regrowth=1.0.",
        ),
        (
            {"gradient_batches": 0},
            "gradient_batches must be a whole number of at least 1. Received: gradient_batches=0.",
        ),
        ({"epochs": 0}, "epochs must be a whole number of at least 1. Received: epochs=0."),
        (
            {"begin_step": 5, "end_step": 5},
            "end_step must be greater than begin_step. Received: end_step=5, begin_step=5. "
            "Set a larger end_step, or None for two thirds of the fit.",
        ),
        ({"learning_rate": 0.0}, "learning_rate must be a positive number or None. Received: learning_rate=0.0."),
        ({"exclude": "head"}, "exclude must be a tuple of strings. Received: exclude='head'. Did you mean ('head',)?"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        PruningConfig(**settings)
    assert str(error.value) == message


def test_command_line():
    arguments = ["--target-sparsity", "0.5", "--criterion", "random", "--end-step", "90", "--exclude", "a", "b/*"]
    config = tyro.cli(PruningConfig, args=arguments)
    assert config == PruningConfig(target_sparsity=0.5, criterion="random", end_step=90, exclude=("a", "b/*"))


def test_plain_values_round_trip():
    config = PruningConfig(target_sparsity=0.5, scope="global", exclude=("a",))
    values = {"target_sparsity": 0.5, "scope": "global", "exclude": ["a"]}
    adapter = pydantic.TypeAdapter(PruningConfig)
    assert adapter.validate_python(values) == config
    assert adapter.validate_python(adapter.dump_python(config)) == config


def test_objects_in_place_of_names():
    config = PruningConfig(criterion=np.square, schedule=lambda step: 0.5)
    assert config.criterion is np.square
    assert config.schedule(0) == 0.5
