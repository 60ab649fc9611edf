"""A language model that computes new tokens alone.

The attention layers keep the keys and values of the earlier tokens in a cache, so that a step costs the same at every
position. The cache is as long as the finished text from the start: a tensor that grows would be a new shape, and a new
compilation, at every step.

All other layers of `gpt` treat each position for itself. So the cached form is the model's own graph, with another call
for the attention layers and for learned positions.
"""

from __future__ import annotations

import weakref
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.layers import run_through_graph
from tfopt.errors import UnsupportedModelError
from tfopt.models.layers import LearnedPositions
from tfopt.models.text.attention import Cache, CausalAttention


class CachedModel:
    """A language model that runs on new tokens alone, with the keys and values of the earlier ones.

    Attributes:
        attentions: The attention layers by name, in any order.
        limit: Largest number of tokens; None if there is no limit.
    Raises:
        UnsupportedModelError: The model is not functional, or has no causal attention.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = weakref.ref(model)  # `_CACHED` must not keep its keys alive
        layers = [layer for layer in getattr(model, "layers", []) if isinstance(layer, CausalAttention)]
        self.attentions = {layer.name: layer for layer in layers}
        if not self.attentions or len(getattr(model, "inputs", [])) != 1:
            raise UnsupportedModelError(
                "generate needs a functional model of tokens with CausalAttention layers, as tfopt.models.gpt builds. "
                f"Received: {model!r}."
            )
        tables = [layer.length for layer in model.layers if isinstance(layer, LearnedPositions)]
        lengths = [length for length in (model.input_shape[1], *tables) if length is not None]
        self.limit: int | None = min(lengths, default=None)
        tokens, number = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([], tf.int32)
        self._compiled_first = tf.function(self._first, input_signature=[tokens, number], autograph=False)
        self._compiled_next = tf.function(self._next, reduce_retracing=True, autograph=False)

    def first(self, tokens: Any, length: int) -> tuple[Any, dict[str, Cache]]:
        """Runs prompts [batch, length]. Returns the logits behind them [batch, outputs], and caches of a length."""
        logits, caches = self._compiled_first(tf.constant(tokens), tf.constant(length))
        return logits, caches

    def next(self, tokens: Any, caches: dict[str, Cache], start: int) -> tuple[Any, dict[str, Cache]]:
        """Runs one new token of each text [batch]. Returns the logits behind it [batch, outputs], and the caches."""
        logits, caches = self._compiled_next(tf.constant(tokens), caches, tf.constant(start))
        return logits, caches

    def run(self, tokens: Any, caches: dict[str, Cache], start: Any) -> tuple[Any, dict[str, Cache]]:
        """Returns the logits of new tokens [batch, new, outputs], and the caches with these tokens."""
        new: dict[str, Cache] = {}

        def call(operation: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(operation, CausalAttention):
                outputs, new[operation.name] = operation.continued(
                    *arguments, cache=caches[operation.name], start=start
                )
                return outputs
            if isinstance(operation, LearnedPositions):
                (x,) = arguments
                return x + tf.cast(operation.positions, x.dtype)[start : start + tf.shape(x)[1]]
            return operation(*arguments, **options)

        return run_through_graph(self._model(), [tokens], call), new

    def empty(self, batch: Any, length: Any) -> dict[str, Cache]:
        """Returns caches of zeros for a number of texts and a length."""

        def zeros(layer: CausalAttention) -> Any:
            width = layer.input[0].shape[-1]
            return tf.zeros([batch, layer.heads, length, width // layer.heads], layer.compute_dtype)

        return {name: Cache(zeros(layer), zeros(layer)) for name, layer in self.attentions.items()}

    def _first(self, tokens: Any, length: Any) -> tuple[Any, dict[str, Cache]]:
        logits, caches = self.run(tokens, self.empty(tf.shape(tokens)[0], length), tf.constant(0))
        return logits[:, -1], caches

    def _next(self, token: Any, caches: dict[str, Cache], start: Any) -> tuple[Any, dict[str, Cache]]:
        logits, caches = self.run(token[:, None], caches, start)
        return logits[:, -1], caches


# The compiled functions of each model, as long as the model lives: tracing takes longer than a short text.
_CACHED: weakref.WeakKeyDictionary[keras.Model, CachedModel] = weakref.WeakKeyDictionary()


def cached_model(model: keras.Model) -> CachedModel:
    """Returns the cached form of a model, compiled once.

    Raises:
        UnsupportedModelError: The model is no functional model with causal attention.
    """
    if model not in _CACHED:
        _CACHED[model] = CachedModel(model)
    return _CACHED[model]
