"""What all builders share: the rules of their arguments, by the name of the argument, and the layout of images."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

from annotated_types import Ge, Gt, Lt, MinLen

from tfopt.settings.validation import Remedy, check_value

if TYPE_CHECKING:
    import keras

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


def check_arguments(**values: Any) -> None:
    """Raises ConfigError unless each argument of a builder follows the rule of its name.

    Example:
        >>> check_arguments(input_shape=(32, 32, 1), outputs=10, dropout=0.1)
        >>> check_arguments(dropout=10)
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: dropout must be in [0, 1). Received: dropout=10. It is a fraction; 0 is off.
    """
    for name, value in values.items():
        check_value(name, value, RULES[name])


def check_shape(input_shape: Any, rule: Any = Shape) -> None:
    """Raises ConfigError unless the shape of an example follows a rule; for images, see `check_arguments`.

    Example:
        >>> check_shape((None, 3))
        >>> check_shape(32)
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: input_shape must be ... Received: input_shape=32.
    """
    check_value("input_shape", input_shape, rule)


Arguments = ParamSpec("Arguments")


def channels_last(build: Callable[Arguments, keras.Model]) -> Callable[Arguments, keras.Model]:
    """Makes a builder build with the channels last.

    Without it, image_data_format in keras.json or in keras.config would make another network of the same arguments.
    Each layer keeps the layout that it was made with, also in a file.

    Example:
        >>> import keras
        >>> channels_last(lambda: keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3)]))().output_shape
        (None, 6, 6, 4)
    """

    @functools.wraps(build)
    def built(*args: Arguments.args, **kwargs: Arguments.kwargs) -> keras.Model:
        import keras  # here, so that a list of the builders needs no TensorFlow

        before = keras.config.image_data_format()
        keras.config.set_image_data_format("channels_last")
        try:
            return build(*args, **kwargs)
        finally:
            keras.config.set_image_data_format(before)

    return built
