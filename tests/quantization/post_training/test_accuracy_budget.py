"""The accuracy budget: the search against an exhaustive greedy one, its trials against the models they stand for."""

from dataclasses import replace

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from tfopt.errors import ConfigError
from tfopt.graph import GraphEditor
from tfopt.quantization import QuantizationConfig, quantize
from tfopt.quantization.annotation.fusion import find_fusions
from tfopt.quantization.post_training.accuracy_budget import AccuracyEvaluator, Trial, search_float_nodes
from tfopt.tasks.scorer import Scorer

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(48, 8, 8, 3)).astype("float32")
PLAIN = {"equalization": False, "smooth_quant": 0.0, "bias_correction": False}


def top1_accuracy(labels, outputs):
    return Scorer("categorical_accuracy", labels, {"": outputs}).value({"": outputs})


def additive(costs):
    def evaluate(kept_float):
        evaluate.calls += 1
        drop = sum(cost for name, cost in costs.items() if name not in kept_float)
        return Trial(value=1 - drop, error=drop)

    evaluate.calls = 0
    return evaluate


@given(costs=st.lists(st.integers(0, 100), min_size=1, max_size=20), drop=st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_where_costs_add_up_no_choice_needs_fewer(costs, drop):
    evaluate = additive({f"node{number}": cost / 1000 for number, cost in enumerate(costs)})
    budget = search_float_nodes([f"node{number}" for number in range(len(costs))], evaluate, drop / 1000)
    assert evaluate.calls <= 2 * len(costs) + 10
    assert evaluate(budget.kept_float).value >= 1 - drop / 1000 - 1e-6
    falling = sorted(costs, reverse=True)
    fewest = next(count for count in range(len(costs) + 1) if sum(falling[count:]) <= drop)
    assert len(budget.kept_float) == fewest


def test_costs_that_do_not_add_up_are_given_back():
    """Each of two is bad alone; but they are bad because of the third, which is the one to leave float."""

    def evaluate(kept_float):
        drop = 0.3 if "c" not in kept_float else 0.05 * ("d" not in kept_float)
        drop += 0.2 * (not {"a", "b"} & set(kept_float))
        return Trial(value=1 - drop, error=drop)

    budget = search_float_nodes(["a", "b", "c", "d"], evaluate, 0.06)
    assert len(budget.kept_float) == 2
    assert "c" in budget.kept_float
    assert any("back to int8" in step.detail for step in budget.steps)
    assert budget.metrics == pytest.approx({"float": 1.0, "int8": 0.5, "kept": 0.95})


def test_what_holds_already_is_not_searched():
    evaluate = additive({"a": 0.01, "b": 0.02})
    budget = search_float_nodes(["a", "b"], evaluate, 0.05)
    assert not budget.kept_float
    assert evaluate.calls == 2


def residual():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(6, 3, padding="same", activation="relu")(inputs)
    y = layers.Conv2D(6, 3, padding="same", groups=2, activation="relu")(x)
    x = layers.ReLU()(layers.Add()([layers.Conv2D(6, 3, padding="same", use_bias=False)(y), x]))
    x = layers.DepthwiseConv2D(3, activation="relu6")(x)
    x = layers.Dense(8, activation="gelu")(layers.Flatten()(layers.MaxPooling2D()(x)))
    return keras.Model(inputs, layers.Dense(4)(x))


def test_a_trial_is_the_model_with_these_nodes_float():
    """Every choice of nodes, in one graph, against a graph of its own: also where a sum is fused or no longer is."""
    quantized = quantize(residual(), calibration_data=X)
    editor = GraphEditor(quantized.float_graph.graph_def)
    fusions, _ = find_fusions(quantized.float_graph, editor)
    adjustments = {
        fusion.op: replace(quantized.adjustments[fusion.op], weights=towards_zero(editor.value(fusion.weights)))
        for fusion in fusions
    }
    quantized = replace(quantized, adjustments=adjustments)
    exact = np.asarray(residual()(X))
    inputs = [quantized.float_graph.feed(X[:30]), quantized.float_graph.feed(X[30:])]
    trials = AccuracyEvaluator(
        quantized.float_graph,
        {},
        quantized.ranges,
        quantized.adjustments,
        inputs,
        exact,
        lambda labels, outputs: -np.abs(labels - outputs).sum(),
        quantized.weight_grid,
    )
    names = [change.name for change in quantized.report.changed]
    assert sorted(trials.names) == sorted(names)
    choices = [[], names, *([name] for name in names), *(names[:2], names[2:4], names[1::2])]
    for choice in choices:
        outputs = quantized.leaving_float(dict.fromkeys(choice, "asked")).predict(X)
        score = trials.score(choice)
        # A value on the edge of a step may fall on either side of it.
        assert score.value == pytest.approx(-np.abs(outputs - exact).sum(), rel=2e-2, abs=1e-2), choice
        assert score.error == pytest.approx(np.linalg.norm(outputs - exact) / np.linalg.norm(exact), rel=2e-2, abs=1e-4)


def towards_zero(weights):
    """Returns weights on the grid, but not the nearest ones; the largest stay what they were."""
    depthwise = weights.shape[-1] == 1
    axes = (0, 1, 3) if depthwise else tuple(range(weights.ndim - 1))
    scale = np.abs(weights).max(axis=axes, keepdims=True) / (127 if depthwise else 63)
    return (np.trunc(weights / scale * (1 + 1e-6)) * scale).astype("float32")


def outlier_in(model, number, factor=3e4):
    """Makes one layer's input useless in int8: a channel so large that all others are rounded to zero."""
    weighted = [layer for layer in model.layers if layer.weights]
    writer, reader = weighted[number], weighted[number + 1]
    factors = np.where(np.arange(writer.bias.shape[0]) == 0, factor, 1.0)
    writer.kernel.assign(writer.kernel * factors)
    writer.bias.assign(np.where(factors > 1, 1.0, writer.bias) * factors)
    kernel = reader.kernel.numpy()
    kernel[..., 0, :] = 0
    reader.kernel.assign(kernel)
    return model


def dense():
    keras.utils.set_random_seed(0)
    sizes = [layers.Dense(16, activation="relu", bias_initializer="normal") for _ in range(4)]
    return keras.Sequential([keras.Input((6,)), *sizes, layers.Dense(5)])


def labelled(model, count=200):
    x = np.random.default_rng(1).normal(size=(count, 6)).astype("float32")
    return x, np.asarray(model(x)).argmax(axis=1)


def test_the_layers_that_cost_the_accuracy_are_kept_float():
    model = outlier_in(outlier_in(dense(), 0), 2)
    x, y = labelled(model)
    plain = quantize(model, QuantizationConfig(**PLAIN), calibration_data=x)
    assert top1_accuracy(y, plain.predict(x)) < 0.9
    config = QuantizationConfig(**PLAIN, max_accuracy_drop=0.05)
    quantized = quantize(model, config, calibration_data=(x, y))
    assert top1_accuracy(y, quantized.predict(x)) >= 0.95
    skipped = {skip.name: skip.reason for skip in quantized.report.skipped}
    assert len(skipped) == 2
    names = [change.name for change in quantize(model, QuantizationConfig(**PLAIN), calibration_data=x).report.changed]
    assert set(skipped) == {names[1], names[3]}
    assert all("accuracy budget" in reason for reason in skipped.values())
    assert quantized.report.metrics["kept"] >= 0.95 > quantized.report.metrics["int8"]
    assert "must be float" in str(quantized.report)


@pytest.mark.parametrize("activation", ["sigmoid", None])
def test_the_budget_of_a_binary_classifier(activation):
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(16, activation="relu", bias_initializer="normal") for _ in range(2)]
    model = keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(1, activation=activation)])
    x = np.random.default_rng(1).normal(size=(200, 6)).astype("float32")
    threshold = float(np.median(np.asarray(model(outlier_in(model, 0) and x))))
    if activation is None:  # so that both classes occur
        model.layers[-1].bias.assign([-threshold])
    else:
        model.layers[-1].bias.assign([-np.log(threshold / (1 - threshold))])

    def decide(outputs):
        return outputs[:, 0] > (0.5 if activation else 0.0)

    y = decide(np.asarray(model(x)))
    assert 0.3 < y.mean() < 0.7
    plain = quantize(model, QuantizationConfig(**PLAIN), calibration_data=x)
    assert np.mean(decide(plain.predict(x)) == y) < 0.9
    quantized = quantize(model, QuantizationConfig(**PLAIN, max_accuracy_drop=0.05), calibration_data=(x, y))
    assert np.mean(decide(quantized.predict(x)) == y) >= 0.95
    assert quantized.report.metrics["float"] == 1.0
    assert quantized.report.metrics["kept"] >= 0.95 > quantized.report.metrics["int8"]


def test_the_budget_of_several_outputs_is_that_of_their_mean():
    inputs = keras.Input((8, 8, 3))
    pixels = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    mask = layers.Conv2D(1, 1, activation="sigmoid")(pixels)
    kind = layers.Dense(4)(layers.GlobalAveragePooling2D()(pixels))
    model = keras.Model(inputs, {"mask": mask, "kind": kind})
    exact = keras.tree.map_structure(np.asarray, model(X))
    labels = {"mask": (exact["mask"] > 0.5).astype(int), "kind": exact["kind"].argmax(axis=1)}
    labels["kind"][:12] = (labels["kind"][:12] + 1) % 4
    quantized = quantize(model, QuantizationConfig(max_accuracy_drop=0.2), calibration_data=(X, labels))
    assert quantized.report.metrics["float"] == pytest.approx((1 + 0.75) / 2)
    assert quantized.report.metrics["kept"] > 0.8


def test_the_budget_of_an_error_is_what_it_may_rise():
    model = outlier_in(dense(), 0)
    x, _ = labelled(model)
    exact = np.asarray(model(x))
    targets = exact + np.random.default_rng(1).normal(size=exact.shape) * np.abs(exact).mean() / 10
    allowed = 0.02 * float(np.abs(exact).mean())
    config = QuantizationConfig(**PLAIN, max_accuracy_drop=allowed, metric="mean_absolute_error")
    report = quantize(model, config, calibration_data=(x, targets)).report
    assert report.metrics["float"] == pytest.approx(np.abs(exact - targets).mean(), rel=1e-4)
    assert report.metrics["int8"] > report.metrics["float"] + allowed
    assert report.metrics["kept"] <= report.metrics["float"] + allowed
    assert any(
        "accuracy budget" in skip.reason and not skip.reason.startswith("accuracy budget: -") for skip in report.skipped
    )


def test_evaluation_data_and_a_metric_of_ones_own():
    model = outlier_in(dense(), 0)
    x, _ = labelled(model)
    seen = []

    def metric(labels, outputs):
        seen.append((labels.shape, outputs.shape))
        return -float(np.abs(labels - outputs).mean())

    exact = np.asarray(model(x))
    config = QuantizationConfig(**PLAIN, max_accuracy_drop=0.02 * np.abs(exact).mean(), metric=metric)
    quantized = quantize(
        model, config, calibration_data=x[:64], evaluation_data=[(x[:90], exact[:90]), (x[90:], exact[90:])]
    )
    assert set(seen) == {((200, 5), (200, 5))}
    assert len(quantized.report.skipped) >= 1
    assert metric(exact, quantized.predict(x)) >= -config.max_accuracy_drop * 1.01


def test_top1_accuracy_of_class_numbers_and_one_hot():
    outputs = GENERATOR.normal(size=(50, 4))
    classes = GENERATOR.integers(0, 4, 50)
    expected = np.mean([row.argmax() == label for row, label in zip(outputs, classes, strict=True)])
    assert top1_accuracy(classes, outputs) == expected
    assert top1_accuracy(classes[:, None], outputs) == expected
    assert top1_accuracy(np.eye(4)[classes], outputs) == expected


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("data", "config", "message"),
    [
        (lambda x, y: x, {}, "needs labelled examples. Received: no labels"),
        (lambda x, y: (x, y + 0.5), {}, "Labels must be class numbers"),
        (lambda x, y: (x, y + 100), {}, "Labels must be class numbers from 0 to"),
        (lambda x, y: (x, y.astype(str)), {}, "Labels must be class numbers"),
        (lambda x, y: (x, y[:5]), {}, "one label per example. Received: a batch of 32 examples and 5 labels"),
        (lambda x, y: (x, y), {"metric": lambda labels, outputs: float("nan")}, "metric must be a finite number"),
        (lambda x, y: (x, y), {"metric": lambda labels: 0.5}, "which raised TypeError"),
        (lambda x, y: (x, y), {"metric": lambda labels, outputs: None}, "which raised TypeError"),
    ],
)
def test_what_cannot_be_measured_is_an_error(data, config, message):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5)])
    with pytest.raises(ConfigError, match=message):
        quantize(model, QuantizationConfig(max_accuracy_drop=0.01, **config), calibration_data=data(*labelled(model)))


def test_which_of_several_outputs_is_meant_must_be_said():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, [layers.Dense(2)(inputs), layers.Dense(3)(inputs)])
    x = np.zeros((8, 6), "float32")
    with pytest.raises(ConfigError, match=r"Labels for several outputs.*must be a dict by output name"):
        quantize(model, QuantizationConfig(max_accuracy_drop=0.1), calibration_data=(x, np.zeros(8)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_accuracy_drop": 5}, "must be in .0, 1.. Received: max_accuracy_drop=5.0. .* did you mean 0.05"),
        ({"max_accuracy_drop": -0.1}, "at least 0"),
        ({"max_accuracy_drop": float("nan")}, "at least 0"),
        ({"metric": "top5"}, "Unknown metric 'top5'. Expected one of: 'accuracy', 'binary_accuracy'"),
        ({"metric": 5}, "metric must be a name or a function"),
        ({"smooth_quant": 2}, r"smooth_quant must be in \[0, 1\]"),
        ({"rounding": "adaround"}, "Unknown rounding 'adaround'"),
    ],
)
def test_wrong_settings(arguments, message):
    with pytest.raises(ConfigError, match=message):
        QuantizationConfig(**arguments)
