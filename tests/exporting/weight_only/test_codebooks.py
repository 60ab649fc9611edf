"""Clustered weights as places in a codebook: the values as they were, in a process that has only TensorFlow."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import tfopt
from tfopt.errors import ConfigError, TfoptWarning
from tfopt.exporting import ExportConfig, SavedModelProcess, export, verify
from tfopt.exporting.stored_weights import CODEBOOK, encode_weights, shares_values
from tfopt.graph import fold_constants, freeze
from tfopt.quantization import WeightOnlyConfig
from tfopt.quantization.weight_only import find_codebook

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(16, 12, 12, 3)).astype("float32")
TOKENS = GENERATOR.integers(0, 300, (6, 12)).astype("int32")


def images():
    """Normalized convolutions, and sizes that leave bytes and pieces incomplete: 567 * 53 values."""
    inputs = keras.Input((12, 12, 3), name="image")
    x = inputs
    for layer in (layers.Conv2D(41, 3), layers.Conv2D(7, 3, padding="same"), layers.Conv2DTranspose(7, 3)):
        x = layers.BatchNormalization(gamma_initializer="random_uniform")(layer(x))
    return keras.Model(inputs, layers.Dense(5)(layers.Dense(53, "relu")(layers.Flatten()(x))))


def words():
    """An embedding, a loop and a tied projection: rows of a table, and the same table transposed."""
    tokens = keras.Input((12,), dtype="int32", name="tokens")
    embedding = layers.ReversibleEmbedding(300, 21)
    return keras.Model(tokens, embedding(layers.LSTM(21)(layers.Embedding(300, 21)(tokens)), reverse=True))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1]), st.sampled_from([2, 16, 17, 256]), st.booleans())
def test_a_codebook_holds_a_matrix_as_it_is(seed, channel_axis, count, shared):
    rng = np.random.default_rng(seed)
    shape = (rng.integers(1, 5), 4000) if channel_axis == 0 else (4000, rng.integers(1, 5))
    tables = rng.normal(size=(1 if shared else shape[channel_axis], count)).astype(np.float32)
    rows = np.stack([rng.choice(tables[place % len(tables)], 4000) for place in range(shape[channel_axis])])
    matrix = rows if channel_axis == 0 else rows.T
    book = find_codebook(matrix, channel_axis)
    np.testing.assert_array_equal(book.decoded(), matrix)
    one = shared or len(tables) == 1 or len(np.unique(tables)) <= 256
    assert book.bits == (4 if len(np.unique(tables) if one else tables[0]) <= 16 else 8)
    assert (book.first.size == 1) == one
    assert np.abs(book.steps + 0.5).max() < 2 ** (book.bits - 1)


def test_places_that_float32_does_not_hold_make_no_codebook(monkeypatch):
    rng = np.random.default_rng(0)
    matrix = np.stack([rng.choice(rng.normal(size=16), 400) for _ in range(40)]).astype(np.float32)
    assert find_codebook(matrix, 0) is not None
    monkeypatch.setattr("tfopt.quantization.weight_only.EXACT_PLACES", 16 * 40 - 1)
    assert find_codebook(matrix, 0) is None


@pytest.mark.parametrize(
    ("build", "per", "decode"),
    [
        (images, "layer", "load"),
        (words, "channel", "call"),
        pytest.param(images, "channel", "call", marks=pytest.mark.slow),
        pytest.param(words, "layer", "load", marks=pytest.mark.slow),
        pytest.param(words, "layer", "call", marks=pytest.mark.slow),
    ],
)
def test_the_outputs_are_those_of_the_clustered_model(build, per, decode):
    model, inputs = build(), X if build is images else TOKENS
    tfopt.cluster(model, tfopt.ClusteringConfig(clusters=5, per=per, minimum_size=128))
    graph = freeze(model)
    kept = fold_constants(freeze(model, fold=False), keep=shares_values)
    encoded, report = encode_weights(kept, CODEBOOK, WeightOnlyConfig(decode=decode, minimum_size=300))
    expected = graph.predict(inputs)["output_0"]
    np.testing.assert_allclose(encoded.predict(inputs)["output_0"], expected, atol=1e-5 * np.abs(expected).max())
    assert len(report.changed) == 4
    assert report.metrics["relative_error"] == 0
    if per == "layer":  # also where a normalization follows
        assert report.metrics["bits_per_weight"] == pytest.approx(4, abs=0.1)


@pytest.fixture(scope="module")
def clustered():
    model = keras.Sequential([keras.Input((256,), name="x"), layers.Dense(512, "relu"), layers.Dense(512)])
    tfopt.prune(model, tfopt.PruningConfig(target_sparsity=0.5))
    tfopt.cluster(model)
    return model


@pytest.mark.slow  # processes of their own
def test_small_on_disk_and_as_declared_in_a_fresh_process(clustered, tmp_path):
    x = GENERATOR.normal(size=(8, 256)).astype("float32")
    full = export(clustered, tmp_path / "float32", calibration_data=x)
    artifact = export(
        clustered, tmp_path / "a", ExportConfig(precision=CODEBOOK), calibration_data=x, baseline=full.path
    )
    assert artifact.bytes_on_disk <= 0.16 * full.bytes_on_disk
    manifest = json.loads(Path(artifact.path, "manifest.json").read_text())
    assert (manifest["precision"], manifest["requires"]) == (CODEBOOK, "TensorFlow")
    receipt = verify(artifact.path, seconds=0.01)
    assert receipt.ok
    assert receipt.parity_relative_error < 1e-6
    assert receipt.computes == "float32, weights in codebook"
    assert (receipt.weight_count, receipt.zero_count) == (256 * 512 + 512 * 512, (256 * 512 + 512 * 512) // 2)
    with SavedModelProcess(full.path) as one, SavedModelProcess(artifact.path) as other:
        expected, found = (each.predict({"x": x})["output_0"] for each in (one, other))
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_tensorflow_decodes_it_once(clustered):
    encoded, _ = encode_weights(freeze(clustered), CODEBOOK, WeightOnlyConfig())
    options, metadata = tf.compat.v1.RunOptions(output_partition_graphs=True), tf.compat.v1.RunMetadata()
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        tf.graph_util.import_graph_def(encoded.graph_def, name="")
        (tensor, _), (spec,) = encoded.outputs["output_0"], encoded.inputs.values()
        feed = {f"{spec.name}:0": np.ones((2, 256), np.float32)}
        session.run(f"{tensor}:0", feed, options=options, run_metadata=metadata)
    run = [node.op for graph in metadata.partition_graphs for node in graph.node]
    assert sum("MatMul" in op for op in run) == 2
    assert not {"Cast", "GatherV2", "ConcatV2"}.intersection(run)
    assert {"Cast", "GatherV2", "ConcatV2"} <= {node.op for node in encoded.graph_def.node}


def test_weights_that_share_no_values_stay_float32_with_the_remedy(tmp_path):
    model = keras.Sequential([keras.Input((64,)), layers.Dense(32)])
    with pytest.warns(TfoptWarning, match="changed nothing: its values are too many for a codebook: tfopt.cluster"):
        export(model, tmp_path / "a", ExportConfig(precision=CODEBOOK))
    with pytest.raises(ConfigError, match=r"precision must be one of .* with format='onnx'"):
        ExportConfig(precision=CODEBOOK, format="onnx")
