"""What verify makes of labelled examples: every kind of classifier, several outputs, and metrics of one's own."""

import keras
import numpy as np
import pytest
from keras import layers, metrics

from tfopt.cli import main
from tfopt.errors import ConfigError
from tfopt.exporting import ExportConfig, export, verify
from tfopt.exporting.verification import scoring

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
    outputs = keras.tree.map_structure(np.asarray, model(X))
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
    assert f"{receipt.scores['tags_accuracy']:.2%} (baseline" in str(receipt)


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


class Closest:
    """A score of one's own: the smallest difference to a target."""

    name = "closest"
    higher_is_better = False

    def __init__(self):
        self.smallest = np.inf

    def update(self, targets, outputs):
        self.smallest = min(self.smallest, float(np.abs(targets - outputs).min()))

    def result(self):
        return self.smallest


@pytest.mark.one_in(2)
@pytest.mark.parametrize("metric", ["mean_iou", "mean_absolute_error", Closest()])
def test_a_score_is_updated_chunk_by_chunk(metric, model, artifacts, monkeypatch):
    """The examples of a large test part are not in memory together. Chunks of one batch give what all together do."""
    labels = {"parts": LABELS["parts"]} if metric == "mean_iou" else {"kind": LABELS["kind"]}
    whole = verify(artifacts / "int8", data=(X, labels), metric=metric, seconds=0)
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 1)
    batches = [(X[i : i + 7], {name: value[i : i + 7] for name, value in labels.items()}) for i in range(0, 40, 7)]
    receipt = verify(artifacts / "int8", data=iter(batches), metric=metric, seconds=0)
    assert receipt.scores == pytest.approx(whole.scores)
    assert receipt.baseline_scores == pytest.approx(whole.baseline_scores)
    outputs = keras.tree.map_structure(np.asarray, model(X))
    if metric == "mean_iou":
        reference = metrics.MeanIoU(3, sparse_y_pred=False)
        reference.update_state(LABELS["parts"], outputs["parts"])
        assert receipt.baseline_scores == {"parts_mean_iou": pytest.approx(float(reference.result()), abs=1e-6)}
        assert 0.8 < receipt.agreement == pytest.approx(whole.agreement)
        assert receipt.show("accuracy") == "unavailable (the score is mean_iou)"
        assert "parts mean iou" in str(receipt)
    else:
        difference = np.abs(outputs["kind"] - LABELS["kind"])
        expected = difference.mean() if isinstance(metric, str) else difference.min()
        assert list(receipt.baseline_scores.values()) == [pytest.approx(expected, abs=1e-5)]
        assert (receipt.higher_is_better, receipt.agreement) == (False, None)


def test_a_gate_is_a_share_of_the_score_of_the_baseline(tmp_path, capsys):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
    x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
    export(model, tmp_path / "float32")
    noisy = keras.models.clone_model(model)
    noisy.set_weights([w + np.random.default_rng(1).normal(0, 0.5, w.shape) for w in model.get_weights()])
    export(noisy, tmp_path / "noisy", baseline=tmp_path / "float32")
    labels = np.asarray(model(x)).argmax(-1)  # the baseline is right always
    share = np.mean(np.asarray(noisy(x)).argmax(-1) == labels)
    assert 0.3 < share < 0.98
    for gate, ok in ((share - 0.01, True), (share + 0.01, False)):
        receipt = verify(tmp_path / "noisy", data=(x, labels), seconds=0, gate=float(gate))
        assert receipt.ok == ok
    assert receipt.problems == [f"The accuracy is {share:.2%} of the baseline's; the gate is {share + 0.01:.2%}."]
    np.savez(tmp_path / "data.npz", x=x, y=labels)
    words = ["verify", str(tmp_path / "noisy"), "--data", str(tmp_path / "data.npz"), "--gate", "99%"]
    assert main(words) == 1
    assert "the gate is 99.00%" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="gate needs labelled examples"):
        verify(tmp_path / "noisy", gate=0.99)
