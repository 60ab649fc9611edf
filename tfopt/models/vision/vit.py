"""Vision transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from tfopt.errors import ConfigError
from tfopt.models.arguments import builder

if TYPE_CHECKING:
    import keras
    from keras import KerasTensor


@builder()
def vit(
    input_shape: Sequence[int],
    outputs: int,
    *,
    patch_size: int = 16,
    width: int = 192,
    depth: int = 12,
    heads: int = 3,
    mlp_units: int | None = None,
    pool: Literal["token", "mean"] = "token",
    dropout: float = 0.0,
    drop_path: float = 0.0,
) -> keras.Model:
    """Builds the vision transformer: the image is cut into patches, and a transformer encoder reads their sequence.

    The sizes of DeiT have 12 blocks; the numbers are those of 224x224 images with patches of 16 and 1,000 classes:

    | size | width | heads | parameters | multiply-adds |
    | --- | ---: | ---: | ---: | ---: |
    | tiny | 192 | 3 | 5,717,416 | 1.3 billion |
    | small | 384 | 6 | 22,050,664 | 4.6 billion |
    | base | 768 | 12 | 86,567,656 | 17.6 billion |

    Layer normalization stands before attention and before the dense layers (pre-norm). A position has a trained vector,
    so the model takes images of one size only. A saved .keras file loads in programs that import tfopt.

    Args:
        input_shape: (height, width, channels).
        outputs: Number of classes, or of values.
        patch_size: Side of a patch, in pixels. It must divide height and width.
        width: Length of the vector of each patch, a multiple of `heads`.
        depth: Number of blocks.
        heads: Number of heads of each attention. Heads of 64 values are usual.
        mlp_units: Units of the hidden dense layer in each block. None means four times the width.
        pool: What the output layer reads: "token", a trained class token before the patches, or "mean", the mean of all
            patches.
        dropout: Share of the activations that training sets to zero: after the positions and at the end of each branch.
        drop_path: Share of the examples for which training leaves out the last block's branches (stochastic depth). It
            rises from 0 in the first block.
    Returns: A model from [batch, height, width, channels] to logits [batch, outputs].
    Raises:
        ConfigError: The patches do not fit the image, the heads do not fit the width, or a value is out of range.
    Example:
        >>> vit((32, 32, 1), 10, patch_size=4, width=64, depth=2, heads=2).output_shape
        (None, 10)

    Reference:
        Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, arXiv:2010.11929.
        Touvron et al., "Training data-efficient image transformers" (DeiT), ICML 2021, arXiv:2012.12877.
    """
    import keras  # here, so that a list of the builders needs no TensorFlow
    from keras import layers

    from tfopt.models.layers import ClassToken, LearnedPositions

    rows, columns = _patches(input_shape, patch_size)
    if width % heads:
        raise ConfigError(
            f"width must be a multiple of heads. Received: width={width}, heads={heads}. "
            f"The nearest width is {heads * max(1, round(width / heads))}."
        )
    inputs = keras.Input(tuple(input_shape), name="image")
    x = layers.Conv2D(width, patch_size, strides=patch_size, name="patches")(inputs)
    x = layers.Reshape((rows * columns, width), name="sequence")(x)
    if pool == "token":
        x = ClassToken(name="class_token")(x)
    x = LearnedPositions(x.shape[1], name="positions")(x)
    if dropout:
        x = layers.Dropout(dropout, name="positions_dropout")(x)
    for number in range(depth):
        dropped = drop_path * number / max(1, depth - 1)
        x = _block(x, heads, mlp_units or 4 * width, dropout, dropped, f"block{number + 1}")
    x = layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    if pool == "token":
        x = layers.Cropping1D((0, rows * columns), name="token")(x)
        x = layers.Flatten(name="flatten")(x)
    else:
        x = layers.GlobalAveragePooling1D(name="mean")(x)
    logits = layers.Dense(outputs, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="vit")


def _patches(input_shape: Sequence[int], patch_size: int) -> tuple[int, int]:
    """Returns the number of rows and of columns of patches."""
    height, width, _ = input_shape
    if any(side is None or side % patch_size or side < patch_size for side in (height, width)):
        fits = [size for size in (4, 7, 8, 14, 16, 32) if height and width and height % size == 0 == width % size]
        raise ConfigError(
            f"patch_size must divide height and width. Received: patch_size={patch_size} for {height}x{width} images. "
            + (f"Set patch_size={min(fits, key=lambda size: abs(size - patch_size))}." if fits else "Resize them.")
        )
    return height // patch_size, width // patch_size


def _block(x: KerasTensor, heads: int, units: int, dropout: float, drop_path: float, name: str) -> KerasTensor:
    import keras
    from keras import layers

    width = x.shape[-1]
    # Keras takes the kernels of the heads for convolutions, whose default weights would be several times too small.
    kernels = keras.initializers.RandomNormal(stddev=width**-0.5)
    y = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm1")(x)
    attention = layers.MultiHeadAttention(heads, width // heads, kernel_initializer=kernels, name=f"{name}_attention")
    x = _add(x, attention(y, y), dropout, drop_path, f"{name}_attention")
    y = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm2")(x)
    y = layers.Dense(units, activation="gelu", name=f"{name}_dense1")(y)
    if dropout:
        y = layers.Dropout(dropout, name=f"{name}_dense1_dropout")(y)
    y = layers.Dense(width, name=f"{name}_dense2")(y)
    return _add(x, y, dropout, drop_path, f"{name}_dense")


def _add(x: KerasTensor, branch: KerasTensor, dropout: float, drop_path: float, name: str) -> KerasTensor:
    from keras import layers

    if dropout:
        branch = layers.Dropout(dropout, name=f"{name}_dropout")(branch)
    if drop_path:
        branch = layers.Dropout(drop_path, noise_shape=(None, 1, 1), name=f"{name}_drop_path")(branch)
    return layers.Add(name=f"{name}_add")([x, branch])
