"""Networks of patches: the vision transformer, and ConvNeXt, convolutions with its design."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from tfopt.errors import ConfigError
from tfopt.models.building import builder, dropped, keras, layers, own_layers, with_logits


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

    rows, columns = _patches(input_shape, patch_size)
    if width % heads:
        raise ConfigError(
            f"width must be a multiple of heads. Received: width={width}, heads={heads}. "
            f"The nearest width is {heads * max(1, round(width / heads))}."
        )
    inputs = layers.Input(tuple(input_shape), name="image")
    x = layers.Conv2D(width, patch_size, strides=patch_size, name="patches")(inputs)
    x = layers.Reshape((rows * columns, width), name="sequence")(x)
    if pool == "token":
        x = own_layers.ClassToken(name="class_token")(x)
    x = own_layers.LearnedPositions(x.shape[1], name="positions")(x)
    x = dropped(x, dropout, "positions_dropout")
    for number in range(depth):
        rate = drop_path * number / max(1, depth - 1)
        x = _transformer_block(x, heads, mlp_units or 4 * width, dropout, rate, f"block{number + 1}")
    x = layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    if pool == "token":
        x = layers.Cropping1D((0, rows * columns), name="token")(x)
        x = layers.Flatten(name="flatten")(x)
    else:
        x = layers.GlobalAveragePooling1D(name="mean")(x)
    return with_logits(inputs, x, outputs, "vit")


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


def _transformer_block(x: Any, heads: int, units: int, dropout: float, drop_path: float, name: str) -> Any:
    width = x.shape[-1]
    # Keras takes the kernels of the heads for convolutions, whose default weights would be several times too small.
    kernels = keras.initializers.RandomNormal(stddev=width**-0.5)
    y = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm1")(x)
    attention = layers.MultiHeadAttention(heads, width // heads, kernel_initializer=kernels, name=f"{name}_attention")
    x = _add(x, attention(y, y), dropout, drop_path, f"{name}_attention")
    y = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm2")(x)
    y = layers.Dense(units, activation="gelu", name=f"{name}_dense1")(y)
    y = dropped(y, dropout, f"{name}_dense1_dropout")
    y = layers.Dense(width, name=f"{name}_dense2")(y)
    return _add(x, y, dropout, drop_path, f"{name}_dense")


def _add(x: Any, branch: Any, dropout: float, drop_path: float, name: str) -> Any:
    branch = dropped(branch, dropout, f"{name}_dropout")
    branch = dropped(branch, drop_path, f"{name}_drop_path", noise_shape=(None, 1, 1))
    return layers.Add(name=f"{name}_add")([x, branch])


@builder()
def convnext(
    input_shape: Sequence[int],
    outputs: int,
    *,
    depths: Sequence[int] = (3, 3, 9, 3),
    widths: Sequence[int] = (96, 192, 384, 768),
    patch_size: int = 4,
    kernel_size: int = 7,
    drop_path: float = 0.0,
    layer_scale: float = 1e-6,
) -> keras.Model:
    """Builds ConvNeXt: stages of depthwise convolutions, each followed by two dense layers on every pixel.

    The sizes of the paper, with their parameters at 1,000 classes. `convnext` builds tiny by default:

    | size | depths | widths | parameters | multiply-adds at 224x224 |
    | --- | --- | --- | ---: | ---: |
    | tiny | 3, 3, 9, 3 | 96, 192, 384, 768 | 28,589,128 | 4.5 billion |
    | small | 3, 3, 27, 3 | 96, 192, 384, 768 | 50,223,688 | 8.7 billion |
    | base | 3, 3, 27, 3 | 128, 256, 512, 1024 | 88,591,464 | 15.4 billion |

    For images of 32x32 pixels, patches of 4 are too coarse. Use patch_size=2 and two or three small stages.
    A saved .keras file loads in programs that import tfopt.

    Args:
        input_shape: (height, width, channels).
        outputs: Number of classes, or of values.
        depths: Number of blocks in each stage.
        widths: Number of channels in each stage. The first convolution of each later stage halves height and width.
        patch_size: Side of the patches that the first convolution cuts the image into, in pixels.
        kernel_size: Height and width of the window of the depthwise convolutions.
        drop_path: Share of the examples for which training leaves out the last block (stochastic depth). It rises from
            0 in the first block. The paper sets 0.1 for tiny.
        layer_scale: Initial factor of each block's output. A short training of a small network learns faster with 1.
    Returns: A model from [batch, height, width, channels] to logits [batch, outputs].
    Raises:
        ConfigError: depths and widths differ in length, or the image is too small.
    Example:
        >>> convnext((32, 32, 1), 10, depths=(2, 2), widths=(32, 64), patch_size=2).output_shape
        (None, 10)

    Reference:
        Liu et al., "A ConvNet for the 2020s", CVPR 2022, arXiv:2201.03545.
    """
    if len(depths) != len(widths):
        raise ConfigError(
            "depths and widths must have one number for each stage. "
            f"Received: depths={tuple(depths)}, widths={tuple(widths)}. Give both the same length."
        )
    smallest = patch_size * 2 ** (len(depths) - 1)
    if any(side is not None and side < smallest for side in input_shape[:2]):
        raise ConfigError(
            f"An image must have at least {smallest}x{smallest} pixels for {len(depths)} stages with "
            f"patch_size={patch_size}. Received: input_shape={tuple(input_shape)}. Set a smaller patch_size, or fewer "
            "stages."
        )
    blocks = sum(depths)
    rates = iter([drop_path * number / max(1, blocks - 1) for number in range(blocks)])
    inputs = layers.Input(tuple(input_shape), name="image")
    x = layers.Conv2D(widths[0], patch_size, strides=patch_size, name="stem_conv")(inputs)
    x = layers.LayerNormalization(epsilon=1e-6, name="stem_norm")(x)
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True), start=1):
        if stage > 1:
            x = layers.LayerNormalization(epsilon=1e-6, name=f"stage{stage}_norm")(x)
            x = layers.Conv2D(width, 2, strides=2, name=f"stage{stage}_conv")(x)
        for block in range(1, depth + 1):
            x = _convolution_block(x, kernel_size, next(rates), layer_scale, f"stage{stage}_block{block}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    return with_logits(inputs, x, outputs, "convnext")


def _convolution_block(x: Any, kernel_size: int, drop_path: float, layer_scale: float, name: str) -> Any:

    width = x.shape[-1]
    y = layers.DepthwiseConv2D(kernel_size, padding="same", name=f"{name}_depthwise")(x)
    y = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm")(y)
    y = layers.Dense(4 * width, activation="gelu", name=f"{name}_dense1")(y)
    y = layers.Dense(width, name=f"{name}_dense2")(y)
    y = own_layers.LayerScale(layer_scale, name=f"{name}_scale")(y)
    y = dropped(y, drop_path, f"{name}_drop_path", noise_shape=(None, 1, 1, 1))
    return layers.Add(name=f"{name}_add")([x, y])
