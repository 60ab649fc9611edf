"""The multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfopt.models.arguments import check_arguments, check_shape
from tfopt.models.channels_last import channels_last

if TYPE_CHECKING:
    import keras


@channels_last
def mlp(
    input_shape: Sequence[int],
    outputs: int,
    *,
    units: Sequence[int] = (256, 256),
    dropout: float = 0.0,
) -> keras.Model:
    """Builds dense layers with ReLU on the flattened input.

    Args:
        input_shape: Shape of one example, of any rank.
        outputs: Number of classes, or of values.
        units: Width of each hidden layer.
        dropout: Share of the activations of each hidden layer that training sets to zero.
    Returns: A model from [batch, *input_shape] to logits [batch, outputs].
    Example:
        >>> mlp((8, 8, 1), 10, units=(32,)).output_shape
        (None, 10)
    """
    import keras  # here, so that a list of the builders needs no TensorFlow
    from keras import layers

    check_arguments(outputs=outputs, units=units, dropout=dropout)
    check_shape(input_shape)
    inputs = keras.Input(tuple(input_shape), name="features")
    x = layers.Flatten(name="flatten")(inputs)
    for number, width in enumerate(units, start=1):
        x = layers.Dense(width, activation="relu", name=f"dense{number}")(x)
        if dropout:
            x = layers.Dropout(dropout, name=f"dropout{number}")(x)
    logits = layers.Dense(outputs, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="mlp")
