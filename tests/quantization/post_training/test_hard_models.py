"""Models made hard to quantize: min-max alone fails on them, and the technique that is made for each recovers."""

import json
from dataclasses import replace
from pathlib import Path

import hard_models
import numpy as np
import pytest
import tensorflow as tf

from tests.quantization.post_training.test_accuracy_budget import top1_accuracy
from tfopt.data import digits
from tfopt.quantization import QuantizationConfig, quantize

ROOT = Path(__file__).parents[3]
MIN_MAX = QuantizationConfig(equalization=False, smooth_quant=0.0, bias_correction=False)


def test_the_recorded_figures_hold_what_is_promised():
    results = json.loads((ROOT / "benchmarks" / "results" / "quantization_accuracy.json").read_text())
    for name in ("mlp", "simple_cnn", "resnet_cifar"):
        figures = results["builders"][name]
        assert figures["default_accuracy"] >= figures["float_accuracy"] - 0.005, name
    assert len(results["hard"]) == 4
    for name, figures in results["hard"].items():
        assert figures["min_max"] < figures["float"] - 0.05, name
        assert figures["recovered"] >= figures["float"] - 0.01, name
    assert len(results["budget"]) == 3
    for name, figures in results["budget"].items():
        for accuracies in (figures["evaluation"], figures["held_out"]):
            assert accuracies["int8"] < accuracies["float"] - 0.005 <= accuracies["kept"], name
        assert figures["left_float"] <= figures["left_float_by_greedy"] < figures["nodes"], name


@pytest.fixture(scope="module")
def examples():
    return digits(image_size=16, test_fraction=0.5)


@pytest.fixture(scope="module")
def cnn(examples):
    return hard_models.trained("simple_cnn", examples, epochs=8, shift=0)


def accuracy(model, config, examples):
    quantized = quantize(model, config, calibration_data=examples.x_train)
    return top1_accuracy(examples.y_test, quantized.predict(examples.x_test))


def assert_recovers(model, config, examples):
    exact = top1_accuracy(examples.y_test, model.predict(examples.x_test, verbose=0))
    assert exact > 0.8
    assert accuracy(model, MIN_MAX, examples) < exact - 0.05
    assert accuracy(model, config, examples) >= exact - 0.01


@pytest.mark.slow
def test_equalization(examples, cnn):
    hard = hard_models.wide_channels(cnn)
    exact = cnn.predict(examples.x_test, verbose=0)
    np.testing.assert_allclose(
        hard.predict(examples.x_test, verbose=0), exact, atol=1e-3 * np.abs(exact).max(), rtol=1e-3
    )
    assert_recovers(hard, replace(MIN_MAX, equalization=True), examples)
    assert_recovers(hard, QuantizationConfig(), examples)


@pytest.mark.slow
def test_percentile(examples):
    model = hard_models.trained("mlp", examples, epochs=5, shift=0)
    hard, train = hard_models.hot_pixels(model, examples.x_train)
    test = hard_models.hot_pixels(model, examples.x_test)[1]
    slices = tf.data.Dataset.from_tensor_slices
    hot = replace(examples, train=slices((train, examples.y_train)), test=slices((test, examples.y_test)))
    assert_recovers(hard, replace(MIN_MAX, observer="percentile", percentile=99.5), hot)


@pytest.mark.slow
def test_smooth_quant(examples):
    model = hard_models.trained("transformer", examples, epochs=15, shift=0)
    assert_recovers(hard_models.outlier_channels(model, 1000.0), replace(MIN_MAX, smooth_quant=0.5), examples)


@pytest.mark.slow
def test_budget(examples, cnn):
    hard = hard_models.wide_channels(cnn, writers=("conv2", "dense2"))
    half = len(examples.x_test) // 2
    evaluation = (examples.x_test[:half], examples.y_test[:half])
    config = replace(MIN_MAX, max_accuracy_drop=0.01)
    quantized = quantize(hard, config, calibration_data=examples.x_train, evaluation_data=evaluation)
    assert len(quantized.report.skipped) <= 3
    held_out, labels = examples.x_test[half:], examples.y_test[half:]
    exact = top1_accuracy(labels, hard.predict(held_out, verbose=0))
    assert top1_accuracy(labels, quantized.predict(held_out)) >= exact - 0.01
