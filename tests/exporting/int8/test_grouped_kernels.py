"""The int8 kernel of grouped convolutions: one range for the weights of all channels, and exact integer arithmetic."""

import json

import keras
import numpy as np
import pytest
from keras import layers

from tfopt.atomic.checked_json import with_checksum
from tfopt.exporting.int8.kernels import lower_to_int8
from tfopt.exporting.int8.selection import UNKNOWN, select_int8
from tfopt.exporting.int8.time_table import feeds_of
from tfopt.exporting.int8.weights import decode_int8
from tfopt.graph import GraphEditor
from tfopt.quantization import QuantizationConfig, quantize

GENERATOR = np.random.default_rng(0)
OPTIONS = {
    "plain": {"filters": 24, "kernel_size": 3, "groups": 4},
    "filters": {"filters": 16, "kernel_size": (1, 3), "groups": 8},
    "strides": {"filters": 16, "kernel_size": 3, "groups": 2, "strides": (2, 1), "padding": "same"},
    "dilation": {"filters": 16, "kernel_size": 3, "groups": 4, "dilation_rate": 2, "padding": "same"},
    "each alone, dilated": {"filters": 16, "kernel_size": 3, "groups": 16, "dilation_rate": 2},
}


def branches():
    """Grouped convolutions of tensors with and without negative values, and with a zero point, one with a sum."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((9, 9, 16))
    outputs = []
    for before in (layers.ReLU(), layers.Activation("linear"), layers.Activation("swish")):
        x = before(layers.Conv2D(16, 1)(inputs))
        outputs += [layers.Conv2D(**each, bias_initializer="normal")(x) for each in OPTIONS.values()]
    shortcut = layers.ReLU()(layers.Conv2D(16, 1)(inputs))
    x = layers.Conv2D(16, 3, padding="same", groups=4)(layers.ReLU()(layers.Conv2D(16, 1)(shortcut)))
    outputs.append(layers.ReLU()(layers.Add()([x, shortcut])))
    return keras.Model(inputs, outputs)


X = GENERATOR.normal(size=(8, 9, 9, 16)).astype("float32")


@pytest.fixture(scope="module")
def quantized():
    return quantize(branches(), calibration_data=X)


def test_the_kernels_compute_the_annotated_graph(quantized):
    grouped = [fusion for fusion in quantized.graph.fusions if not fusion.per_channel]
    assert len(grouped) == 3 * len(OPTIONS) + 1
    assert sum(fusion.summand is not None for fusion in grouped) == 1
    assert all(fusion.bias is not None for fusion in grouped)
    ops = {node.op for node in lower_to_int8(quantized.graph).graph_def.node}
    assert not {"AddV2", "Relu", "Conv2D"} & ops
    lowered = lower_to_int8(quantized.graph)
    found, expected, exact = lowered.predict(X), quantized.predict(X), quantized.in_float().predict(X)
    decoded = decode_int8(quantized.graph, lowered).predict(X)
    for name, value in expected.items():
        largest = np.abs(exact[name]).max()
        assert np.abs(found[name] - value).max() < 0.02 * largest, name
        assert np.linalg.norm(found[name] - exact[name]) < 0.05 * np.linalg.norm(exact[name]), name
        assert np.linalg.norm(decoded[name] - exact[name]) < 0.03 * np.linalg.norm(exact[name]), name


def test_one_range_is_the_largest_of_all_channels(quantized):
    editor = GraphEditor(quantized.graph.graph_def)
    for fusion in quantized.graph.fusions:
        node = editor.nodes[fusion.weights]
        if node.op == "FakeQuantWithMinMaxVarsPerChannel" and not fusion.per_channel:
            weights, limits = editor.value(node.input[0]), editor.value(node.input[2])
            assert len({*limits.tolist()}) == 1
            assert limits[0] >= np.abs(weights).max()


def one_large_channel(share):
    """A grouped convolution whose other 63 channels have that share of the weights of the first, and one more layer."""
    layer = layers.Conv2D(64, 1, groups=4, use_bias=False)
    model = keras.Sequential([keras.Input((4, 4, 16)), layer, layers.Conv2D(4, 1)])
    signs = GENERATOR.choice([-1.0, 1.0], layer.kernel.shape)
    layer.kernel.assign(signs * np.where(np.arange(64) == 0, 1.0, share))
    return model


@pytest.mark.parametrize(("share", "is_float"), [(0.3, False), (0.1, True)])
def test_channels_that_differ_too_much_stay_float(share, is_float):
    """The first loses 1.6 bits, the second 2.6."""
    data = GENERATOR.normal(size=(8, 4, 4, 16)).astype("float32")
    report = quantize(one_large_channel(share), calibration_data=data).report
    assert [("differ too much" in skip.reason) for skip in report.skipped] == [True] * is_float
    assert len(report.changed) == 2 - is_float


@pytest.mark.slow
def test_adaptive_rounding_leaves_a_grouped_convolution_to_the_nearest():
    model = keras.Sequential([keras.Input((6, 6, 8)), layers.Conv2D(8, 3, groups=2), layers.Conv2D(4, 1, name="last")])
    x = GENERATOR.normal(size=(16, 6, 6, 8)).astype("float32")
    report = quantize(model, QuantizationConfig(rounding="adaptive"), calibration_data=x).report
    assert len(report.changed) == 2
    (rounded,) = (step.name for step in report.steps if step.kind == "adaptive_rounding")
    assert "last" in rounded


def test_a_time_table_of_an_earlier_version_leaves_them_in_float(tmp_path):
    inputs = keras.Input((9, 9, 16))
    x = layers.Conv2D(16, 3, groups=4, name="grouped")(layers.Conv2D(16, 3, name="dense")(inputs))
    model = quantize(keras.Model(inputs, x), calibration_data=X)
    feeds, times = feeds_of(model.float_graph, None, (1,)), tmp_path / "times.json"
    select_int8(model, feeds, times)
    table = json.loads(times.read_text())
    (grouped,) = (name for name in table["fusions"] if "grouped" in name)
    del table["fusions"][grouped]
    for each in table["fusions"].values():
        each["float_ms"], each["int8_ms"] = [100.0], [0.0]
    table["whole"] = {}
    times.write_text(json.dumps(with_checksum(table)))
    chosen, _ = select_int8(model, feeds, times)
    assert [(skip.name, skip.reason) for skip in chosen.report.skipped] == [(grouped, UNKNOWN)]
    assert len(chosen.report.changed) == 1
