"""Everything that Keras' layers compute by a detour, as plain operations, while a model is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfopt.compat.convolutions import plain_convolutions
from tfopt.compat.pooling import plain_pooling
from tfopt.compat.recurrent import short_loops
from tfopt.compat.time_distributed import folded_time


@contextlib.contextmanager
def plain_operations(*, gradients: bool) -> Iterator[None]:
    """While a model is called or traced, gives Keras' layers fewer and plainer operations, with equal results.

    Args:
        gradients: Whether gradients are taken. Loops of recurrent layers are then as Keras has them.
    Example:
        >>> import keras
        >>> import tensorflow as tf
        >>> layer = keras.layers.TimeDistributed(keras.layers.AdaptiveMaxPooling2D(2))
        >>> def pools():
        ...     call = tf.function(lambda x: layer(x)).get_concrete_function(tf.TensorSpec((1, 5, 8, 8, 4)))
        ...     return [operation.type for operation in call.graph.get_operations()].count("MaxPool")
        >>> with plain_operations(gradients=False):
        ...     pools()
        1
        >>> pools()
        20
    """
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(plain_convolutions(gradients=gradients))
        scopes.enter_context(plain_pooling(gradients=gradients))
        scopes.enter_context(folded_time())
        if not gradients:
            scopes.enter_context(short_loops())
        yield
