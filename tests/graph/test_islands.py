"""Grouped convolutions become plain ops: none is left to XLA, and what Keras computes is computed."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfopt
from tfopt.graph import freeze
from tfopt.graph.islands import ISLAND, islands

GENERATOR = np.random.default_rng(0)


def drawn(seed):
    """A random grouped layer behind an input of open batch size, with a batch norm behind it, and its input's shape."""
    draw = np.random.default_rng(seed)
    rank = int(draw.choice([1, 2, 2]))
    groups = int(draw.choice([2, 3, 4, 8]))
    depth = int(draw.choice([1, 1, 2, 3]))
    filters = groups * int(draw.choice([1, 2, 3]))
    size = [int(each) for each in draw.integers(7, 14, rank)]
    kernel = [int(each) for each in draw.integers(1, 5, rank)]
    strides, dilations = [1] * rank, [1] * rank
    kind = draw.choice(["plain", "strides", "dilation"])
    if kind == "strides":
        strides = [int(each) for each in draw.integers(1, 4, rank)]
    if kind == "dilation":
        dilations = [int(draw.integers(2, 4))] * rank
        kernel = [min(each, 3) for each in kernel]
    layer = (layers.Conv1D if rank == 1 else layers.Conv2D)(
        filters,
        kernel,
        strides=strides,
        padding=str(draw.choice(["valid", "same"])),
        dilation_rate=dilations,
        groups=groups,
        use_bias=bool(draw.integers(2)),
        activation=draw.choice(["relu", "linear"]),
        bias_initializer="normal",
    )
    return layer, (*size, groups * depth)


def ops(graph):
    return [node.op for node in graph.graph_def.node]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 20))])
def test_two_hundred_random_layers_compute_what_keras_computes(part):
    inputs, outputs, values = [], [], []
    for seed in range(10 * part, 10 * part + 10):
        layer, shape = drawn(seed)
        inputs.append(keras.Input(shape))
        outputs.append(layers.BatchNormalization(moving_variance_initializer="ones")(layer(inputs[-1])))
        values.append(GENERATOR.normal(size=(2, *shape)).astype("float32"))
    model = keras.Model(inputs, outputs)
    graph = freeze(model)
    found = graph.predict(dict(zip(graph.inputs, values, strict=True)))
    for value, expected in zip(found.values(), model(values), strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5)
    assert not islands(graph.graph_def)


def of(shape, *stack):
    return keras.Sequential([keras.Input(shape), *stack])


@pytest.mark.parametrize("multiplier", [1, 2, 3])
def test_one_channel_in_each_group_is_depthwise_and_takes_what_follows(multiplier):
    model = of(
        (9, 9, 4), layers.Conv2D(4 * multiplier, 3, groups=4), layers.BatchNormalization(), layers.Activation("relu")
    )
    graph = freeze(model)
    assert [op for op in ops(graph) if op not in ("Const", "Placeholder", "Identity")] == [
        "DepthwiseConv2dNative",
        "BiasAdd",
        "Relu",
    ]
    x = GENERATOR.normal(size=(2, 9, 9, 4)).astype("float32")
    np.testing.assert_allclose(*graph.predict(x).values(), model(x), atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2])
def test_the_bias_of_a_grouped_one_is_added_apart(rank):
    """TensorFlow joins Conv2D and BiasAdd, which its kernel without oneDNN refuses for groups."""
    layer = {1: layers.Conv1D, 2: layers.Conv2D}[rank](6, 3, groups=2, activation="relu")
    model = of((*[9] * rank, 4), layer)
    layer.bias.assign([1.0] * 6)
    for graph in (freeze(model), freeze(model, fold=False)):
        found = [op for op in ops(graph) if op in ("Conv2D", "BiasAdd", "AddV2", "Relu")]
        assert found == ["Conv2D", "AddV2", "Relu"]


@pytest.mark.slow
def test_a_tensorflow_without_onednn_computes_the_artifact(tmp_path):
    model = of((9, 9, 4), layers.Conv2D(6, 3, groups=2, activation="relu"), layers.Conv2D(6, 3, strides=2, groups=6))
    x = GENERATOR.normal(size=(2, 9, 9, 4)).astype("float32")
    np.savez(tmp_path / "data.npz", x=x, expected=model(x))
    tfopt.export(model, tmp_path / "float32")
    code = """
import numpy as np, tensorflow as tf
data = np.load("data.npz")
serve = tf.saved_model.load("float32").signatures["serving_default"]
np.testing.assert_allclose(*serve(tf.constant(data["x"])).values(), data["expected"], atol=1e-5)
"""
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


def test_zero_padding_before_a_depthwise_one_is_its_own_where_it_is_that_of_same():
    model = of((9, 9, 4), layers.ZeroPadding2D(1), layers.Conv2D(4, 3, groups=4))
    assert "Pad" not in ops(freeze(model))


OTHERS = {
    "channels first": lambda: (layers.Conv2D(6, 3, groups=2, data_format="channels_first"), (4, 8, 7)),
    "channels first, each alone": lambda: (
        layers.Conv2D(4, 3, groups=4, padding="same", data_format="channels_first"),
        (4, 8, 7),
    ),
    "channels first, 1D": lambda: (layers.Conv1D(6, 3, groups=2, data_format="channels_first"), (4, 9)),
    "3D": lambda: (layers.Conv3D(6, 2, groups=2, strides=2), (5, 6, 7, 4)),
    "3D, each alone": lambda: (layers.Conv3D(4, 2, groups=4, padding="same"), (5, 6, 7, 4)),
    "3D, channels first": lambda: (layers.Conv3D(6, 2, data_format="channels_first"), (4, 5, 6, 7)),
    "3D, channels first, groups": lambda: (
        layers.Conv3D(6, 2, groups=2, padding="same", data_format="channels_first"),
        (4, 5, 6, 7),
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_without_xla(name):
    layer, shape = OTHERS[name]()
    model = of(shape, layer)
    graph = freeze(model)
    x = GENERATOR.normal(size=(2, *shape)).astype("float32")
    np.testing.assert_allclose(*graph.predict(x).values(), model(x), atol=1e-5)
    assert not islands(graph.graph_def)


def test_the_islands_of_a_saved_model_are_opened(tmp_path):
    model = of((9, 9, 4), layers.Conv2D(6, 3, groups=2, activation="relu"), layers.Conv2D(6, 3, groups=6))
    model.export(tmp_path / "keras", verbose=False)
    graph = freeze(tmp_path / "keras")
    assert {"Conv2D", "DepthwiseConv2dNative"} <= {*ops(graph)}
    assert not graph.graph_def.library.function
    x = GENERATOR.normal(size=(2, 9, 9, 4)).astype("float32")
    np.testing.assert_allclose(*graph.predict(x).values(), model(x), atol=1e-5)


class Own(layers.Layer):
    """A layer with an island of its own."""

    def __init__(self, function):
        super().__init__()
        self.function = tf.function(function, jit_compile=True)

    def call(self, x):
        return self.function(x)


def test_an_island_of_the_users_layer_is_opened():
    graph = freeze(of((3,), Own(lambda x: tf.nn.relu(x) + 1)))
    assert "Relu" in ops(graph)
    assert not islands(graph.graph_def)


def test_an_island_that_only_xla_computes_stays_with_its_reason(tmp_path):
    layer = layers.Conv3D(4, 2, groups=2)
    model = of((4, 4, 4, 4), layer)
    model.export(tmp_path / "keras", verbose=False)
    with pytest.warns(tfopt.errors.TfoptWarning, match="XLA still compiles .*Conv3D knows no groups"):
        graph = freeze(tmp_path / "keras")
    (reason,) = islands(graph.graph_def).values()
    assert "Conv3D" in reason
    x = GENERATOR.normal(size=(2, 4, 4, 4, 4)).astype("float32")
    np.testing.assert_allclose(*graph.predict(x).values(), model(x), atol=1e-5)


def test_an_exported_network_in_int8(tmp_path):
    model = of(
        (16, 16, 8),
        layers.Conv2D(8, 3, padding="same", groups=8),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Conv2D(8, 3, groups=2),
    )
    x = GENERATOR.normal(size=(32, 16, 16, 8)).astype("float32")
    config = tfopt.ExportConfig(precision="int8", int8_nodes="all")
    artifact = tfopt.export(model, tmp_path / "int8", config, calibration_data=[x])
    assert [change.kind for change in artifact.report.changed] == ["DepthwiseConv2dNative", "Conv2D"]
    assert not artifact.report.skipped
    assert "with one range" in artifact.report.changed[1].detail
    loaded = tf.saved_model.load(str(tmp_path / "int8")).signatures["serving_default"]
    functions = loaded.graph.as_graph_def().library.function
    nodes = [node for function in functions for node in function.node_def]
    assert {"_FusedQuantizedDepthwiseConv2D", "_FusedQuantizedConv2D"} <= {node.op for node in nodes}
    assert not any(ISLAND in node.attr for node in nodes)
    (found,) = loaded(tf.constant(x)).values()
    assert np.linalg.norm(found - model(x)) < 0.05 * np.linalg.norm(model(x))
