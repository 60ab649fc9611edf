"""What verify makes of labelled examples: every kind of classifier, several outputs, and metrics of one's own."""

import keras
import numpy as np
import pytest
from keras import layers, metrics

from tfopt.errors import ConfigError
from tfopt.exporting import ExportConfig, export, verify

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(40, 8, 8, 3)).astype("float32")
LABELS = {
    "mask": GENERATOR.integers(0, 2, (40, 8, 8)),
    "kind": np.eye(4)[GENERATOR.integers(0, 4, 40)],
    "tags": GENERATOR.integers(0, 2, (40, 5)).astype("float32"),
    "parts": GENERATOR.integers(0, 3, (40, 8, 8)),
}


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 3), name="image")
    pixels = layers.Conv2D(8, 3, padding="same", activation="relu")(image)
    pooled = layers.GlobalAveragePooling2D()(pixels)
    outputs = {
        "mask": layers.Conv2D(1, 1, activation="sigmoid", bias_initializer="normal")(pixels),
        "parts": layers.Conv2D(3, 1)(pixels),
        "kind": layers.Dense(4)(pooled),
        "tags": layers.Dense(5, activation="sigmoid")(pooled),
    }
    return keras.Model(image, outputs)


@pytest.fixture(scope="module")
def artifacts(model, tmp_path_factory):
    """float32/ and int8/, the first being the second's baseline, and single/ with one sigmoid output. Read only."""
    root = tmp_path_factory.mktemp("scores")
    export(model, root / "float32")
    int8 = ExportConfig(precision="int8", int8_nodes="all")
    export(model, root / "int8", int8, calibration_data=X, baseline=root / "float32")
    export(keras.Model(model.inputs, layers.Flatten()(model.output["mask"])[:, :1]), root / "single")
    return root


def test_classifiers_of_every_kind_in_one_model(model, artifacts):
    receipt = verify(artifacts / "int8", data=(X, LABELS), seconds=0.01)
    outputs = model.predict(X, verbose=0)
    kinds = {
        "mask": (metrics.BinaryAccuracy(), LABELS["mask"][..., None]),
        "parts": (metrics.SparseCategoricalAccuracy(), LABELS["parts"]),
        "kind": (metrics.CategoricalAccuracy(), LABELS["kind"]),
        "tags": (metrics.BinaryAccuracy(), LABELS["tags"]),
    }
    for name, (metric, labels) in kinds.items():
        metric.update_state(labels, outputs[name])
        expected = float(metric.result())
        assert receipt.baseline_scores[f"{name}_accuracy"] == pytest.approx(expected, abs=1e-6), name
        assert receipt.scores[f"{name}_accuracy"] == pytest.approx(expected, abs=0.06), name
    assert receipt.scores.keys() == receipt.baseline_scores.keys() == {f"{name}_accuracy" for name in kinds}
    assert receipt.accuracy is receipt.baseline_accuracy is None
    assert receipt.show("accuracy") == "unavailable (each output has its own)"
    assert 0.9 < receipt.agreement <= 1
    assert f"{receipt.scores['tags_accuracy']:.4g} (baseline" in str(receipt)


def test_a_single_output_and_a_function(artifacts):
    labels = LABELS["mask"][:, 0, 0]

    def closeness(labels, outputs):
        return -float(np.abs(labels[:, None] - outputs).mean())

    binary = verify(artifacts / "single", data=(X, {"output_0": labels}), seconds=0.01)
    assert 0.2 < binary.accuracy == binary.scores["accuracy"] < 0.8
    receipt = verify(artifacts / "single", data=(X, labels), metric=closeness, seconds=0.01)
    assert receipt.accuracy is None
    assert receipt.show("accuracy") == "unavailable (metric is a function)"
    assert -0.7 < receipt.scores["closeness"] < -0.3


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        pytest.param(LABELS["kind"], "Labels for several outputs, .*'kind', 'mask', 'p", marks=pytest.mark.slow),
        ({"nothing": LABELS["kind"]}, r"by output name, .*Received: \['nothing'\]"),
    ],
)
def test_what_cannot_be_scored(labels, message, artifacts):
    with pytest.raises(ConfigError, match=message):
        verify(artifacts / "float32", data=(X, labels), seconds=0.01)


def test_an_unknown_metric(artifacts):
    with pytest.raises(ConfigError, match="Unknown metric 'top5'"):
        verify(artifacts / "float32", data=(X, LABELS), metric="top5")
