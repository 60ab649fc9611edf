"""Causal attention without weights, for a whole sequence or for new tokens with a cache of the earlier ones.

The products with weights are Dense layers around it, which pruning and quantization find as in any other model.

    scores = q k^T / sqrt(d)        softmax over the positions up to one's own, in float32        outputs = weights v

Rotary positions (RoPE) turn each pair of channels (i, i + d/2) of a query and of a key by the angle
`position * BASE^(-2i/d)`. The product of a query and a key then depends on the distance of their positions alone.

Text is generated with new tokens alone. The attention layers keep the keys and values of the earlier tokens in a cache,
so that a step costs the same at every position. The cache is as long as the finished text from the start: a tensor that
grows would be a new shape, and a new compilation, at every step.

All other layers of `gpt` treat each position for itself. So the cached form is the model's own graph, with another call
for the attention layers and for learned positions.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from tfopt.compat.layers import run_through_graph
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.models.layers import LearnedPositions

BASE = 10_000.0
HIDDEN = -1e30  # score of a position that must not be seen


class Cache(NamedTuple):
    """Keys and values of all positions, [batch, heads, positions, channels]. Those not yet known are zero."""

    keys: Any
    values: Any


@keras.saving.register_keras_serializable("tfopt")
class CausalAttention(keras.layers.Layer):
    """Attention of each position to itself and the earlier ones, over several heads.

    Args:
        heads: Number of heads, which divide the channels.
        rotary: Whether queries and keys get rotary positions.
    Input: query, key and value, each [batch, length, width]. Output: [batch, length, width].
    Raises:
        ConfigError: The width is no multiple of heads, or rotary positions meet heads of an odd width.
    Example:
        >>> x = ops.ones((2, 5, 8))
        >>> CausalAttention(2)(x, x, x).shape
        TensorShape([2, 5, 8])

    Reference:
        Vaswani et al. 2017, arXiv:1706.03762. Su et al., "RoFormer", 2021, arXiv:2104.09864.
    """

    def __init__(self, heads: int, rotary: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.heads = heads
        self.rotary = rotary
        self.supports_masking = True

    def build(self, query_shape: Any, key_shape: Any, value_shape: Any) -> None:
        width = query_shape[-1]
        multiple = self.heads * (2 if self.rotary else 1)
        if width % multiple:
            raise ConfigError(
                f"width must be a multiple of {'2 * heads with rotary positions' if self.rotary else 'heads'}. "
                f"Received: width={width}, heads={self.heads}. "
                f"The nearest is width={max(1, round(width / multiple)) * multiple}."
            )

    def call(self, query: Any, key: Any, value: Any) -> Any:
        positions = ops.arange(ops.shape(query)[1])
        return self._attend(
            self._queries(query, positions), self._keys(key, positions), self._split(value), positions, positions
        )

    def continued(self, query: Any, key: Any, value: Any, *, cache: Cache, start: Any) -> tuple[Any, Cache]:
        """Returns the outputs of new tokens [batch, new, width], and the cache with their keys and values.

        `start` is the position of the first new token. `start + new` must not exceed the positions of the cache.
        """
        positions = start + ops.arange(ops.shape(query)[1])
        cache = Cache(
            ops.slice_update(cache.keys, (0, 0, start, 0), self._keys(key, positions)),
            ops.slice_update(cache.values, (0, 0, start, 0), self._split(value)),
        )
        slots = ops.arange(ops.shape(cache.keys)[2])
        outputs = self._attend(self._queries(query, positions), cache.keys, cache.values, positions, slots)
        return outputs, cache

    def _attend(self, query: Any, key: Any, value: Any, positions: Any, slots: Any) -> Any:
        scores = ops.cast(ops.matmul(query, ops.swapaxes(key, 2, 3)), "float32")
        visible = ops.expand_dims(positions, 1) >= ops.expand_dims(slots, 0)
        weights = ops.softmax(ops.where(visible, scores, HIDDEN), axis=-1)
        outputs = ops.swapaxes(ops.matmul(ops.cast(weights, value.dtype), value), 1, 2)
        batch, length, _, channels = ops.shape(outputs)
        return ops.reshape(outputs, (batch, length, self.heads * channels))

    def _queries(self, x: Any, positions: Any) -> Any:
        x = self._split(x)
        return self._turned(x, positions) / math.sqrt(x.shape[-1])

    def _keys(self, x: Any, positions: Any) -> Any:
        return self._turned(self._split(x), positions)

    def _split(self, x: Any) -> Any:
        batch, length, width = ops.shape(x)
        return ops.swapaxes(ops.reshape(x, (batch, length, self.heads, width // self.heads)), 1, 2)

    def _turned(self, x: Any, positions: Any) -> Any:
        if not self.rotary:
            return x
        half = x.shape[-1] // 2
        speeds = BASE ** (-ops.arange(half, dtype="float32") / half)
        angles = ops.expand_dims(ops.cast(positions, "float32"), 1) * speeds
        cos, sin = ops.cast(ops.cos(angles), x.dtype), ops.cast(ops.sin(angles), x.dtype)
        left, right = x[..., :half], x[..., half:]
        return ops.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    def compute_output_shape(self, query_shape: Any, key_shape: Any, value_shape: Any) -> Any:
        return query_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "heads": self.heads, "rotary": self.rotary}


class CachedModel:
    """A language model that runs on new tokens alone, with the keys and values of the earlier ones.

    `limit` is the largest number of tokens; None if there is no limit.

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
        lengths = [model.input_shape[1], *(each.length for each in model.layers if isinstance(each, LearnedPositions))]
        self.limit: int | None = min((length for length in lengths if length is not None), default=None)
        tokens, number = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([], tf.int32)
        self.first = tf.function(self._first, input_signature=[tokens, number], autograph=False)
        self._compiled_next = tf.function(self._next, reduce_retracing=True, autograph=False)

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
        """Runs prompts [batch, length]. Returns the logits behind them [batch, outputs], and caches of a length."""
        logits, caches = self.run(tokens, self.empty(tf.shape(tokens)[0], length), tf.constant(0))
        return logits[:, -1], caches

    def _next(self, token: Any, caches: dict[str, Cache], start: Any) -> tuple[Any, dict[str, Cache]]:
        logits, caches = self.run(token[:, None], caches, start)
        return logits[:, -1], caches


# The compiled functions of each model, as long as the model lives: tracing takes longer than a short text.
_CACHED: weakref.WeakKeyDictionary[keras.Model, CachedModel] = weakref.WeakKeyDictionary()


def cached_model(model: keras.Model) -> CachedModel:
    """Returns the cached form of a model, compiled once."""
    if model not in _CACHED:
        _CACHED[model] = CachedModel(model)
    return _CACHED[model]
