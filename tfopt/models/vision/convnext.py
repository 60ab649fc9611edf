"""ConvNeXt: convolutional networks with the design of a vision transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfopt.errors import ConfigError
from tfopt.models.arguments import builder

if TYPE_CHECKING:
    import keras
    from keras import KerasTensor


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
    import keras  # here, so that a list of the builders needs no TensorFlow
    from keras import layers

    _check_sizes(input_shape, depths, widths, patch_size)
    blocks = sum(depths)
    rates = iter([drop_path * number / max(1, blocks - 1) for number in range(blocks)])
    inputs = keras.Input(tuple(input_shape), name="image")
    x = layers.Conv2D(widths[0], patch_size, strides=patch_size, name="stem_conv")(inputs)
    x = layers.LayerNormalization(epsilon=1e-6, name="stem_norm")(x)
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True), start=1):
        if stage > 1:
            x = layers.LayerNormalization(epsilon=1e-6, name=f"stage{stage}_norm")(x)
            x = layers.Conv2D(width, 2, strides=2, name=f"stage{stage}_conv")(x)
        for block in range(1, depth + 1):
            x = _block(x, kernel_size, next(rates), layer_scale, f"stage{stage}_block{block}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    logits = layers.Dense(outputs, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="convnext")


def _check_sizes(input_shape: Sequence[int], depths: Sequence[int], widths: Sequence[int], patch_size: int) -> None:
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


def _block(x: KerasTensor, kernel_size: int, drop_path: float, layer_scale: float, name: str) -> KerasTensor:
    from keras import layers

    from tfopt.models.layers import LayerScale

    width = x.shape[-1]
    y = layers.DepthwiseConv2D(kernel_size, padding="same", name=f"{name}_depthwise")(x)
    y = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm")(y)
    y = layers.Dense(4 * width, activation="gelu", name=f"{name}_dense1")(y)
    y = layers.Dense(width, name=f"{name}_dense2")(y)
    y = LayerScale(layer_scale, name=f"{name}_scale")(y)
    if drop_path:
        y = layers.Dropout(drop_path, noise_shape=(None, 1, 1, 1), name=f"{name}_drop_path")(y)
    return layers.Add(name=f"{name}_add")([x, y])
