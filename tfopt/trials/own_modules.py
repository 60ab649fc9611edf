"""The modules with the code of a model, which the process of a trial imports before it reads the model's file."""

from __future__ import annotations

import json
from typing import Any

import keras


def own_modules(model: keras.Model) -> list[str]:
    """Returns the modules that have what a model's file names, such as its layers and its loss, without Keras' own.

    Keras reads only what is registered, which happens when the module is imported.

    Example:
        >>> own_modules(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
        []
    """
    found: set[str] = set()

    def note(config: dict[str, Any]) -> dict[str, Any]:
        if "class_name" in config and isinstance(config.get("module"), str):
            found.add(config["module"])
        return config

    json.loads(model.to_json(), object_hook=note)
    return sorted(each for each in found if each.split(".")[0] not in ("", "keras", "builtins", "__main__"))
