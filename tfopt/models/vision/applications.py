"""The body of a model of keras.applications: all layers before the head, also for small images and other widths."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras


def body(application: keras.Model, *, small_images: bool, norm_momentum: float, alpha: float = 1.0) -> keras.Model:
    """Returns a new model with the layers of another one, and with the settings that keras.applications fixes.

    Keras numbers the layers without a name over all models of a process. Here the numbers begin again with each model,
    so that two models name their layers alike.

    Args:
        application: A functional model without weights that count: the new model has new ones.
        small_images: Whether the first convolution keeps the size of the image. Otherwise it halves the size.
        norm_momentum: Momentum of the moving statistics of every normalization. Keras sets 0.999 in some models, whose
            statistics need thousands of steps to reach those of the data.
        alpha: Width: the number of filters of every layer is multiplied by it, and rounded to a multiple of 8. For
            functions of Keras that have no such argument.
    """
    import keras
    from keras import layers

    seen: Counter[str] = Counter()
    stem = next(layer for layer in application.layers if isinstance(layer, layers.Conv2D))

    def copy(layer: Any) -> Any:
        config = layer.get_config()
        config["name"] = _own_name(layer, seen)
        if layer is stem and small_images:
            config["strides"] = (1, 1)
        if alpha != 1 and "filters" in config:
            config["filters"] = _scaled(config["filters"], alpha)
        if alpha != 1 and isinstance(layer, layers.Reshape):  # the means of the channels, as an image of one pixel
            config["target_shape"] = (1, 1, _scaled(config["target_shape"][-1], alpha))
        if isinstance(layer, layers.BatchNormalization):
            config["momentum"] = norm_momentum
        return type(layer).from_config(config)

    return keras.models.clone_model(application, clone_function=copy)


def _scaled(filters: int, alpha: float) -> int:
    return max(8, 8 * round(filters * alpha / 8))


def _own_name(layer: Any, seen: Counter[str]) -> str:
    """Returns the name of a layer, with another number if Keras made it from the class, such as re_lu_12."""
    stem = re.sub(r"_\d+$", "", layer.name)
    if stem.replace("_", "") != type(layer).__name__.lower():
        return str(layer.name)
    seen[stem] += 1
    return f"{stem}_{seen[stem]}"
