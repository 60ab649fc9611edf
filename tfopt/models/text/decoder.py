"""The decoder of GPT, a model of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from tfopt.errors import ConfigError
from tfopt.models.arguments import AtLeastOne, OfTokens, check_arguments, check_shape
from tfopt.models.channels_last import channels_last
from tfopt.models.text.encoder import check_heads, check_length
from tfopt.settings.validation import check_value

if TYPE_CHECKING:
    import keras

EPSILON = 1e-5  # of the layer normalizations, as in GPT-2


@channels_last
def gpt(
    input_shape: Sequence[int | None],
    outputs: int,
    *,
    width: int = 384,
    depth: int = 6,
    heads: int = 6,
    units: int | None = None,
    positions: Literal["rope", "learned"] = "rope",
    max_length: int | None = None,
    tied: bool = False,
    dropout: float = 0.0,
) -> keras.Model:
    """Builds a decoder: blocks of causal attention and dense layers, with normalization before each.

    GPT-2 (124M) has width=768, depth=12, heads=12, positions="learned", max_length=1024, tied=True, dropout=0.1.
    `tfopt.models.generate` continues a text.

    Args:
        input_shape: (length,), the number of tokens; None for any length.
        outputs: Number of different tokens.
        width: Width of the token vectors.
        depth: Number of blocks.
        heads: Number of attention heads.
        units: Width of the hidden dense layer of each block. None is four times width.
        positions: "rope" turns queries and keys by their positions, without weights; "learned" adds a trained vector
            for each position.
        max_length: Number of learned positions. None takes the length of input_shape.
        tied: Whether the output layer uses the weights of the embedding.
        dropout: Share of the activations behind the embedding, each attention and each dense part that training sets to
            zero.
    Returns: A model from tokens int32 [batch, length] to logits of the next token [batch, length, outputs]. A saved
        .keras file loads in programs that import tfopt.
    Raises:
        ConfigError: width does not fit heads, positions is unknown, or the number of learned positions is.
    Example:
        >>> gpt((16,), 256, width=32, depth=1, heads=2).output_shape
        (None, 16, 256)

    Reference:
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """
    import keras  # here, so that a list of the builders needs no TensorFlow
    from keras import layers

    from tfopt.models.layers import LearnedPositions

    check_shape(input_shape, OfTokens)
    check_arguments(outputs=outputs, width=width, depth=depth, heads=heads, max_length=max_length, dropout=dropout)
    check_value("units", units, AtLeastOne | None)
    check_heads(width, heads)
    if positions not in ("rope", "learned"):
        raise ConfigError(f"positions must be 'rope' or 'learned'. Received: positions={positions!r}.")
    table = max_length or input_shape[0]
    if positions == "learned" and table is None:
        raise ConfigError(
            "max_length must be given with positions='learned' and input_shape=(None,). Received: max_length=None. "
            "Set the largest number of tokens."
        )
    if positions == "learned" and table is not None:
        check_length(input_shape, table)
    tokens = keras.Input(tuple(input_shape), dtype="int32", name="tokens")
    embedding = layers.ReversibleEmbedding if tied else layers.Embedding
    embed = embedding(outputs, width, name="embedding")
    x = embed(tokens)
    if positions == "learned" and table is not None:
        x = LearnedPositions(table, name="positions")(x)
    if dropout:
        x = layers.Dropout(dropout, name="dropout")(x)
    for number in range(1, depth + 1):
        x = _block(x, heads, units or 4 * width, positions == "rope", dropout, f"block{number}")
    x = layers.LayerNormalization(epsilon=EPSILON, name="norm")(x)
    if tied:
        logits = layers.Activation("linear", dtype="float32", name="logits")(embed(x, reverse=True))
    else:
        logits = layers.Dense(outputs, dtype="float32", name="logits")(x)
    return keras.Model(tokens, logits, name="gpt")


def _block(x: Any, heads: int, units: int, rotary: bool, dropout: float, name: str) -> Any:
    from keras import layers

    from tfopt.models.text.attention import CausalAttention

    width = x.shape[-1]
    normed = layers.LayerNormalization(epsilon=EPSILON, name=f"{name}_norm1")(x)
    query, key, value = (layers.Dense(width, name=f"{name}_{part}")(normed) for part in ("query", "key", "value"))
    attended = CausalAttention(heads, rotary, name=f"{name}_attention")(query, key, value)
    x = _added(x, layers.Dense(width, name=f"{name}_attended")(attended), dropout, f"{name}_add1")
    normed = layers.LayerNormalization(epsilon=EPSILON, name=f"{name}_norm2")(x)
    hidden = layers.Dense(units, activation="gelu", name=f"{name}_up")(normed)
    return _added(x, layers.Dense(width, name=f"{name}_down")(hidden), dropout, f"{name}_add2")


def _added(x: Any, branch: Any, dropout: float, name: str) -> Any:
    from keras import layers

    if dropout:
        branch = layers.Dropout(dropout, name=f"{name}_dropout")(branch)
    return layers.Add(name=name)([x, branch])
