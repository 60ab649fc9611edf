"""The two simplest networks: the multilayer perceptron, and a convolutional network in the style of LeNet-5."""

from __future__ import annotations

from collections.abc import Sequence

from tfopt.models.building import OfEachStage, Shape, builder, dropped, keras, layers, with_logits


@builder(input_shape=Shape)
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
    inputs = layers.Input(tuple(input_shape), name="features")
    x = layers.Flatten(name="flatten")(inputs)
    for number, width in enumerate(units, start=1):
        x = layers.Dense(width, activation="relu", name=f"dense{number}")(x)
        x = dropped(x, dropout, f"dropout{number}")
    return with_logits(inputs, x, outputs, "mlp")


@builder(filters=OfEachStage)
def simple_cnn(
    input_shape: Sequence[int],
    outputs: int,
    *,
    filters: Sequence[int] = (6, 16),
    kernel_size: int = 5,
    units: Sequence[int] = (120, 84),
    dropout: float = 0.0,
) -> keras.Model:
    """Builds convolutions with max pooling, then dense layers. By default two and three, as in LeNet-5.

    Args:
        input_shape: (height, width, channels).
        outputs: Number of classes, or of values.
        filters: Number of filters of each convolution. Pooling after it halves height and width.
        kernel_size: Height and width of the window of every convolution, in pixels.
        units: Width of each hidden dense layer.
        dropout: Share of the activations before the output layer that training sets to zero.
    Returns: A model from [batch, height, width, channels] to logits [batch, outputs].
    Example:
        >>> simple_cnn((32, 32, 1), 10).count_params()
        61706

    Reference:
        LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proceedings of the IEEE, 1998.
    """
    inputs = layers.Input(tuple(input_shape), name="image")
    x = inputs
    for number, width in enumerate(filters, start=1):
        x = layers.Conv2D(width, kernel_size, activation="relu", name=f"conv{number}")(x)
        x = layers.MaxPooling2D(name=f"pool{number}")(x)
    x = layers.Flatten(name="flatten")(x)
    for number, width in enumerate(units, start=1):
        x = layers.Dense(width, activation="relu", name=f"dense{number}")(x)
    return with_logits(inputs, x, outputs, "simple_cnn", dropout=dropout)
