"""What all builders share: the rules of their arguments, by the name of the argument, and the layout of images."""

from __future__ import annotations

import functools
import inspect
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


Arguments = ParamSpec("Arguments")


def builder(**rules: Any) -> Callable[[Callable[Arguments, keras.Model]], Callable[Arguments, keras.Model]]:
    """Makes a function a builder: it checks the arguments by their names, and builds with the channels last.

    Args:
        rules: The rules of arguments that do not follow those of RULES. None for one that the function checks itself.
    Example:
        >>> import keras
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
