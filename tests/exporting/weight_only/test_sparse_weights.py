"""Weights stored without their zeros: the same bits after decoding, in a process without tfopt, and a small file."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfopt
from tfopt.errors import ConfigError, TfoptWarning
from tfopt.exporting import ExportConfig, SavedModelProcess, export, verify
from tfopt.exporting.manifest import read_manifest
from tfopt.exporting.stored_weights import encode_zeros
from tfopt.graph import freeze

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(16, 12, 12, 3)).astype("float32")
TOKENS = GENERATOR.integers(0, 300, (6, 12)).astype("int32")


def pruned(model, share=0.9):
    tfopt.prune(model, tfopt.PruningConfig(target_sparsity=share))
    return model


def images():
    """Two outputs, and weights of several pieces, the last one incomplete: 700 * 53 values."""
    image = keras.Input((12, 12, 3), name="image")
    hidden = layers.Conv2D(41, 3, activation="relu")(image)
    hidden = layers.BatchNormalization()(hidden)
    hidden = layers.Conv2D(7, 3)(hidden)
    hidden = layers.Flatten()(hidden)
    hidden = layers.Dense(700, activation="relu")(hidden)
    hidden = layers.Dense(53, activation="relu")(hidden)
    return pruned(keras.Model(image, {"one": layers.Dense(5)(hidden), "two": layers.Dense(41)(hidden)}))


def words():
    """An embedding, a loop and a tied projection, with an open length."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    embedding = layers.ReversibleEmbedding(300, 41)
    return pruned(keras.Model(tokens, embedding(layers.LSTM(41)(embedding(tokens)), reverse=True)))


@pytest.mark.parametrize(
    ("make", "inputs", "settings"),
    [
        pytest.param(images, {"image": X}, {}, marks=pytest.mark.slow),
        pytest.param(images, {"image": X}, {"precision": "int8", "int8_nodes": "all"}, marks=pytest.mark.slow),
        (words, {"tokens": TOKENS}, {"xla_signature": True}),
    ],
)
def test_the_outputs_are_those_of_the_dense_artifact(make, inputs, settings, tmp_path):
    model, data = make(), next(iter(inputs.values()))
    dense = export(model, tmp_path / "dense", ExportConfig(**settings), calibration_data=data)
    config = ExportConfig(sparse_weights=True, **settings)
    sparse = export(model, tmp_path / "sparse", config, calibration_data=data)
    manifests = [read_manifest(tmp_path / name) for name in ("dense", "sparse")]
    assert len({(each.requires, each.needs_vnni) for each in manifests}) == 1
    assert sparse.report.metrics["weight_bytes"] < sparse.report.metrics["weight_bytes_before"] / 3
    saved = sparse.report.metrics["weight_bytes_before"] - sparse.report.metrics["weight_bytes"]
    assert dense.bytes_on_disk - sparse.bytes_on_disk > 0.6 * saved
    with SavedModelProcess(tmp_path / "dense") as one, SavedModelProcess(tmp_path / "sparse") as other:
        expected, found = one.predict(inputs), other.predict(inputs)
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)
        assert one.count_weights() == other.count_weights()
    assert verify(tmp_path / "sparse").ok


def test_decoded_weights_have_the_same_bits():
    model = keras.Sequential([keras.Input((90,)), layers.Dense(301, use_bias=False)])
    kernel = GENERATOR.normal(size=(90, 301)) * (GENERATOR.random((90, 301)) < 0.2)
    kernel[0, :4] = (-0.0, np.inf, 1e-42, 0.0)
    model.layers[0].kernel.assign(kernel)
    graph, report = encode_zeros(freeze(model))
    (change,) = report.changed
    nonzero = np.count_nonzero(kernel)
    assert change.detail.endswith(f"zeros, {90 * 301 * 4:,} -> {-(-90 * 301 // 8) + 4 * nonzero:,} bytes")
    name = next(name for name in (node.name for node in graph.graph_def.node) if name.endswith("MatMul"))
    product = next(node for node in graph.graph_def.node if node.name == name)
    function = tf.compat.v1.wrap_function(
        lambda: tf.graph_util.import_graph_def(graph.graph_def, return_elements=[f"{product.input[1]}:0"]), []
    )
    (decoded,) = function()
    np.testing.assert_array_equal(decoded.numpy().view("u4"), np.float32(kernel).view("u4"))


def test_tensorflow_decodes_them_once():
    """What runs after TensorFlow's own optimizer is what runs of the dense graph, and nothing that decodes."""

    def executed(graph):
        options, metadata = tf.compat.v1.RunOptions(output_partition_graphs=True), tf.compat.v1.RunMetadata()
        with tf.compat.v1.Session(graph=tf.Graph()) as session:
            tf.graph_util.import_graph_def(graph.graph_def, name="")
            tensors, (spec,) = [f"{tensor}:0" for tensor, _ in graph.outputs.values()], graph.inputs.values()
            session.run(tensors, {f"{spec.name}:0": X}, options=options, run_metadata=metadata)
        return collections.Counter(node.op for part in metadata.partition_graphs for node in part.node)

    dense = freeze(images())
    encoded, _ = encode_zeros(dense)
    decoding = {"RightShift", "BitwiseAnd", "Cumsum", "GatherV2", "ConcatV2"}
    assert decoding <= {node.op for node in encoded.graph_def.node}
    assert not decoding.intersection(executed(encoded))
    assert executed(encoded).keys() <= executed(dense).keys() | {"Const"}


@pytest.mark.slow
def test_an_artifact_of_sparse_weights_can_be_exported_again(tmp_path):
    model = images()
    export(model, tmp_path / "sparse", ExportConfig(sparse_weights=True))
    export(str(tmp_path / "sparse"), tmp_path / "again")
    config = ExportConfig(precision="int8", int8_nodes="all")
    artifact = export(str(tmp_path / "sparse"), tmp_path / "int8", config, calibration_data=X)
    assert [change.kind for change in artifact.report.changed].count("Conv2D") == 2
    expected = model(X)
    for name, tolerance in (("again", 1e-6), ("int8", 0.1)):
        found = tf.saved_model.load(tmp_path / name).signatures["serving_default"](image=tf.constant(X))
        np.testing.assert_allclose(found["two"], expected["two"], atol=tolerance * np.abs(expected["two"]).max())


def test_a_model_without_zeros_warns(tmp_path):
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64)])
    with pytest.warns(TfoptWarning, match="sparse_weights changed nothing: no weight has enough zeros"):
        artifact = export(model, tmp_path / "a", ExportConfig(sparse_weights=True))
    assert [skip.reason for skip in artifact.report.skipped] == ["0% zeros are too few to save bytes"]


def test_other_precisions_store_weights_in_their_own_way():
    with pytest.raises(ConfigError, match=r"sparse_weights belongs to precision='float32' or 'int8'. Received: prec"):
        ExportConfig(precision="float16", sparse_weights=True)
