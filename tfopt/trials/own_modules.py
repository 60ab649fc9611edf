"""The modules with the code of a model, which the process of a trial imports before it reads the model's file."""

from __future__ import annotations

import keras

from tfopt.compat.layers import layers_inside


def own_modules(model: keras.Model) -> list[str]:
    """Returns the modules that have a model's layers and its loss, without Keras' own.

    Keras reads only classes that are registered, and they register when their modules are imported.

    Example:
        >>> own_modules(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
        []
    """
    own = [*layers_inside(model), getattr(model, "loss", None)]
    names = {getattr(each, "__module__", None) or "" for each in own}
    return sorted(each for each in names if each.split(".")[0] not in ("", "keras", "builtins", "__main__"))
