"""What a training was compiled with: its optimizer, its loss and its metrics, in words that JSON can hold.

Their variables do not tell them: those of Adam have the shapes of AdamW's, and two means are alike. So a checkpoint
holds these words, and a training that resumes compares them with its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import keras

from tfopt.compat.optimizers import inner_optimizer

_COUNTER = re.compile(r"_\d+$")  # Keras numbers names, differently in another process
_NO_SETTINGS = ("name", "built", "learning_rate")


def compiled_with(model: keras.Model) -> dict[str, Any]:
    """Returns the optimizer, its settings, the loss and the metrics of a compiled model whose metrics are built.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(momentum=0.5), "mse")
        >>> words = compiled_with(model)
        >>> words["optimizer"], words["settings"]["momentum"], words["loss"], words["metrics"]
        ('SGD', 0.5, 'mean_squared_error', ['loss'])
    """
    optimizer = inner_optimizer(model.optimizer)
    settings = {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_")
        and name not in _NO_SETTINGS
        and (value is None or isinstance(value, bool | int | float | str))
    }
    return {
        "optimizer": type(optimizer).__name__,
        "settings": settings,
        "loss": _loss_in_words(getattr(model, "loss", None)),
        "metrics": [_COUNTER.sub("", each.name) for metric in model.metrics for each in _single(metric)],
    }


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, str]:
    """Returns what differs, in words: the keys are those of `compiled_with`.

    Example:
        >>> differences({"loss": "mean_absolute_error", "settings": {}}, {"loss": "mean_squared_error", "settings": {}})
        {'loss': 'the loss is mean_absolute_error and was mean_squared_error'}
    """
    found = {}
    for key in now.keys() & before.keys():
        one, other = now[key], before[key]
        if one == other:
            continue
        if key == "settings":
            changed = [name for name in one.keys() & other.keys() if one[name] != other[name]]
            if changed:
                found[key] = ", ".join(f"{name} is {one[name]} and was {other[name]}" for name in sorted(changed))
        else:
            verb = ("are", "were") if key == "metrics" else ("is", "was")
            found[key] = f"the {key} {verb[0]} {_shown(one)} and {verb[1]} {_shown(other)}"
    return found


def _single(metric: Any) -> list[Any]:
    """Returns the metrics that a metric consists of: Keras keeps those of `compile` in one."""
    return list(getattr(metric, "metrics", None) or [metric])


def _loss_in_words(loss: Any) -> Any:
    if isinstance(loss, Mapping):
        return {str(name): _loss_in_words(each) for name, each in loss.items()}
    if isinstance(loss, list | tuple):
        return [_loss_in_words(each) for each in loss]
    found = keras.losses.get(loss) if isinstance(loss, str) else loss
    name = getattr(found, "name", None) or getattr(found, "__name__", None)
    return _COUNTER.sub("", name) if isinstance(name, str) else None if loss is None else type(loss).__name__


def _shown(words: Any) -> str:
    return ", ".join(map(str, words)) if isinstance(words, list) else str(words)
