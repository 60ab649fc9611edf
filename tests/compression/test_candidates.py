"""Which candidates a search trains next, leaves out or gives up, by plain figures."""

import keras
import numpy as np
import pytest
from keras import layers

import tfopt
from tfopt.compression.candidates import (
    Allocation,
    farthest,
    interval,
    measure_sensitivity,
    most_ratios,
    possible_shares,
    why_give_up,
    why_leave_out,
)
from tfopt.errors import UnsupportedModelError
from tfopt.pruning import StructuredPruningConfig
from tfopt.pruning.sensitivity_curves import Sensitivity


def test_the_amounts_meet_the_share_where_it_hurts_least():
    cost = lambda ratios: 1 - (3 * ratios.get("a", 0.0) + ratios.get("b", 0.0)) / 4  # noqa: E731
    found = Sensitivity(
        score="loss",
        higher_is_better=False,
        baseline=1.0,
        shares=(0.3, 0.9),
        curves={"a": (1.0, 1.1), "b": (2.0, 5.0)},
        config=StructuredPruningConfig(ratio=0.5),
        cost=cost,
    )
    allocation = Allocation(found, {"a": 0.9, "b": 0.5})
    assert allocation.least == pytest.approx(1 - (2.7 + 0.5) / 4)
    assert allocation.ratios(0.5, "sensitive") == pytest.approx({"a": 2 / 3, "b": 0.0}, abs=1e-3)
    assert allocation.ratios(0.5, "even") == pytest.approx({"a": 0.5, "b": 0.5}, abs=1e-3)


def test_a_share_below_the_least_is_the_least():
    found = Sensitivity(
        score="loss",
        higher_is_better=False,
        baseline=1.0,
        shares=(0.3, 0.9),
        curves={"a": (1.0, 1.1)},
        config=StructuredPruningConfig(ratio=0.5),
        cost=lambda ratios: 1 - ratios.get("a", 0.0) / 16,
    )
    assert Allocation(found, {"a": 0.9}).ratios(0.9, "sensitive") == pytest.approx({"a": 0.9}, abs=1e-4)


def test_a_search_halves_the_interval_before_it_fills_the_front():
    shares = {1: 0.9, 2: 0.5, 3: 0.31, 4: 0.1}
    assert farthest(shares, [1.0, 0.3], 0.3, 1.0) == 2
    assert farthest({4: 0.1, 1: 0.9}, [1.0, 0.3], 0.3, 0.31) == 4
    assert farthest({1: 0.5}, [0.5], 0.0, 1.0) is None


def test_the_interval_ends_at_the_smallest_model_that_keeps_the_score():
    assert interval({}, 0.005) == (0.0, 1.0)
    assert interval({0.3: 0.0, 0.2: 0.01, 0.1: 0.03, 0.5: 0.02}, 0.005) == (0.2, 0.3)
    assert interval({0.3: 0.02}, 0.005) == (0.3, 1.0)
    assert interval({0.3: 0.02}, None) == (0.0, 1.0)


def test_a_candidate_is_left_out_where_measured_ones_show_that_it_misses_the_budget():
    measured = [(0.1, {"ms at batch 8": 1.0, "bytes": 10.0}), (1.0, {"ms at batch 8": 4.0, "bytes": 100.0})]
    reason = why_leave_out(0.7, 0.0, measured, {"ms at batch 8": 2.0, "bytes": 100})
    assert reason == "ms at batch 8 would be about 3.000"
    assert why_leave_out(0.5, 0.0, measured, {"ms at batch 8": 2.0}) == ""  # within the margin of a prediction
    assert why_leave_out(0.7, 0.0, measured, {}) == ""
    assert why_leave_out(0.2, 0.3, measured, {}) == "a model with 30.0% of the multiply-adds loses too much"
    assert why_leave_out(0.27, 0.3, measured, {}) == ""


def test_a_training_is_given_up_where_smaller_models_have_learned_more():
    smaller = [[0.9, 0.5, 0.4, 0.3, 0.2, 0.2], [0.8, 0.6, 0.5, 0.4, 0.3, 0.3]]
    reason = "after 3 of 6 epochs its loss is 0.6, and the median of smaller models was 0.45"
    assert why_give_up([0.9, 0.6, 0.7], smaller, 6) == reason
    assert why_give_up([0.9, 0.44, 0.7], smaller, 6) == ""  # its best epoch counts
    assert why_give_up([0.9], smaller, 6) == why_give_up([], smaller, 6) == ""  # too early
    assert why_give_up([0.9] * 6, smaller, 6) == ""  # it is trained
    assert why_give_up([0.9, 0.6, 0.7], smaller[:1], 6) == ""  # one may be an exception
    assert why_give_up([0.9, 0.6, 0.7], [*smaller[:1], [0.4]], 6) == ""  # the other's training was shorter


def test_a_model_that_can_lose_next_to_nothing_is_refused(tmp_path):
    inputs = keras.Input((6,))
    wide = layers.Dense(3)(layers.Dense(2000, name="wide")(inputs))
    model = keras.Model(inputs, layers.Add()([wide, layers.Dense(3)(layers.Dense(16, name="narrow")(inputs))]))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    config = StructuredPruningConfig(round_to=8, exclude=("wide",))
    data = tfopt.data.arrays(np.random.default_rng(0).normal(size=(40, 6)), np.arange(40) % 3)
    most = most_ratios(model, config)
    assert most == {"narrow": 0.9}
    found = measure_sensitivity(model, data, config, len(most), 10.0, tmp_path / "sensitivity.json")
    with pytest.raises(UnsupportedModelError, match="at the least, with round_to=8"):
        possible_shares(Allocation(found, most), model, config)
    open_config = StructuredPruningConfig(round_to=8)
    most = most_ratios(model, open_config)
    found = measure_sensitivity(model, data, open_config, len(most), 10.0, tmp_path / "sensitivity.json")
    least, largest = possible_shares(Allocation(found, most), model, open_config)
    assert 0 < least < 0.2 < largest < 1
