"""The encoder and the decoder of text: published sizes, padding, causality, rotary positions."""

import keras
import numpy as np
import pytest

from tfopt.errors import ConfigError
from tfopt.models import gpt, text_encoder
from tfopt.models.table import PUBLISHED_MODELS, SMALL_MODELS
from tfopt.models.text.attention import CausalAttention

TINY = {"vocabulary": 64, "width": 32, "depth": 2, "heads": 2, "units": 64, "max_length": 16}


def random_tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(1, 64, shape).astype("int32")


def parameters_of_bert(vocabulary, width, depth, units, positions=512, segments=2):
    """Counts the layers of BERT as published: embeddings with their norm, blocks, pooler."""
    norm = 2 * width
    embeddings = (vocabulary + positions + segments) * width + norm
    attention = 4 * (width * width + width)
    block = attention + width * units + units + units * width + width + 2 * norm
    return embeddings + depth * block + width * width + width


@pytest.mark.parametrize(
    ("name", "width", "depth", "units", "published"),
    [
        pytest.param("bert_base", 768, 12, 3072, 109_482_240, marks=pytest.mark.slow),
        ("bert_small", 512, 4, 2048, 28_763_648),
    ],
)
def test_the_encoder_has_the_layers_of_bert(name, width, depth, units, published):
    """The published sum has two segment embeddings and no output layer; ours has an output layer of two classes."""
    assert parameters_of_bert(30_522, width, depth, units) == published
    model = PUBLISHED_MODELS[name].build()
    output_layer = model.get_layer("logits").count_params()
    assert model.count_params() - output_layer == published - 2 * width
    assert model.count_params() == PUBLISHED_MODELS[name].parameters


@pytest.mark.slow
def test_the_decoder_has_the_parameters_of_gpt_2():
    assert PUBLISHED_MODELS["gpt2_small"].build().count_params() == 124_439_808


@pytest.mark.parametrize("pool", ["token", "mean", "wide_and_deep"])
def test_padding_does_not_change_the_logits(pool):
    model = text_encoder((None,), 4, **TINY, pool=pool)
    tokens = random_tokens(3, 9)
    padded = np.pad(tokens, [(0, 0), (0, 5)])
    np.testing.assert_allclose(model(padded), model(tokens), atol=1e-5)
    without = text_encoder((None,), 4, **TINY, pool=pool, pad_token=None)
    without.set_weights(model.get_weights())
    np.testing.assert_allclose(without(tokens), model(tokens), atol=1e-5)
    assert np.abs(without(padded) - model(padded)).max() > 1e-3
    assert np.abs(model(tokens[:, ::-1]) - model(tokens)).max() > 1e-3  # the order counts


def test_token_dropout_silences_whole_tokens():
    model = text_encoder((16,), 4, **TINY, dropout=0.0, token_dropout=0.5)
    x = keras.Model(model.input, model.get_layer("token_dropout").output)(random_tokens(8, 16), training=True)
    silent = np.asarray(x == 0)
    np.testing.assert_array_equal(silent.all(-1), silent.any(-1))
    assert 0.3 < silent.mean() < 0.7


def test_training_leaves_the_deep_part_out_for_half_of_the_texts():
    model = text_encoder((16,), 4, **TINY, dropout=0.0, pool="wide_and_deep")
    joined = keras.Model(model.input, model.get_layer("wide_and_deep").output)(random_tokens(100, 16), training=True)
    wide, deep = np.split(np.asarray(joined), 2, axis=1)
    assert np.abs(wide).max(-1).min() > 0
    left_out = (deep == 0).all(-1)
    assert 0.3 < left_out.mean() < 0.7
    assert np.abs(deep[~left_out]).max(-1).min() > 0


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_a_logit_depends_on_its_own_and_earlier_tokens_only(positions):
    model = gpt((12,), 64, width=32, depth=2, heads=2, positions=positions)
    tokens = random_tokens(2, 12)
    other = np.concatenate([tokens[:, :7], random_tokens(2, 5, seed=1)], axis=1)
    first, second = np.asarray(model(tokens)), np.asarray(model(other))
    np.testing.assert_allclose(first[:, :7], second[:, :7], atol=1e-5)
    assert np.abs(first[:, 7:] - second[:, 7:]).max(axis=(0, 2)).min() > 1e-3
    swapped = tokens.copy()
    swapped[:, :2] = tokens[:, 1::-1]
    assert np.abs(np.asarray(model(swapped))[:, 4] - first[:, 4]).max() > 1e-4  # the order counts


def test_causal_attention_is_the_softmax_of_the_products():
    """Against NumPy, one head and one position at a time."""
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 6, 8)).astype("float32")
    ours = np.asarray(CausalAttention(2)(query, key, value))
    for head in (slice(0, 4), slice(4, 8)):
        for position in range(6):
            q, k, v = query[:, position, head], key[:, : position + 1, head], value[:, : position + 1, head]
            scores = np.einsum("bd,bnd->bn", q, k) / 2
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            np.testing.assert_allclose(ours[:, position, head], np.einsum("bn,bnd->bd", weights, v), atol=1e-5)


def test_rotary_attention_depends_on_distances():
    """The same tokens later in the text attend alike: rotations by one more angle cancel in each product."""
    query, key, value = np.random.default_rng(0).normal(size=(3, 1, 8, 8)).astype("float32")
    layer = CausalAttention(2, rotary=True)
    expected = np.asarray(layer(query, key, value))
    empty = layer.continued(query, key, value, cache=_cache(8 + 5), start=0)[1]
    hidden = keras.tree.map_structure(lambda each: np.asarray(each) * 0, empty)
    later, cache = layer.continued(query, key, value, cache=hidden, start=5)
    # Five zero keys come first: they get scores of zero and add zero values, so only the normalization differs.
    ratio = expected / np.asarray(later)
    for head in (slice(0, 4), slice(4, 8)):
        np.testing.assert_allclose(ratio[..., head], ratio[..., head.start : head.start + 1].repeat(4, -1), rtol=1e-3)
    turned = np.asarray(cache.keys)[:, :, 5:]
    assert np.abs(turned - np.asarray(empty.keys)[:, :, :8]).max() > 0.1
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(_split(key), axis=-1), rtol=1e-5)


def _split(x):
    return x.reshape(1, 8, 2, 4).swapaxes(1, 2)


def _cache(length):
    from tfopt.models.text.attention import Cache

    zeros = np.zeros((1, 2, length, 4), "float32")
    return Cache(zeros, zeros)


def test_tied_embeddings_are_one_matrix():
    model = gpt((8,), 64, width=32, depth=1, heads=2, tied=True)
    untied = gpt((8,), 64, width=32, depth=1, heads=2)
    assert untied.count_params() - model.count_params() == 32 * 64 + 64
    final = keras.Model(model.input, [model.get_layer("norm").output, model.output])
    x, logits = final(random_tokens(2, 8))
    np.testing.assert_allclose(logits, np.asarray(x) @ np.asarray(model.get_layer("embedding").embeddings).T, atol=1e-5)
    assert model.layers[-1].name == "logits"


@pytest.mark.parametrize("name", ["gpt", "text_encoder"])
def test_logits_are_float32_and_outputs_return_from_a_file(name, tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = SMALL_MODELS[name].build()
    finally:
        keras.config.set_dtype_policy("float32")
    tokens = random_tokens(2, 16)
    logits = model(tokens)
    assert logits.dtype == "float32"
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "model.keras")(tokens), logits)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: text_encoder((8,), 2, width=30, heads=4), "width=30, heads=4. The nearest is width=32"),
        (lambda: text_encoder((8,), 2, pool="max"), "Unknown pool 'max'. Expected one of"),
        (lambda: text_encoder((600,), 2, **{**TINY, "max_length": 512}), "max_length=512 for an input of 600 tokens"),
        (lambda: gpt((8,), 2, positions="learned", max_length=4), "max_length=4 for an input of 8 tokens"),
        (lambda: text_encoder((8,), 2, **{**TINY, "pad_token": 999_999}), "pad_token must be a token"),
        (lambda: text_encoder((8, 3), 2), "It is (length,)"),
        (lambda: gpt((8,), 2, positions="sine"), "positions must be 'rope' or 'learned'"),
        (lambda: gpt((None,), 2, positions="learned"), "max_length must be given"),
        (lambda: gpt((8,), 2, width=6, heads=2), "2 * heads with rotary positions. Received: width=6, heads=2"),
    ],
)
def test_wrong_arguments_are_refused(build, words):
    with pytest.raises(ConfigError) as caught:
        build()
    assert words in str(caught.value)
