"""Builders of models of sequences: temporal convolutional and recurrent networks.

On a GPU, Keras computes an LSTM with cuDNN, many times faster than step by step, if activation is tanh,
recurrent_activation is sigmoid, recurrent_dropout is 0, use_bias is True and unroll is False. The builder has no
arguments that change these. XLA cannot compile the cuDNN form; `tfopt.plan` then trains without XLA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from tfopt.errors import ConfigError
from tfopt.models.building import OfTokens, Shape, builder, conv_norm, dropped, keras, layers, with_logits
from tfopt.settings.validation import check_value


@builder(input_shape=Shape, pool=None)
def tcn(
    input_shape: Sequence[int | None],
    outputs: int,
    *,
    filters: int = 128,
    kernel_size: int = 3,
    blocks: int = 8,
    dropout: float = 0.0,
    pool: Literal["last", "mean"] = "last",
    norm_momentum: float = 0.99,
    steps: int | None = None,
) -> keras.Model:
    """Builds residual blocks of two dilated causal convolutions. The dilation doubles from block to block.

    The last step sees 1 + 2 * (kernel_size - 1) * (2^blocks - 1) steps. Batch normalization is in place of the paper's
    weight normalization: it becomes part of the convolutions when the model is exported. A convolution of one step at
    the entrance is in place of that in the shortcut of the paper's first block.

    Args:
        input_shape: (steps, values), or (steps, ...) with more axes, which are flattened: the rows of an image are its
            steps.
        outputs: Number of classes, or of values.
        filters: Number of filters of each convolution.
        kernel_size: Number of steps in the window of each convolution.
        blocks: Number of blocks.
        dropout: Share of the channels behind each convolution that training sets to zero, the same at all steps.
        pool: Vector that the output layer reads: that of the last step, as in the paper, or the mean of all steps.
        norm_momentum: Momentum of the moving statistics of batch normalization. 0.9 suits trainings of few steps.
        steps: Number of steps into which the values of an example are divided: 784 reads an image of 28x28 pixels
            pixel by pixel. None takes the first axis of input_shape.
    Returns: A model from [batch, *input_shape] to logits [batch, outputs].
    Raises:
        ConfigError: pool is unknown, or the input does not divide into steps.
    Example:
        >>> tcn((28, 28, 1), 10, filters=8, blocks=3).output_shape
        (None, 10)

    Reference:
        Bai et al., "An Empirical Evaluation of Generic Convolutional and Recurrent Networks for Sequence Modeling",
        2018, arXiv:1803.01271.
    """
    if pool not in ("last", "mean"):
        raise ConfigError(f"pool must be 'last' or 'mean'. Received: pool={pool!r}.")
    inputs = layers.Input(tuple(input_shape), name="sequence")
    x = layers.Conv1D(filters, 1, activation="relu", name="entrance")(rows_of(inputs, input_shape, steps))
    for number in range(blocks):
        branch, name, dilation = x, f"block{number + 1}", 2**number
        for place in (1, 2):
            branch = conv_norm(
                branch, filters, kernel_size, f"{name}_{place}", momentum=norm_momentum, dilation=dilation, relu=False
            )
            if place == 1:
                branch = layers.ReLU(name=f"{name}_relu")(branch)
            if dropout:
                branch = layers.SpatialDropout1D(dropout, name=f"{name}_dropout{place}")(branch)
        x = layers.ReLU(name=f"{name}_out")(layers.Add(name=f"{name}_add")([branch, x]))
    x = layers.GlobalAveragePooling1D(name="mean")(x) if pool == "mean" else x[:, -1]
    return with_logits(inputs, x, outputs, "tcn")


@builder(input_shape=Shape)
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
    if vocabulary is not None:
        check_value("input_shape", input_shape, OfTokens)
    if not units:
        raise ConfigError("units must hold the width of at least one layer. Received: units=(). Set (128,).")
    if vocabulary is None:
        inputs = layers.Input(tuple(input_shape), name="sequence")
        x = rows_of(inputs, input_shape, steps)
    else:
        inputs = layers.Input(tuple(input_shape), dtype="int32", name="tokens")
        x = layers.Embedding(vocabulary, width, mask_zero=True, name="embedding")(inputs)
    for number, wide in enumerate(units, start=1):
        layer = layers.LSTM(wide, return_sequences=number < len(units), name=f"lstm{number}")
        x = layers.Bidirectional(layer, name=f"both{number}")(x) if bidirectional else layer(x)
        x = dropped(x, dropout, f"dropout{number}")
    return with_logits(inputs, x, outputs, "lstm")


def rows_of(inputs: Any, input_shape: Sequence[int | None], steps: int | None) -> Any:
    """Returns inputs [batch, *input_shape] as sequences [batch, steps, values].

    Without `steps`, the first axis is the steps, and the others are flattened.
    """
    shape = tuple(input_shape)
    counted = [size for size in (shape if steps is not None else shape[1:]) if size is not None]
    whole = len(counted) == len(shape) - (steps is None)
    if not shape or not whole or (steps is not None and math.prod(counted) % steps):
        raise ConfigError(
            "input_shape must be (steps, ...) with a known number of values per step, and the number of values must be "
            f"a multiple of steps if it is given. Received: input_shape={shape}, steps={steps}."
        )
    if steps is not None:
        return layers.Reshape((steps, math.prod(counted) // steps), name="steps")(inputs)
    if len(shape) == 2:
        return inputs
    return layers.Reshape((shape[0] or -1, math.prod(counted)), name="steps")(inputs)
