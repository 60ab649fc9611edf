"""Small layers of the builders that Keras does not have.

A .keras file with one of these layers loads in a program that has imported tfopt: Keras finds the layers by the names
under which this module registers them. `import keras` must come before `import tfopt`, as sorted imports have it.
Otherwise import this module. An exported SavedModel needs neither.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from tfopt.errors import ConfigError

# The initial values of class tokens and positions in ViT, BERT and GPT-2.
STDDEV = 0.02


@keras.saving.register_keras_serializable("tfopt")
class LearnedPositions(keras.layers.Layer):
    """Adds a trained vector to each position of a sequence.

    A sequence may be shorter than `length`; it then gets the first vectors. A mask is passed on.

    Args:
        length: Number of positions.
    Input and output: [batch, positions, width].
    Raises:
        ConfigError: The sequence is longer than `length`.
    Example:
        >>> LearnedPositions(16)(ops.zeros((2, 10, 8))).shape
        TensorShape([2, 10, 8])
    """

    def __init__(self, length: int, **options: Any) -> None:
        super().__init__(**options)
        self.length = length
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        positions = input_shape[1]
        if positions is not None and positions > self.length:
            raise ConfigError(
                f"length must be at least the number of positions. Received: length={self.length} for {positions} "
                f"positions. Set {positions} or more."
            )
        self.positions = self.add_weight(
            name="positions",
            shape=(self.length, input_shape[-1]),
            initializer=keras.initializers.TruncatedNormal(stddev=STDDEV),
        )

    def call(self, inputs: Any) -> Any:
        if inputs.shape[1] == self.length:
            return inputs + self.positions
        return inputs + self.positions[: ops.shape(inputs)[1]]

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "length": self.length}


@keras.saving.register_keras_serializable("tfopt")
class ClassToken(keras.layers.Layer):
    """Puts a trained vector before a sequence. Attention gathers in it what the output layer reads.

    Input: [batch, positions, width]. Output: [batch, positions + 1, width].

    Example:
        >>> ClassToken()(ops.zeros((2, 16, 8))).shape
        TensorShape([2, 17, 8])
    """

    def build(self, input_shape: Any) -> None:
        self.token = self.add_weight(
            name="token",
            shape=(1, 1, input_shape[-1]),
            initializer=keras.initializers.TruncatedNormal(stddev=STDDEV),
        )

    def call(self, inputs: Any) -> Any:
        token = ops.cast(self.token, inputs.dtype)
        return ops.concatenate([ops.broadcast_to(token, (ops.shape(inputs)[0], 1, inputs.shape[-1])), inputs], axis=1)

    def compute_output_shape(self, input_shape: Any) -> Any:
        batch, positions, width = input_shape
        return batch, None if positions is None else positions + 1, width


@keras.saving.register_keras_serializable("tfopt")
class LayerScale(keras.layers.Layer):
    """Multiplies each channel by a trained factor. With small initial factors, deep residual networks train stably.

    Args:
        initial: Factor before the training.
    Input and output: [..., channels].

    Example:
        >>> float(LayerScale(0.5)(ops.ones((1, 2)))[0, 1])
        0.5

    Reference:
        Touvron et al., "Going deeper with Image Transformers", ICCV 2021, arXiv:2103.17239.
    """

    def __init__(self, initial: float = 1e-6, **options: Any) -> None:
        super().__init__(**options)
        self.initial = initial
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        self.factors = self.add_weight(
            name="factors", shape=(input_shape[-1],), initializer=keras.initializers.Constant(self.initial)
        )

    def call(self, inputs: Any) -> Any:
        return inputs * self.factors

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "initial": self.initial}


@keras.saving.register_keras_serializable("tfopt")
class SublinearMean(keras.layers.Layer):
    """Averages the vectors of a text's tokens. A token that the text repeats counts less each time.

    All places of a token that the text has c times weigh 1 + log(c) together, not c as in a plain mean. The vectors of
    one token may differ from place to place. A text of nothing but padding gives zeros.

    Args:
        pad_token: Token that the mean leaves out. None if there is none.
    Input: vectors [batch, length, width] and tokens int32 [batch, length]. Output: [batch, width].

    Example:
        >>> vectors = ops.convert_to_tensor([[[1.0], [1.0], [4.0]]])
        >>> tokens = ops.convert_to_tensor([[7, 7, 8]])
        >>> round(float(SublinearMean()(vectors, tokens)[0, 0]), 4)  # ((1 + log 2) * 1 + 1 * 4) / (1 + log 2 + 1)
        2.1139

    Reference:
        Manning, Raghavan and Schuetze, "Introduction to Information Retrieval", 2008, section 6.4.1: sublinear term
        frequencies.
    """

    def __init__(self, pad_token: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.pad_token = pad_token

    def call(self, vectors: Any, tokens: Any) -> Any:
        same = ops.equal(ops.expand_dims(tokens, 2), ops.expand_dims(tokens, 1))
        counts = ops.sum(ops.cast(same, "float32"), axis=-1)
        weights = (1 + ops.log(counts)) / counts
        if self.pad_token is not None:
            weights *= ops.cast(ops.not_equal(tokens, self.pad_token), "float32")
        weights /= ops.maximum(ops.sum(weights, axis=1, keepdims=True), 1.0)
        return ops.sum(vectors * ops.cast(ops.expand_dims(weights, 2), vectors.dtype), axis=1)

    def compute_output_shape(self, vectors_shape: Any, tokens_shape: Any) -> Any:
        return vectors_shape[0], vectors_shape[-1]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "pad_token": self.pad_token}
