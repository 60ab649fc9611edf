"""Continues texts with a model of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from tfopt.errors import ConfigError
from tfopt.models.building import AtLeastOne, keras
from tfopt.settings.validation import check_value

SETTINGS: dict[str, Any] = {
    "max_new_tokens": AtLeastOne,
    "temperature": Annotated[float, Ge(0), Lt(np.inf)],
    "top_k": AtLeastOne | None,
    "top_p": Annotated[float, Gt(0), Le(1)] | None,
    "seed": Annotated[int, Ge(0)] | None,
    "stop_token": Annotated[int, Ge(0)] | None,
}


def generate(
    model: keras.Model,
    tokens: Sequence[int] | Sequence[Sequence[int]] | np.ndarray,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_token: int | None = None,
) -> np.ndarray:
    """Continues a prompt, or a batch of prompts of one length, token by token.

    Args:
        model: A language model of `tfopt.models.gpt`, trained or loaded.
        tokens: The prompt [length], or prompts [batch, length].
        max_new_tokens: Number of tokens to add.
        temperature: Divisor of the logits: below 1, likely tokens become more likely. 0 always takes the likeliest.
        top_k: Number of the likeliest tokens to choose from. None chooses from all.
        top_p: Share of the probability to choose from: the likeliest tokens that reach it together. None is all of it.
        seed: Seed of the choices. None takes a new one for each call.
        stop_token: Token that ends a text. It fills the rest of a text that ends before others of the batch.
    Returns: The prompts with the new tokens, int32, [length + new] or [batch, length + new]. It has fewer than
        `max_new_tokens` new tokens if all texts ended.
    Raises:
        ConfigError: A prompt is empty or too long, or a setting is out of range.
        UnsupportedModelError: The model is no functional model with causal attention.
    Example:
        >>> from tfopt.models import gpt
        >>> model = gpt((16,), 256, width=16, depth=1, heads=2)
        >>> generate(model, list(b"def "), max_new_tokens=8, seed=0).shape
        (12,)
    """
    from tfopt.models.text.attention import cached_model  # here, because it imports TensorFlow

    given = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    prompts = _checked_prompts(tokens)
    for name, value in {**given, "seed": seed, "stop_token": stop_token}.items():
        check_value(name, value, SETTINGS[name])
    cached = cached_model(model)
    outputs = int(model.output_shape[-1])
    if prompts.min() < 0 or prompts.max() >= outputs:
        raise ConfigError(
            f"tokens must be from 0 to {outputs - 1}, the vocabulary of the model. Received: {prompts.min()} to "
            f"{prompts.max()}."
        )
    if stop_token is not None and stop_token >= outputs:
        raise ConfigError(
            f"stop_token must be from 0 to {outputs - 1}, the vocabulary of the model. "
            f"Received: stop_token={stop_token}."
        )
    batch, length = prompts.shape
    total = length + max_new_tokens
    if cached.limit is not None and total > cached.limit:
        raise ConfigError(
            f"The prompt and max_new_tokens must fit the model, which has {cached.limit} positions. Received: "
            f"{length} tokens and max_new_tokens={max_new_tokens}. Cut the prompt, or set a smaller max_new_tokens."
        )
    generator = np.random.default_rng(seed)
    texts = np.concatenate([prompts, np.zeros((batch, max_new_tokens), np.int32)], axis=1)
    ended = np.zeros(batch, bool)
    logits, caches = cached.first(prompts, total)
    for position in range(length, total):
        chosen = choose(logits.numpy(), generator, temperature=temperature, top_k=top_k, top_p=top_p)
        if stop_token is not None:
            chosen[ended] = stop_token
            ended |= chosen == stop_token
        texts[:, position] = chosen
        if ended.all():
            texts = texts[:, : position + 1]
            break
        if position + 1 < total:
            logits, caches = cached.next(chosen, caches, position)
    return texts if np.ndim(tokens) == 2 else texts[0]


def choose(
    logits: np.ndarray,
    generator: np.random.Generator,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> np.ndarray:
    """Chooses a token for each row of logits: int32 [batch].

    Example:
        >>> choose(np.array([[0.0, 9.0, 1.0]]), np.random.default_rng(0), temperature=0)
        array([1], dtype=int32)
    """
    if temperature == 0:
        return logits.argmax(-1).astype(np.int32)
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, axis=-1)
    ranked = np.take_along_axis(scaled, order, -1)
    shares = np.exp(ranked - ranked[:, :1])
    if top_k is not None:
        shares[:, top_k:] = 0
    shares /= shares.sum(-1, keepdims=True)
    if top_p is not None:  # the token that reaches the share still counts
        shares[np.cumsum(shares, -1) - shares >= top_p] = 0
    sums = np.cumsum(shares, -1)
    rank = (sums < generator.random((len(sums), 1)) * sums[:, -1:]).sum(-1)
    return np.take_along_axis(order, rank[:, None], -1)[:, 0].astype(np.int32)


def _checked_prompts(tokens: Any) -> np.ndarray:
    try:
        prompts = np.atleast_2d(np.asarray(tokens))
    except ValueError as error:
        raise ConfigError(
            "The prompts of a batch must have one length. Received: rows of different lengths. "
            "Call generate for each length."
        ) from error
    if prompts.ndim != 2 or prompts.size == 0:
        raise ConfigError(
            "tokens must be a prompt [length] or prompts [batch, length], with at least one token each. Received: an "
            f"array of shape {np.shape(tokens)}. Begin with the token that ends a document, if there is no prompt."
        )
    if not np.issubdtype(prompts.dtype, np.integer):
        raise ConfigError(
            f"tokens must be integers. Received: {prompts.dtype}. Convert text first, for example list(b'def ')."
        )
    return prompts.astype(np.int32)
