"""Transformers of text: the encoder of BERT, as a classifier, and the decoder of GPT, a model of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from tfopt.errors import ConfigError
from tfopt.models.building import AtLeastOne, OfTokens, builder, dropped, keras, layers, ops, own_layers, with_logits

Pool = Literal["token", "mean", "wide_and_deep"]
EPSILON = 1e-12  # of the layer normalizations, as in BERT


@builder(input_shape=OfTokens, units=AtLeastOne, max_length=AtLeastOne, pool=Pool)
def text_encoder(
    input_shape: Sequence[int | None],
    outputs: int,
    *,
    vocabulary: int = 30_522,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    units: int = 3072,
    max_length: int = 512,
    dropout: float = 0.1,
    token_dropout: float = 0.0,
    pool: Pool = "token",
    pad_token: int | None = 0,
) -> keras.Model:
    """Builds the encoder of BERT with an output layer. Each block normalizes after its attention and its dense layers.

    The defaults are BERT-base. BERT-small has width=512, depth=4, heads=8, units=2048. There are no segment embeddings:
    the input is one text, and every token of it would get the same vector.

    Args:
        input_shape: (length,), the number of tokens; None for any length.
        outputs: Number of classes, or of values.
        vocabulary: Number of different tokens.
        width: Width of the token vectors.
        depth: Number of blocks.
        heads: Number of attention heads.
        units: Width of the hidden dense layer of each block.
        max_length: Number of position vectors, the largest length.
        dropout: Share of the activations, and of the attention weights, that training sets to zero.
        token_dropout: Share of the tokens whose vectors training sets to zero. It helps when the texts are few.
        pool: Vector that the output layer reads: "token" is the first token's after BERT's pooler (a dense layer with
            tanh), "mean" is the mean over the tokens. "wide_and_deep" joins two means, of the embeddings alone and of
            the blocks' outputs, in which a repeated token counts less, as in TF-IDF. For half of the texts training
            leaves the second one out, so that the first learns all that the words tell. It helps when the texts are
            few.
        pad_token: Token that fills short texts. Attention and the mean leave it out. None if there is none.
    Returns: A model from tokens int32 [batch, length] to logits [batch, outputs]. A saved .keras file loads in programs
        that import tfopt.
    Raises:
        ConfigError: width is no multiple of heads, the length exceeds max_length, or pool is unknown.
    Example:
        >>> model = text_encoder((16,), 4, vocabulary=256, width=32, depth=1, heads=2, units=64, max_length=16)
        >>> model.output_shape
        (None, 4)

    Reference:
        Devlin et al., "BERT", NAACL 2019, arXiv:1810.04805; the small sizes: Turc et al. 2019, arXiv:1908.08962; wide
        and deep: Cheng et al., DLRS 2016, arXiv:1606.07792.
    """

    check_heads(width, heads)
    check_length(input_shape, max_length)
    if pad_token is not None and not 0 <= pad_token < vocabulary:
        raise ConfigError(
            f"pad_token must be a token, from 0 to {vocabulary - 1}, or None. Received: pad_token={pad_token!r}."
        )
    tokens = layers.Input(tuple(input_shape), dtype="int32", name="tokens")
    is_text = None if pad_token is None else ops.not_equal(tokens, pad_token)
    words = layers.Embedding(vocabulary, width, name="embedding")(tokens)
    x = own_layers.LearnedPositions(max_length, name="positions")(words)
    x = layers.LayerNormalization(epsilon=EPSILON, name="embedding_norm")(x)
    x = layers.Dropout(dropout, name="embedding_dropout")(x)
    x = dropped(x, token_dropout, "token_dropout", noise_shape=(None, None, 1))
    seen = None if is_text is None else ops.expand_dims(is_text, 1)  # [batch, 1, length]: the same for every token
    for number in range(1, depth + 1):
        x = _block(x, seen, heads, units, dropout, f"block{number}")
    if pool == "mean":
        x = layers.GlobalAveragePooling1D(name="mean")(x, mask=is_text)
    elif pool == "wide_and_deep":
        words = dropped(words, token_dropout, "word_dropout", noise_shape=(None, None, 1))
        wide, deep = (
            layers.LayerNormalization(epsilon=EPSILON, name=f"{part}_norm")(
                own_layers.SublinearMean(pad_token, name=part)(vectors, tokens)
            )
            for part, vectors in (("wide", words), ("deep", x))
        )
        deep = layers.Dropout(0.5, noise_shape=(None, 1), name="deep_dropout")(deep)  # one draw for each text
        x = layers.Concatenate(name="wide_and_deep")([wide, deep])
    else:
        x = layers.Dense(width, activation="tanh", name="pooler")(x[:, 0])
    x = layers.Dropout(dropout, name="dropout")(x)
    return with_logits(tokens, x, outputs, "text_encoder")


def check_heads(width: int, heads: int) -> None:
    """Raises ConfigError unless attention heads divide a width evenly."""
    if width % heads:
        raise ConfigError(
            f"width must be a multiple of heads. Received: width={width}, heads={heads}. "
            f"The nearest is width={max(1, round(width / heads)) * heads}."
        )


def check_length(input_shape: Sequence[int | None], max_length: int) -> None:
    """Raises ConfigError if an input has more tokens than there are position vectors."""
    length = input_shape[0]
    if length is not None and length > max_length:
        raise ConfigError(
            f"max_length must be at least the length of the input. Received: max_length={max_length} for an input of "
            f"{length} tokens. Set max_length={length}, or take shorter inputs."
        )


def _block(x: Any, seen: Any, heads: int, units: int, dropout: float, name: str) -> Any:
    width = x.shape[-1]
    attention = layers.MultiHeadAttention(heads, width // heads, dropout=dropout, name=f"{name}_attention")
    attended = layers.Dropout(dropout, name=f"{name}_dropout1")(attention(x, x, attention_mask=seen))
    x = layers.Add(name=f"{name}_add1")([x, attended])
    x = layers.LayerNormalization(epsilon=EPSILON, name=f"{name}_norm1")(x)
    hidden = layers.Dense(units, activation="gelu", name=f"{name}_up")(x)
    hidden = layers.Dropout(dropout, name=f"{name}_dropout2")(layers.Dense(width, name=f"{name}_down")(hidden))
    x = layers.Add(name=f"{name}_add2")([x, hidden])
    return layers.LayerNormalization(epsilon=EPSILON, name=f"{name}_norm2")(x)


GPT_EPSILON = 1e-5  # of the layer normalizations, as in GPT-2


@builder(input_shape=OfTokens, units=AtLeastOne | None)
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

    check_heads(width, heads)
    if positions not in ("rope", "learned"):
        raise ConfigError(f"positions must be 'rope' or 'learned'. Received: positions={positions!r}.")
    table = (max_length or input_shape[0]) if positions == "learned" else None
    if positions == "learned" and table is None:
        raise ConfigError(
            "max_length must be given with positions='learned' and input_shape=(None,). Received: max_length=None. "
            "Set the largest number of tokens."
        )
    if table is not None:
        check_length(input_shape, table)
    tokens = layers.Input(tuple(input_shape), dtype="int32", name="tokens")
    embed = (layers.ReversibleEmbedding if tied else layers.Embedding)(outputs, width, name="embedding")
    x = embed(tokens)
    if table is not None:
        x = own_layers.LearnedPositions(table, name="positions")(x)
    x = dropped(x, dropout, "dropout")
    for number in range(1, depth + 1):
        x = _gpt_block(x, heads, units or 4 * width, positions == "rope", dropout, f"block{number}")
    x = layers.LayerNormalization(epsilon=GPT_EPSILON, name="norm")(x)
    if not tied:
        return with_logits(tokens, x, outputs, "gpt")
    logits = layers.Activation("linear", dtype="float32", name="logits")(embed(x, reverse=True))
    return keras.Model(tokens, logits, name="gpt")


def _gpt_block(x: Any, heads: int, units: int, rotary: bool, dropout: float, name: str) -> Any:

    from tfopt.models.text.attention import CausalAttention

    width = x.shape[-1]
    normed = layers.LayerNormalization(epsilon=GPT_EPSILON, name=f"{name}_norm1")(x)
    query, key, value = (layers.Dense(width, name=f"{name}_{part}")(normed) for part in ("query", "key", "value"))
    attended = CausalAttention(heads, rotary, name=f"{name}_attention")(query, key, value)
    x = _added(x, layers.Dense(width, name=f"{name}_attended")(attended), dropout, f"{name}_add1")
    normed = layers.LayerNormalization(epsilon=GPT_EPSILON, name=f"{name}_norm2")(x)
    hidden = layers.Dense(units, activation="gelu", name=f"{name}_up")(normed)
    return _added(x, layers.Dense(width, name=f"{name}_down")(hidden), dropout, f"{name}_add2")


def _added(x: Any, branch: Any, dropout: float, name: str) -> Any:
    return layers.Add(name=name)([x, dropped(branch, dropout, f"{name}_dropout")])
