"""What all builders share: Keras itself, the rules of their arguments, the layout of images, and common layers.

A list of the builders needs no TensorFlow. So `keras`, `layers` and `ops` of this module, and tfopt's `own_layers`, are
imported when a builder first uses them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

from annotated_types import Ge, Gt, Lt, MinLen

from tfopt.settings.validation import Remedy, check_value


class _OnFirstUse:
    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


if TYPE_CHECKING:
    import keras as keras
    from keras import layers as layers
    from keras import ops as ops
else:
    keras, layers, ops = map(_OnFirstUse, ("keras", "keras.layers", "keras.ops"))
own_layers: Any = _OnFirstUse("tfopt.models.layers")

AtLeastOne = Annotated[int, Ge(1)]
Side = AtLeastOne | None
OfEachStage = Annotated[tuple[AtLeastOne, ...], MinLen(1), Remedy("Give one number for each stage.")]
Share = Annotated[float, Ge(0), Lt(1), Remedy("It is a fraction; 0 is off.")]

Shape = Annotated[tuple[Side, ...], MinLen(1)]
OfTokens = Annotated[tuple[Side], Remedy("It is (length,), the number of tokens; None for any.")]

# A list counts as a tuple.
RULES: dict[str, Any] = {
    "alpha": Annotated[float, Gt(0), Lt(math.inf), Remedy("1.0 is the published width.")],
    "blocks": AtLeastOne,
    "depth": AtLeastOne,
    "depths": OfEachStage,
    "drop_path": Share,
    "dropout": Share,
    "filters": AtLeastOne,
    "heads": AtLeastOne,
    "input_shape": Annotated[tuple[Side, Side, AtLeastOne], Remedy("It is (height, width, channels).")],
    "kernel_size": AtLeastOne,
    "layer_scale": Annotated[float, Ge(0), Lt(math.inf), Remedy("1e-6 is usual.")],
    "max_length": AtLeastOne | None,
    "mlp_units": AtLeastOne | None,
    "norm_momentum": Annotated[float, Ge(0), Lt(1), Remedy("0.99 is usual, and 0.9 for a short training.")],
    "outputs": AtLeastOne,
    "patch_size": AtLeastOne,
    "pool": Literal["token", "mean"],
    "steps": AtLeastOne | None,
    "token_dropout": Share,
    "units": tuple[AtLeastOne, ...],
    "vocabulary": AtLeastOne | None,
    "width": AtLeastOne,
    "widths": OfEachStage,
}


Arguments = ParamSpec("Arguments")


def builder(**rules: Any) -> Callable[[Callable[Arguments, keras.Model]], Callable[Arguments, keras.Model]]:
    """Makes a function a builder: it checks the arguments by their names, and builds with the channels last.

    `rules` are for arguments that do not follow those of RULES: None for one that the function checks itself.

    Example:
        >>> @builder(width=None)
        ... def network(outputs, width):
        ...     return keras.Sequential([keras.Input((width,)), keras.layers.Dense(outputs)])
        >>> network(0, 4)
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: outputs must be a whole number of at least 1. Received: outputs=0.
    """

    def decorated(build: Callable[Arguments, keras.Model]) -> Callable[Arguments, keras.Model]:
        @functools.wraps(build)
        def built(*args: Arguments.args, **kwargs: Arguments.kwargs) -> keras.Model:
            for name, value in inspect.getcallargs(build, *args, **kwargs).items():
                rule = rules[name] if name in rules else RULES.get(name)
                if rule is not None:
                    check_value(name, value, rule)
            return channels_last(build)(*args, **kwargs)

        return built

    return decorated


def channels_last(build: Callable[Arguments, keras.Model]) -> Callable[Arguments, keras.Model]:
    """Makes a builder build with the channels last.

    Without it, image_data_format in keras.json or in keras.config would make another network of the same arguments.
    Each layer keeps the layout that it was made with, also in a file.

    Example:
        >>> channels_last(lambda: keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3)]))().output_shape
        (None, 6, 6, 4)
    """

    @functools.wraps(build)
    def built(*args: Arguments.args, **kwargs: Arguments.kwargs) -> keras.Model:
        before = keras.config.image_data_format()
        keras.config.set_image_data_format("channels_last")
        try:
            return build(*args, **kwargs)
        finally:
            keras.config.set_image_data_format(before)

    return built


def conv_norm(
    x: Any,
    filters: int,
    size: int,
    name: str,
    *,
    momentum: float,
    number: int | str = "",
    stride: int = 1,
    dilation: int = 1,
    relu: bool = True,
    gamma: str = "ones",
) -> Any:
    """Adds a convolution, causal along a sequence, with batch normalization in place of a bias, and ReLU."""
    convolution, padding = (layers.Conv1D, "causal") if len(x.shape) == 3 else (layers.Conv2D, "same")
    x = convolution(
        filters,
        size,
        strides=stride,
        padding=padding,
        dilation_rate=dilation,
        use_bias=False,
        kernel_initializer="he_normal",
        name=f"{name}_conv{number}",
    )(x)
    x = layers.BatchNormalization(momentum=momentum, gamma_initializer=gamma, name=f"{name}_norm{number}")(x)
    return layers.ReLU(name=f"{name}_relu{number}")(x) if relu else x


def dropped(x: Any, rate: float, name: str, noise_shape: Sequence[int | None] | None = None) -> Any:
    """Adds dropout, and no layer if the rate is 0."""
    return layers.Dropout(rate, noise_shape=noise_shape, name=name)(x) if rate else x


def with_logits(inputs: Any, x: Any, outputs: int, name: str, *, dropout: float = 0.0) -> keras.Model:
    """Returns the model that ends in a dense layer of logits, in float32 under any dtype policy."""
    x = dropped(x, dropout, "dropout")
    return keras.Model(inputs, layers.Dense(outputs, dtype="float32", name="logits")(x), name=name)
