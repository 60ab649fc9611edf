"""Recurrent networks.

On a GPU, Keras computes an LSTM with cuDNN, many times faster than step by step, if activation is tanh,
recurrent_activation is sigmoid, recurrent_dropout is 0, use_bias is True and unroll is False. The builder has no
arguments that change these. XLA cannot compile the cuDNN form; `tfopt.plan` then trains without XLA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfopt.errors import ConfigError
from tfopt.models.arguments import OfTokens, Shape, check_arguments, check_shape
from tfopt.models.channels_last import channels_last
from tfopt.models.sequences.steps import rows_of

if TYPE_CHECKING:
    import keras


@channels_last
def lstm(
    input_shape: Sequence[int | None],
    outputs: int,
    *,
    units: Sequence[int] = (128,),
    bidirectional: bool = False,
    dropout: float = 0.0,
    vocabulary: int | None = None,
    width: int = 128,
    steps: int | None = None,
) -> keras.Model:
    """Builds LSTM layers and an output layer that reads the state after the last step.

    Args:
        input_shape: (steps, values), or (steps, ...) with more axes, which are flattened: the rows of an image are its
            steps. With a vocabulary (length,), None for any length.
        outputs: Number of classes, or of values.
        units: Width of each LSTM layer.
        bidirectional: Whether a second LSTM beside each reads the steps from the end.
        dropout: Share of the outputs of each LSTM layer that training sets to zero. Not of the recurrent values, which
            cuDNN cannot change.
        vocabulary: Number of different tokens, for inputs that are tokens. Token 0 fills short texts and is skipped.
        width: Width of the token vectors, with a vocabulary.
        steps: Number of steps into which the values of an example are divided: 784 reads an image of 28x28 pixels
            pixel by pixel. None takes the first axis of input_shape.
    Returns: A model from [batch, *input_shape] to logits [batch, outputs]; tokens are int32.
    Raises:
        ConfigError: units is empty, or the input does not divide into steps.
    Example:
        >>> lstm((28, 28, 1), 10, units=(32,)).count_params() == 4 * 32 * (28 + 32 + 1) + 330
        True

    Reference:
        Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation, 1997.
    """
    import keras  # here, so that a list of the builders needs no TensorFlow
    from keras import layers

    check_arguments(outputs=outputs, units=units, dropout=dropout, vocabulary=vocabulary, width=width, steps=steps)
    check_shape(input_shape, Shape if vocabulary is None else OfTokens)
    if not units:
        raise ConfigError("units must hold the width of at least one layer. Received: units=(). Set (128,).")
    if vocabulary is None:
        inputs = keras.Input(tuple(input_shape), name="sequence")
        x = rows_of(inputs, input_shape, steps)
    else:
        inputs = keras.Input(tuple(input_shape), dtype="int32", name="tokens")
        x = layers.Embedding(vocabulary, width, mask_zero=True, name="embedding")(inputs)
    for number, wide in enumerate(units, start=1):
        layer = layers.LSTM(wide, return_sequences=number < len(units), name=f"lstm{number}")
        x = layers.Bidirectional(layer, name=f"both{number}")(x) if bidirectional else layer(x)
        if dropout:
            x = layers.Dropout(dropout, name=f"dropout{number}")(x)
    logits = layers.Dense(outputs, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="lstm")
