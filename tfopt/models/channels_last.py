"""The layout of the images that builders take: [batch, height, width, channels], whatever the settings of Keras say."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

if TYPE_CHECKING:
    import keras

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
