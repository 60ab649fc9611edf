"""Schedules against tfmot's own."""

import pytest
import tensorflow_model_optimization as tfmot

from tfopt.errors import ConfigError
from tfopt.pruning import PruningConfig
from tfopt.pruning.schedules import constant, from_callable, polynomial

STEPS = range(0, 130, 7)


def test_polynomial_equals_tfmot():
    ours = polynomial(0.2, 0.9, begin_step=10, end_step=110)
    reference = tfmot.sparsity.keras.PolynomialDecay(0.2, 0.9, begin_step=10, end_step=110)
    for step in STEPS:
        expected = float(reference(step)[1]) if step >= 10 else 0.0
        assert ours(step) == pytest.approx(expected, abs=1e-6)
        assert from_callable(reference)(step) == pytest.approx(expected, abs=1e-6)


def test_polynomial_reaches_its_ends():
    schedule = polynomial(0.2, 0.9, begin_step=10, end_step=110)
    assert schedule(9) == 0
    assert schedule(10) == pytest.approx(0.2)
    assert schedule(110) == 0.9
    assert schedule(10**6) == 0.9


def test_constant_equals_tfmot():
    ours = constant(0.0, 0.5, begin_step=20, end_step=30)
    reference = from_callable(tfmot.sparsity.keras.ConstantSparsity(0.5, begin_step=20))
    assert [ours(step) for step in STEPS] == [reference(step) for step in STEPS]


def test_percent_from_a_callable_is_refused():
    with pytest.raises(ConfigError, match=r"schedule must return a sparsity in \[0, 1\). Received: schedule\(3\)=50."):
        from_callable(lambda step: 50)(3)


def test_targets_that_disagree_are_refused():
    schedule = tfmot.sparsity.keras.PolynomialDecay(0.0, 0.5, begin_step=0, end_step=10)
    with pytest.raises(ConfigError, match=r"target_sparsity=0.75, and the schedule ends at 0.5. Set"):
        PruningConfig(schedule=schedule)
    assert PruningConfig(target_sparsity=0.5, schedule=schedule).schedule is schedule
