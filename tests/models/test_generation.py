"""Generation: the cached model against the model itself, the choice of tokens, and errors."""

import gc
import weakref

import keras
import numpy as np
import pytest

from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.models import generate, gpt, mlp
from tfopt.models.text.attention import _CACHED, cached_model
from tfopt.models.text.generation import choose


def small(positions="rope", length=None, **options):
    return gpt((length,), 64, width=32, depth=2, heads=2, positions=positions, max_length=24, **options)


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    return small()


@pytest.fixture(scope="module")
def learned():
    return small("learned")


def tokens(*shape):
    return np.random.default_rng(0).integers(0, 64, shape).astype("int32")


@pytest.mark.parametrize(("positions", "options"), [("rope", {}), ("learned", {"tied": True, "dropout": 0.5})])
def test_the_cached_logits_are_the_models(positions, options):
    model = small(positions, **options)
    texts = tokens(3, 20)
    expected = np.asarray(model(texts))
    cached = cached_model(model)
    logits, caches = cached.first(texts[:, :6], 20)
    np.testing.assert_allclose(logits, expected[:, 5], atol=1e-4)
    for position in range(6, 20):
        logits, caches = cached.next(texts[:, position], caches, position)
        np.testing.assert_allclose(logits, expected[:, position], atol=1e-4)


def test_greedy_text_is_what_the_model_holds_likeliest(model):
    prompts = tokens(2, 3)
    texts = generate(model, prompts, max_new_tokens=9, temperature=0)
    assert texts.shape == (2, 12)
    assert texts.dtype == np.int32
    np.testing.assert_array_equal(texts[:, :3], prompts)
    np.testing.assert_array_equal(np.asarray(model(texts))[:, 2:-1].argmax(-1), texts[:, 3:])
    np.testing.assert_array_equal(generate(model, prompts[0], max_new_tokens=9, temperature=0), texts[0])
    np.testing.assert_array_equal(generate(model, prompts[0], max_new_tokens=9, top_k=1, temperature=5.0), texts[0])
    np.testing.assert_array_equal(generate(model, prompts[0], max_new_tokens=9, top_p=1e-9), texts[0])


def test_a_seed_fixes_the_text(model):
    one, two, other = (generate(model, [1, 2], max_new_tokens=20, seed=seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(one, two)
    assert (one != other).any()


def test_a_stop_token_ends_a_text(model):
    greedy = generate(model, [[1, 2], [3, 4]], max_new_tokens=12, temperature=0)
    stop = greedy[0, 4]
    stopped = generate(model, [1, 2], max_new_tokens=12, temperature=0, stop_token=int(stop))
    end = 2 + int(np.argmax(greedy[0, 2:] == stop))
    np.testing.assert_array_equal(stopped, greedy[0, : end + 1])
    both = generate(model, [[1, 2], [3, 4]], max_new_tokens=12, temperature=0, stop_token=int(stop))
    assert (both[0, end:] == stop).all()


def test_tokens_are_chosen_in_their_shares():
    shares = np.array([0.5, 0.25, 0.15, 0.1])
    logits = np.log(np.tile(shares, (20_000, 1)))

    def counted(**settings):
        chosen = choose(logits, np.random.default_rng(0), **settings)
        return np.bincount(chosen, minlength=4) / len(chosen)

    np.testing.assert_allclose(counted(), shares, atol=0.01)
    np.testing.assert_allclose(counted(top_k=2), [2 / 3, 1 / 3, 0, 0], atol=0.01)
    np.testing.assert_allclose(counted(top_p=0.8), np.array([0.5, 0.25, 0.15, 0]) / 0.9, atol=0.01)
    np.testing.assert_allclose(counted(temperature=0.5), shares**2 / (shares**2).sum(), atol=0.01)
    np.testing.assert_allclose(counted(temperature=0), [1, 0, 0, 0])


def test_the_compiled_model_dies_with_its_model():
    model = small()
    generate(model, [1], max_new_tokens=2)
    assert model in _CACHED
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ([], {}, "at least one token each"),
        ([[1, 2], [3]], {}, "one length"),
        ([0.5], {}, "tokens must be integers. Received: float64"),
        ([64], {}, "tokens must be from 0 to 63, the vocabulary of the model. Received: 64 to 64"),
        (list(range(20)), {}, "has 24 positions. Received: 20 tokens and max_new_tokens=5"),
        ([1], {"temperature": -1}, "temperature must be a number of at least 0. Received: temperature=-1"),
        ([1], {"top_k": 0}, "top_k must be a whole number of at least 1 or None"),
        ([1], {"top_p": 1.5}, "top_p must be in (0, 1] or None"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1"),
        ([1], {"seed": 1.5}, "seed must be a whole number"),
        ([1], {"stop_token": 64}, "stop_token must be from 0 to 63"),
    ],
)
def test_wrong_arguments_are_refused(learned, prompt, settings, words):
    with pytest.raises(ConfigError) as caught:
        generate(learned, prompt, **{"max_new_tokens": 5, **settings})
    assert words in str(caught.value)


def test_the_length_of_the_input_is_a_limit():
    with pytest.raises(ConfigError, match="has 8 positions"):
        generate(small(length=8), [1, 2], max_new_tokens=7)


def test_other_models_are_refused():
    with pytest.raises(UnsupportedModelError, match="CausalAttention"):
        generate(mlp((8,), 4), [1], max_new_tokens=1)
