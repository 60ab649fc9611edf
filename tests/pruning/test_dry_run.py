"""A dry run tells what pruning will buy, and changes nothing."""

import gzip
import math
import re
from dataclasses import replace

import keras
import numpy as np
import pytest
from keras import layers

import tfopt
from tfopt import PruningConfig, StructuredPruningConfig
from tfopt.errors import ConfigError, TfoptWarning
from tfopt.pruning.call_times import Latency, compare_latency, timed_function


def dense(sizes=(8, 8, 3)):
    keras.utils.set_random_seed(0)
    image = keras.Input(sizes)
    hidden = layers.Conv2D(32, 3, name="conv")(image)
    return keras.Model(image, layers.Dense(4, name="logits")(layers.GlobalMaxPooling2D()(hidden)))


def bytes_of(model):
    return b"".join(variable.numpy().tobytes() for variable in model.variables)


@pytest.mark.slow
def test_zeros_buy_bytes_and_no_speed():
    model, pruned = dense(), dense()
    before = bytes_of(model)
    config = PruningConfig(target_sparsity=0.9)
    with pytest.warns(TfoptWarning, match=r"The zeros will buy no speed: .* weights [\d.]+x smaller"):
        report = tfopt.prune(model, config, dry_run=True)
    tfopt.prune(pruned, config)
    assert bytes_of(model) == before
    assert model.get_layer("conv").kernel.constraint is None
    figures = report.metrics
    assert figures["latency_ms"] > 0
    assert {name: value for name, value in figures.items() if name != "latency_ms"} == {
        "sparsity": pytest.approx(0.9, abs=1e-3),
        "nonzero_parameters_before": sum(np.count_nonzero(value) for value in model.get_weights()),
        "nonzero_parameters": sum(np.count_nonzero(value) for value in pruned.get_weights()),
        "bytes_before": len(before),
        "bytes": len(before),
        "gzip_bytes_before": len(gzip.compress(before, compresslevel=6)),
        "gzip_bytes": len(gzip.compress(bytes_of(pruned), compresslevel=6)),
        "multiply_adds": 6 * 6 * 3 * 3 * 3 * 32 + 32 * 4,
    }
    assert [change.detail for change in report.changed] == [
        f"{share:.1%} zeros in kernel {shape}"
        for shape in ((3, 3, 3, 32), (32, 4))
        for share in [round(0.9 * math.prod(shape)) / math.prod(shape)]
    ]
    with pytest.warns(TfoptWarning, match="Only sparse tensor cores, for example under TensorRT, use 2:4"):
        tfopt.prune(model, PruningConfig(pattern="2:4", target_sparsity=0.5), dry_run=True)


@pytest.mark.slow
def test_channels_buy_both():
    model = dense()
    config = StructuredPruningConfig(ratio=0.5)
    tried, done = tfopt.shrink(model, config, dry_run=True), tfopt.shrink(model, config)
    assert tried.model is None
    assert tried.channels == done.channels
    figures = tried.report.metrics
    assert figures["bytes"] == len(bytes_of(done.model)) == 4 * figures["parameters"]
    assert figures["gzip_bytes"] == len(gzip.compress(bytes_of(done.model), compresslevel=6))
    assert figures["latency_ms"] > 0
    (speed,) = tried.report.steps
    assert speed.kind == "latency at batch size 1"
    assert re.fullmatch(r"(about even|[\d.]+x as fast), [\d.]+x to [\d.]+x", speed.detail)
    assert done.report.metrics == {name: figures[name] for name in done.report.metrics}


@pytest.mark.slow
def test_equal_models_are_about_even_however_noisy_the_machine():
    function = timed_function(dense(), 1)
    assert compare_latency(function, function).speed.startswith("about even")
    clear = Latency(before_ms=2, after_ms=1, ratio=0.5, least=0.4, most=0.6)
    assert clear.speed == "2.00x as fast, 1.67x to 2.50x"
    assert replace(clear, most=0.95).speed == "about even, 1.05x to 2.50x"


def test_an_open_size_leaves_the_latency_unknown():
    model = dense((None, None, 3))
    (unknown,) = [
        skip
        for skip in tfopt.shrink(model, StructuredPruningConfig(ratio=0.5), dry_run=True).report.skipped
        if skip.kind == "latency"
    ]
    assert unknown.reason.startswith("not measured. The input must have fixed sizes")
    with pytest.warns(TfoptWarning, match="will buy no speed"):
        report = tfopt.prune(model, PruningConfig(target_sparsity=0.5), dry_run=True)
    assert "latency_ms" not in report.metrics
    assert report.metrics["gzip_bytes"] < report.metrics["gzip_bytes_before"]


def test_a_dry_run_of_nothing_warns():
    with pytest.warns(TfoptWarning, match="prune changed nothing"):
        tfopt.prune(dense(), PruningConfig(target_sparsity=0.0), dry_run=True)


def test_a_dry_run_needs_keras_3():
    import tf_keras

    model = tf_keras.Sequential([tf_keras.layers.Input((4,)), tf_keras.layers.Dense(2)])
    with pytest.raises(ConfigError, match="dry_run must be False for a tf_keras model"):
        tfopt.prune(model, dry_run=True)
