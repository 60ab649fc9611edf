"""Each task from end to end on real data: train, prune, int8, export, verify, report; scores against references."""

import io
import json
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from rich.console import Console
from sklearn.datasets import load_diabetes
from sklearn.metrics import accuracy_score, jaccard_score, mean_absolute_error

from tfopt.data import arrays, digits
from tfopt.data.config import DataConfig
from tfopt.pruning import PruningConfig
from tfopt.quantization import QuantizationConfig
from tfopt.recipe import ModelConfig, Recipe
from tfopt.runner import run
from tfopt.tasks import Task
from tfopt.training import TrainingConfig

layers = keras.layers
UNCERTAIN = 255


def digit_masks():
    """Masks made from the real digits: ink, paper, and the grey edge between them, which does not count."""
    examples = digits(image_size=16)
    images = np.concatenate([examples.x_train, examples.x_test])
    ink = images[..., 0]
    masks = np.where(ink > 0.6, 1, np.where(ink > 0.4, UNCERTAIN, 0))
    found = arrays(images, masks, outputs=2, name="digit_masks", test_fraction=0.3)
    return replace(found, ignored_target=UNCERTAIN)


def digit_properties():
    """Several labels for each digit: odd, above four, prime."""
    examples = digits(image_size=8)
    images = np.concatenate([examples.x_train, examples.x_test])
    classes = np.concatenate([examples.y_train, examples.y_test])
    labels = np.stack([classes % 2, classes > 4, np.isin(classes, (2, 3, 5, 7))], axis=1).astype("float32")
    return arrays(images, labels, class_names=("odd", "above four", "prime"), test_fraction=0.3)


def diabetes():
    x, y = load_diabetes(return_X_y=True)
    return arrays((x / x.std(0)).astype("float32"), (y[:, None] / 100).astype("float32"), test_fraction=0.3)


def pixels(input_shape, outputs):
    x = inputs = keras.Input(input_shape)
    for filters in (8, 8):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Conv2D(outputs, 1, dtype="float32")(x))


def dense(input_shape, outputs):
    x = inputs = keras.Input(input_shape)
    x = layers.Dense(64, activation="relu")(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(outputs, dtype="float32")(x))


def causal(input_shape, outputs):
    x = inputs = keras.Input(input_shape, dtype="int32")
    x = layers.Embedding(outputs, 24)(x)
    for rate in (1, 2):
        x = layers.Conv1D(32, 3, padding="causal", dilation_rate=rate, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(outputs, dtype="float32")(x))


def mean_iou(targets, outputs):
    kept = targets != UNCERTAIN
    return jaccard_score(targets[kept], outputs.argmax(-1)[kept], average="macro")


def share_of_right_labels(targets, outputs):
    return accuracy_score(targets.ravel(), (outputs > 0).ravel())


def absolute_error(targets, outputs):
    return mean_absolute_error(targets.ravel(), outputs.ravel())


def bits_per_byte(targets, outputs):
    outputs = outputs.astype("float64")
    sums = np.log(np.exp(outputs).sum(-1))
    return (sums - np.take_along_axis(outputs, targets[..., None], -1)[..., 0]).mean() / np.log(2)


# Task, data, builder, epochs, name of the score, its reference, and a value that only a trained model reaches.
RUNS = {
    "segmentation": (DataConfig(source=digit_masks), pixels, 2, "mean_iou", mean_iou, 0.9),
    "multi_label_classification": (
        DataConfig(source=digit_properties),
        dense,
        6,
        "binary_accuracy_from_logits",
        share_of_right_labels,
        0.9,
    ),
    "regression": (DataConfig(source=diabetes), dense, 12, "mean_absolute_error", absolute_error, 0.55),
    "language_model": (
        DataConfig(
            source="text", arguments={"directory": str(Path(json.__file__).parent), "length": 64, "pattern": "*.py"}
        ),
        causal,
        6,
        "bits_per_byte",
        bits_per_byte,
        4.5,
    ),
}


SLOW = ("language_model", "multi_label_classification", "regression", "segmentation")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("task", [pytest.param(task, marks=[pytest.mark.slow] * (task in SLOW)) for task in RUNS])
def test_a_task_runs_from_training_to_the_report(task, tmp_path):
    data, builder, epochs, name, reference, reached = RUNS[task]
    recipe = Recipe(
        name=task,
        task=task,
        model=ModelConfig(builder=builder),
        data=data,
        training=TrainingConfig(epochs=epochs, global_batch_size=16, learning_rate=0.01),
        pruning=PruningConfig(target_sparsity=0.5, epochs=1, learning_rate=1e-3),
        quantization=QuantizationConfig(max_accuracy_drop=0.02),
        int8_nodes="all",  # the same in every run
        export_dir=str(tmp_path / "out"),
    )
    console = Console(file=io.StringIO(), width=200, color_system=None)
    result = run(recipe, console=console)
    assert result.ok
    assert list(result.receipts) == ["float32", "pruned", "int8"]
    examples = data.load()
    x, targets = examples.arrays("test")
    for artifact, receipt in result.receipts.items():
        assert list(receipt.scores) == [name]
        served = tf.saved_model.load(str(tmp_path / "out" / artifact)).signatures["serving_default"]
        (input_name,) = served.structured_input_signature[1]
        (outputs,) = served(**{input_name: tf.constant(x)}).values()
        assert receipt.scores[name] == pytest.approx(reference(targets, outputs.numpy()), rel=1e-4)
        better = receipt.scores[name] > reached if receipt.higher_is_better else receipt.scores[name] < reached
        assert better, receipt.scores
        if artifact != "float32" and task != "regression":  # a regression has no classes to agree on
            assert 0.6 < receipt.agreement <= 1
    assert (result.receipts["int8"].agreement is None) == (task == "regression")
    assert abs(result.receipts["pruned"].sparsity - 0.5) < 0.2
    assert sum(map(result.receipts["int8"].kernels.get, result.receipts["int8"].kernels)) > 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert task.replace("_", " ") in page
    label = {"mean_iou": "Mean IoU", "bits_per_byte": "Bits per byte", "mean_absolute_error": "Mean absolute error"}
    assert label.get(name, "ccuracy") in page
    assert label.get(name, "ccuracy").lower() in console.file.getvalue()


def two_views():
    """The digits as two inputs, the upper and the lower half, and two targets: the digit, and whether it is odd."""
    examples = digits(image_size=8)
    images = np.concatenate([examples.x_train, examples.x_test])
    classes = np.concatenate([examples.y_train, examples.y_test])
    found = arrays({"upper": images[:, :4], "lower": images[:, 4:]}, classes, test_fraction=0.3)
    return replace(found, decode=lambda x, y: (x, {"digit": y, "odd": tf.cast(y % 2, tf.float32)[None]}))


def two_towers(input_shape, outputs):
    inputs = {name: keras.Input(shape, name=name) for name, shape in input_shape.items()}
    towers = [layers.Dense(24, activation="relu")(layers.Flatten()(each)) for each in inputs.values()]
    x = layers.Concatenate()(towers)
    return keras.Model(inputs, {"digit": layers.Dense(outputs)(x), "odd": layers.Dense(1)(x)})


@pytest.mark.slow
def test_two_inputs_and_two_outputs_go_through_every_stage(tmp_path):
    losses = keras.losses
    task = Task(
        name="digit_and_odd",
        loss=lambda examples: {
            "digit": losses.SparseCategoricalCrossentropy(from_logits=True),
            "odd": losses.BinaryCrossentropy(from_logits=True),
        },
        metrics=lambda examples: {"digit": ["accuracy"]},
        score=lambda examples: "accuracy",
    )
    recipe = Recipe(
        name="two",
        task=task,
        model=ModelConfig(builder=two_towers),
        data=DataConfig(source=two_views),
        training=TrainingConfig(epochs=4, global_batch_size=32, learning_rate=0.01, checkpoint_dir=str(tmp_path / "c")),
        pruning=PruningConfig(target_sparsity=0.5, epochs=1, learning_rate=1e-3),
        quantization=QuantizationConfig(max_accuracy_drop=0.02),
        int8_nodes="all",  # the same in every run
        export_dir=str(tmp_path / "out"),
    )
    result = run(recipe, console=Console(file=io.StringIO(), width=200))
    assert result.ok
    for receipt in result.receipts.values():
        assert receipt.scores.keys() == {"digit_accuracy", "odd_accuracy"}
        assert min(receipt.scores.values()) > 0.8
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Digit accuracy" in page
    assert "Odd accuracy" in page
    console = Console(file=io.StringIO(), width=200)
    training = replace(recipe.training, checkpoint_dir=None, epochs=1)
    run(replace(recipe, training=training, export_dir=None, pruning=None, quantization=None), console=console)
    assert "on the validation examples: digit accuracy " in console.file.getvalue()
