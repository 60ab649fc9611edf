"""Sensitivity: curves equal pruning one layer alone, and what they allocate meets its target exactly."""

import itertools
import re

import keras
import numpy as np
import pytest
from keras import layers

import tfopt
from tfopt import PruningConfig, Sensitivity, StructuredPruningConfig
from tfopt.errors import ConfigError, ExportError, UnsupportedModelError

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(96, 8, 8, 3)).astype("f4"), RANDOM.integers(0, 4, 96)
DATA = [(X[:64], Y[:64]), (X[64:], Y[64:])]


def convolutions():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(32, 3, name="first"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.Conv2D(32, 3, name="second"),
            layers.Flatten(),
            layers.Dense(4, name="logits"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["sparse_categorical_accuracy"])
    return model


@pytest.fixture(scope="module")
def trained():
    model = convolutions()
    model.fit(X, Y, epochs=4, verbose=0)
    return model


@pytest.fixture(scope="module")
def zeros(trained):
    return tfopt.sensitivity(trained, DATA, shares=(0.3, 0.6, 0.9), score="loss")


@pytest.fixture(scope="module")
def channels(trained):
    return tfopt.sensitivity(trained, DATA, StructuredPruningConfig(), shares=(0.25, 0.5, 0.75), score="loss")


def loss_of(model):
    return keras.losses.sparse_categorical_crossentropy(Y, np.asarray(model(X)), from_logits=True).numpy().mean()


def copy_of(model):
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    return copy


def test_a_curve_of_zeros_is_the_score_of_one_pruned_layer(trained, zeros):
    assert list(zeros.curves) == ["first", "second", "logits"]
    for name, share, score in (("first", 0.6, zeros.curves["first"][1]), ("logits", 0.9, zeros.curves["logits"][2])):
        copy = copy_of(trained)
        tfopt.prune(copy, PruningConfig(target_sparsity=share, include=(name,)))
        assert score == pytest.approx(loss_of(copy), rel=1e-4)
    assert zeros.baseline == pytest.approx(loss_of(trained), rel=1e-4)
    assert zeros.losses["first"][2] == zeros.curves["first"][2] - zeros.baseline


def test_a_curve_of_channels_is_the_score_of_the_smaller_model(trained, channels):
    assert list(channels.curves) == ["first", "second"]
    smaller = tfopt.shrink(trained, StructuredPruningConfig(ratio=0.5, exclude=("second",))).model
    assert channels.curves["first"][1] == pytest.approx(loss_of(smaller), rel=1e-4)


def test_the_model_stays_as_it_was():
    model = convolutions()
    before = [value.copy() for value in model.get_weights()]
    scored = []

    def last_score_fails(model):
        scored.append(model)
        if len(scored) == 3:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        tfopt.sensitivity(model, None, score=last_score_fails, higher_is_better=True)
    for value, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)


def test_an_allocation_of_zeros_meets_its_target(trained, zeros):
    config = zeros.allocate(target_sparsity=0.7)
    copy = copy_of(trained)
    report = tfopt.prune(copy, config)
    assert report.metrics["sparsity"] == pytest.approx(0.7, abs=1e-3)
    for name, share in config.sparsities.items():
        assert np.mean(copy.get_layer(name).kernel.numpy() == 0) == pytest.approx(share, abs=2e-3)


def test_no_other_shares_of_the_grid_have_a_smaller_sum_of_losses():
    """Of convex curves, against all combinations of shares that remove as much."""
    shares = (0.25, 0.5, 0.75)
    curves = {"a": (0.1, 0.3, 0.9), "b": (0.2, 0.4, 0.6), "c": (0.0, 0.5, 2.0)}
    sizes = {"a": 100, "b": 40, "c": 60}
    found = Sensitivity(
        score="loss",
        higher_is_better=False,
        baseline=0.0,
        shares=shares,
        curves=curves,
        config=PruningConfig(),
        sizes=sizes,
    ).allocate(target_sparsity=0.4)

    def lost(chosen):
        return sum(np.interp(share, (0, *shares), (0, *curves[name])) for name, share in chosen.items())

    grid = [dict(zip(sizes, each, strict=True)) for each in itertools.product(np.linspace(0, 0.75, 16), repeat=3)]
    enough = [each for each in grid if sum(each[name] * size for name, size in sizes.items()) >= 0.4 * 200]
    assert lost(found.sparsities) <= min(map(lost, enough)) + 1e-9
    assert sum(found.sparsities[name] * size for name, size in sizes.items()) == pytest.approx(80, abs=1e-3)


def test_an_allocation_of_channels_meets_its_target(trained, channels):
    config = channels.allocate(target_flops=0.5)
    metrics = tfopt.shrink(trained, config).report.metrics
    assert 0.2 < metrics["multiply_adds"] / metrics["multiply_adds_before"] <= 0.5
    assert config.target_flops is None


def test_a_budget_bounds_the_sum_of_the_losses(zeros):
    budget = 0.5 * sum(max(curve) for curve in zeros.losses.values())
    chosen = zeros.allocate(budget=budget).sparsities
    lost = [np.interp(share, (0, *zeros.shares), (0, *zeros.losses[name])) for name, share in chosen.items()]
    assert 0.5 * budget < sum(lost) <= budget * 1.001
    with pytest.raises(ConfigError, match=r"target_sparsity=0.89, and budget=1e-06 allows no more than 0\.\d+ to be"):
        zeros.allocate(target_sparsity=0.89, budget=1e-6)
    with pytest.raises(ConfigError, match=r"the largest measured share 0.9 allows no more than 0.9"):
        zeros.allocate(target_sparsity=0.95)


def test_patterns_and_criteria_with_data(trained):
    found = tfopt.sensitivity(trained, DATA, PruningConfig(pattern="2:4", target_sparsity=0.5, criterion="taylor"))
    assert found.shares == (0.25, 0.5)
    assert found.score == "sparse_categorical_accuracy"
    assert found.higher_is_better


def test_the_table_and_the_plot(zeros, tmp_path):
    assert str(zeros).splitlines()[1].split() == ["30%", "60%", "90%"]
    drawn = zeros.plot(tmp_path / "curves.svg").read_text()
    assert drawn.count("first") >= 1
    with pytest.raises(ConfigError, match=re.escape("path must end in .svg, .png, .pdf. Received: path='x.gif'")):
        zeros.plot("x.gif")
    with pytest.raises(
        ExportError, match=r"could not be written. Received: .*missing/x.svg .*choose another directory"
    ):
        zeros.plot(tmp_path / "missing" / "x.svg")


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (iter(DATA), {}, "data must be readable more than once"),
        (DATA, {"shares": (0.5, 1.0)}, "shares must be"),
        (DATA, {"shares": ()}, "shares must not be empty"),
        (DATA, {"score": "mean_iou"}, "score must be a result of evaluate. Received: score='mean_iou'"),
        (DATA, {"score": lambda model: 1.0}, "higher_is_better must be given"),
        (DATA, {"score": lambda model: float("nan")}, "The score must be a number"),
        (DATA, {"config": 0.5}, "config must be a PruningConfig or a StructuredPruningConfig"),
        (DATA, {"config": PruningConfig(sparsities={"x": 0.5})}, "sparsities must name layers that are pruned"),
        (DATA, {"config": StructuredPruningConfig(ratios={"x": 0.5})}, "ratios must name groups of the model"),
    ],
)
def test_wrong_arguments(trained, data, settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        tfopt.sensitivity(trained, data, **settings)


def test_a_model_that_is_not_compiled_is_refused():
    with pytest.raises(UnsupportedModelError, match="model must be compiled, because it is evaluated"):
        tfopt.sensitivity(keras.Sequential([keras.Input((2,)), layers.Dense(1)]), DATA)


def test_targets_of_the_wrong_kind(zeros, channels):
    with pytest.raises(ConfigError, match="target_sparsity or budget must be given for curves of zeros"):
        zeros.allocate(target_flops=0.5)
    with pytest.raises(ConfigError, match="target_flops or budget must be given for curves of channels"):
        channels.allocate()
    with pytest.raises(ConfigError, match=r"sparsities must be empty unless scope is 'layer'"):
        PruningConfig(sparsities={"a": 0.5}, scope="global")
    with pytest.raises(ConfigError, match="ratios must be empty with a target"):
        StructuredPruningConfig(ratios={"a": 0.5}, target_flops=0.5)
