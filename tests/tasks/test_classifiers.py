"""Accuracy of every kind of classifier, against Keras' own metrics; what is open is refused."""

import keras
import numpy as np
import pytest
from keras import layers, metrics

from tfopt.errors import ConfigError
from tfopt.graph import freeze
from tfopt.graph.output_ops import output_ops
from tfopt.tasks.scorer import Scorer

GENERATOR = np.random.default_rng(0)
N = 40


def score(outputs, labels, op=None, metric="accuracy"):
    return Scorer(metric, labels, {"y": outputs}, {"y": op}).value({"y": outputs})


def keras_score(metric, labels, outputs):
    metric.update_state(labels, outputs)
    return pytest.approx(float(metric.result()), abs=1e-6)


@pytest.mark.parametrize("shape", [(N, 5), (N, 7, 5), (N, 4, 6, 5)])
def test_one_class_for_each_position(shape):
    outputs, classes = GENERATOR.normal(size=shape), GENERATOR.integers(0, 5, shape[:-1])
    expected = keras_score(metrics.SparseCategoricalAccuracy(), classes, outputs)
    assert score(outputs, classes) == expected
    assert score(outputs, classes[..., None].astype(float)) == expected
    assert score(outputs, np.eye(5)[classes]) == expected  # logits
    probabilities = np.exp(outputs) / np.exp(outputs).sum(axis=-1, keepdims=True)
    assert score(probabilities, np.eye(5)[classes] * 0.9 + 0.02, op="Softmax") == expected  # smoothed labels


@pytest.mark.parametrize("shape", [(N, 1), (N,), (N, 7, 1), (N, 4, 6, 1), (N, 4, 6)])
@pytest.mark.parametrize("dtype", ["bool", "int64", "float32"])
def test_two_classes_in_one_output(shape, dtype):
    logits, labels = GENERATOR.normal(size=shape), GENERATOR.integers(0, 2, shape).astype(dtype)
    probabilities = 1 / (1 + np.exp(-logits))
    expected = keras_score(metrics.BinaryAccuracy(), labels.reshape(-1, 1), probabilities.reshape(-1, 1))
    for given in {labels.shape: labels, labels[..., 0].shape: labels[..., 0]}.values() if shape[-1] == 1 else [labels]:
        assert score(logits, given) == expected
        assert score(logits, given, op="MatMul") == expected
        assert score(probabilities, given, op="Sigmoid") == expected
        assert score(probabilities, given, metric="binary_accuracy") == expected
        assert score(logits, given, metric="binary_accuracy_from_logits") == expected


def test_small_logits_are_no_probabilities():
    """All between 0 and 1: only the op, or the name of the metric, can tell."""
    logits, labels = np.full((N, 1), 0.2), np.ones(N)
    assert score(logits, labels, op="MatMul") == 1.0
    assert score(logits, labels, op="Sigmoid") == 0.0
    with pytest.raises(ConfigError, match=r"logits or probabilities.*'binary_accuracy' for probabilities, 'binary_acc"):
        score(logits, labels)
    assert score(logits, labels, metric="binary_accuracy_from_logits") == 1.0


def test_several_labels_each():
    logits, labels = GENERATOR.normal(size=(N, 5)), GENERATOR.integers(0, 2, (N, 5))
    probabilities = 1 / (1 + np.exp(-logits))
    expected = keras_score(metrics.BinaryAccuracy(), labels, probabilities)
    assert score(logits, labels) == score(probabilities, labels, op="Sigmoid") == expected
    with pytest.raises(ConfigError, match="softmax output 'y' must be class numbers"):
        score(probabilities, labels, op="Softmax")


@pytest.mark.parametrize("op", ["Sigmoid", "Mul", None])
def test_one_label_each_by_chance_is_not_guessed_at(op):
    probabilities, labels = GENERATOR.random((N, 5)), np.eye(5)[GENERATOR.integers(0, 5, N)]
    with pytest.raises(ConfigError, match="Give metric='categorical_accuracy' if each example has one class, 'binary_"):
        score(probabilities, labels, op=op)
    categorical = score(probabilities, labels, metric="categorical_accuracy")
    assert categorical == keras_score(metrics.CategoricalAccuracy(), labels, probabilities)
    assert score(probabilities, labels, metric="binary_accuracy") != categorical


@pytest.mark.parametrize(
    ("outputs", "labels", "message"),
    [
        (GENERATOR.normal(size=(N, 1)), GENERATOR.normal(size=N), "for regression set the metric"),
        (GENERATOR.normal(size=(N, 3)), GENERATOR.normal(size=(N, 3)), "for regression set the metric"),
        (GENERATOR.random((N, 4, 4, 1)), np.full((N, 4, 4), 255), "must be 0 or 1 .* such as .255, 255"),
        (GENERATOR.random((N, 3)), np.full(N, 3), "class numbers from 0 to 2, or one-hot"),
        (GENERATOR.random((N, 3)), np.full(N, -1), "class numbers from 0 to 2, or one-hot"),
        (GENERATOR.random((N, 4, 3)), np.zeros(N), r"of shape \(40, 4, 3\). Received: labels of shape \(40,\)"),
        (GENERATOR.random((N, 3)), np.full(N, "a"), "Labels must be class numbers, one-hot or 0 and 1"),
        (GENERATOR.random((N, 3)), np.zeros(N - 1), "one label per example. Received: 40 examples and 39 labels"),
    ],
)
def test_labels_that_do_not_fit(outputs, labels, message):
    with pytest.raises(ConfigError, match=message):
        score(outputs, labels)


def test_several_outputs_are_scored_by_name():
    outputs = {"a": GENERATOR.normal(size=(N, 3)), "b": GENERATOR.normal(size=(N, 1))}
    classes, yes = outputs["a"].argmax(axis=1), np.ones(N)
    share = float(np.mean(outputs["b"] > 0))
    assert Scorer("accuracy", {"a": classes, "b": yes}, outputs).scores(outputs) == {
        "a_accuracy": 1.0,
        "b_accuracy": share,
    }
    assert Scorer("accuracy", (classes, yes), outputs).value(outputs) == pytest.approx((1 + share) / 2)
    assert Scorer("accuracy", {"b": yes}, outputs).scores(outputs) == {"b_accuracy": share}
    for labels, message in [
        (classes, r"Labels for several outputs, \['a', 'b'\], must be a dict"),
        ({"c": yes}, r"by output name, \['a', 'b'\]. Received: \['c'\]"),
        ((yes,), r"as many arrays as outputs"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Scorer("accuracy", labels, outputs)


def test_a_quantized_model_is_read_as_the_float_one():
    """Its logits may all fall on the grid between 0 and 1."""
    scorer = Scorer("accuracy", np.ones(N), {"y": GENERATOR.normal(size=(N, 1))})
    assert scorer.value({"y": np.full((N, 1), 0.25)}) == 1.0
    assert scorer.agreement({"y": np.full((N, 1), 0.25)}, {"y": np.full((N, 1), 5.0)}) == 1.0


def test_a_function_gets_labels_and_outputs_as_they_are():
    outputs = {"a": np.zeros((N, 3)), "b": np.ones((N, 1))}
    labels = {"anything": np.zeros(N)}

    def closeness(given, received):
        assert given is labels
        return float(received["b"].mean() - received["a"].mean())

    scorer = Scorer(closeness, labels, outputs)
    assert scorer.scores(outputs) == {"closeness": 1.0}
    assert scorer.agreement(outputs, outputs) is None


def test_a_metric_of_keras_begins_anew_each_time():
    labels, outputs = np.array([1, 0, 1, 1]), {"y": np.array([[0.9], [0.1], [0.8], [0.2]])}
    scorer = Scorer(metrics.BinaryAccuracy(name="right"), labels[:, None], outputs)
    assert scorer.scores(outputs) == scorer.scores(outputs) == {"right": 0.75}
    assert scorer.value({"y": 1 - outputs["y"]}) == 0.25


def test_sums_that_branch_again_and_again_are_looked_at_once():
    total = x = keras.Input((3,))
    for _ in range(60):
        total = total + 0.5 * total
    assert output_ops(freeze(keras.Model(x, total))) == {"output_0": "AddV2"}


def test_the_op_that_computes_an_output():
    x = keras.Input((6, 4))
    dense = layers.Dense(3)(x)
    sequence = layers.Conv1D(1, 3, padding="same", activation="sigmoid")(x)
    outputs = {
        "MatMul": dense,
        "without bias": layers.Dense(1, use_bias=False)(x),
        "Sigmoid": layers.Dense(1, activation="sigmoid")(x),
        "reshaped": layers.Reshape((6,))(sequence),
        "cast": layers.Activation("sigmoid", dtype="float32")(layers.Dense(2, dtype="float16")(x)),
        "Softmax": layers.Softmax()(dense),
        "sliced": sequence[:, :, 0],
        "clipped": keras.ops.clip(layers.Softmax()(dense), 1e-7, 1 - 1e-7),
        "averaged": layers.Average()([layers.Softmax()(layers.Dense(3)(x)) for _ in range(3)]),
        "weighted": 0.25 * layers.Softmax()(dense) + 0.75 * layers.Softmax()(layers.Dense(3)(x)),
        "summed": layers.Add()([layers.Softmax()(layers.Dense(3)(x)) for _ in range(2)]),
        "Mul": 2.0 * dense,
        "inverse": 1.0 / layers.Softmax()(dense),
        "AddV2": layers.Add()([layers.Dense(3, activation="sigmoid")(x), dense]),
    }
    expected = {name: name for name in outputs}
    expected |= {"without bias": "MatMul", "reshaped": "Sigmoid", "sliced": "Sigmoid", "cast": "Sigmoid"}
    expected |= dict.fromkeys(("clipped", "averaged", "weighted"), "Softmax") | {
        "summed": "AddV2",
        "inverse": "RealDiv",
    }
    model = keras.Model(x, outputs)
    assert output_ops(freeze(model)) == output_ops(freeze(model, fold=False)) == expected
