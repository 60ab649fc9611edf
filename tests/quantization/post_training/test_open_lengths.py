"""Sequences of open length: as much in int8 as for a fixed length, and the same values."""

from collections import Counter

import keras
import numpy as np
import pytest
from keras import layers

from tfopt.exporting.int8.kernels import lower_to_int8
from tfopt.quantization import QuantizationConfig, quantize

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, 50, (32, 24)).astype("int32")
TOKENS[:, 18:] = 0


def transformer(length, *, mask):
    keras.utils.set_random_seed(0)
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(50, 16, mask_zero=mask)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(32, activation="gelu")(x)))
    return keras.Model(tokens, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


@pytest.mark.slow
@pytest.mark.parametrize("mask", [False, True])
def test_attention_over_an_open_length_is_int8_where_it_is_for_a_fixed_one(mask):
    fixed, any_length = (transformer(length, mask=mask) for length in (24, None))
    lowered = []
    for model in (fixed, any_length):
        quantized = quantize(model, calibration_data=TOKENS)
        assert [skip.kind for skip in quantized.report.skipped] == ["BatchMatMulV2", "BatchMatMulV2"]
        assert all("a product of two computed tensors" in skip.reason for skip in quantized.report.skipped)
        lowered.append(lower_to_int8(quantized.graph))
    counts = [Counter(node.op for node in graph.graph_def.node) for graph in lowered]
    for op in ("_QuantizedMatMul", "_MklLayerNorm", "QuantizeV2", "Dequantize", "BatchMatMulV2", "Transpose", "Einsum"):
        assert counts[0][op] == counts[1][op], op
    assert counts[0]["_QuantizedMatMul"] == 7
    one, other = (graph.predict(TOKENS)["output_0"] for graph in lowered)
    np.testing.assert_allclose(one, other, atol=1e-5)
    # The ranges are those of 24 tokens, so another length is compared with a tolerance.
    exact = any_length(TOKENS[:, :17]).numpy()
    found = lowered[1].predict(TOKENS[:, :17])["output_0"]
    assert np.linalg.norm(found - exact) <= 0.05 * np.linalg.norm(exact)


def test_products_on_an_open_length_are_trained_with_the_ranges_of_their_kernels():
    inputs = keras.Input((None, 8))
    heads = layers.EinsumDense("abc,cde->abde", (None, 2, 6), bias_axes="de", activation="relu")(inputs)
    joined = layers.EinsumDense("abde,def->abf", (None, 8), bias_axes="f")(heads)
    model = keras.Model(inputs, layers.Dense(3)(joined))
    x = RNG.normal(size=(16, 7, 8)).astype("float32")
    trained = quantize(model, QuantizationConfig(training=True), calibration_data=x)
    quantized = quantize(trained)
    assert (len(quantized.report.changed), len(quantized.report.skipped)) == (3, 0)
    expected = np.asarray(trained(x))
    found = lower_to_int8(quantized.graph).predict(x)["output_0"]
    assert np.linalg.norm(found - expected) <= 0.01 * np.linalg.norm(expected)
