"""Explains what Keras and TensorFlow say about data that does not fit the model: its shapes, class numbers and ids."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import ConfigError

_LABEL = re.compile(r"Received a label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
_INDEX = re.compile(r"indices\[([\d,]+)\] = (-?\d+) is not in \[0, (\d+)\)")
_COLORS = re.compile(r"\x1b\[\d*m")


def explain_specs(error: Exception, model: keras.Model, batch: tuple[Any, Any, Any]) -> ConfigError | None:
    """Returns the error for a model that cannot be built for batches of some specs; None if its own code failed.

    Args:
        error: What Keras raised as it built the model, its losses and its metrics.
        model: The model.
        batch: The specs of x, y and sample_weight.
    """
    if not isinstance(error, ValueError | KeyError | TypeError) or not _is_of_keras(error):
        return None
    x, y, _ = batch
    outputs = dict(zip(getattr(model, "output_names", None) or [], _outputs(model), strict=False))
    labelled = y if isinstance(y, dict) else {}
    missing = [name for name in outputs if name not in labelled] if labelled else []
    if isinstance(error, KeyError) and missing:
        return ConfigError(
            "Labels must be given for each output, by its name. Received: labels for "
            f"{', '.join(map(repr, labelled))}, and none for {', '.join(map(repr, missing))}. Keras needs them where a "
            f"single output has a loss or metric. Add them to the labels, or train "
            f"keras.Model(model.inputs, [...]) with the labelled outputs only."
        )
    words = _COLORS.sub("", str(error)).split("Arguments received by")[0]
    lines = [line.strip() for line in words.splitlines() if line.strip() and "Exception encountered" not in line]
    of_model = f"{_shapes(_inputs(model)) or 'unknown'} and outputs {_shapes(_outputs(model)) or 'unknown'}"
    return ConfigError(
        "Batches must fit the model, its losses and its metrics. Received: "
        f"inputs {_shapes(x)} and labels {_shapes(y) or 'none'}, for a model with inputs {of_model} "
        f"({' '.join(lines)[:600].rstrip('.')}). Correct the shape of the one that differs, or the loss or metric."
    )


def explain_values(error: tf.errors.OpError) -> ConfigError | None:
    """Returns the error for a class number or an id that is too large, as a processor finds it; None for others."""
    if (label := _LABEL.search(str(error))) is not None:
        return _out_of_range(int(label[1]), int(label[2]))
    if (index := _INDEX.search(str(error))) is not None:
        return ConfigError(
            f"Ids must be less than the number of rows that they are looked up in, and not negative. Received: "
            f"{index[2]} in place [{index[1]}] of a batch, with {index[3]} rows. Raise input_dim of the embedding, or "
            "correct the data."
        )
    return None


def find_label_out_of_range(model: keras.Model, labels: Iterable[Any]) -> str | None:
    """Returns what is wrong with class numbers that are beyond the classes of a model; None if nothing is found.

    On a GPU and under XLA, the loss of such a label is not a number.
    """
    loss = getattr(model, "loss", None)
    outputs = _outputs(model)
    name = str(getattr(loss, "name", None) or getattr(loss, "__name__", None) or loss)
    if len(outputs) != 1 or "sparse_categorical_crossentropy" not in name:
        return None
    classes, ignored = outputs[0].shape[-1], getattr(loss, "ignore_class", None)
    for each in labels:
        values = np.asarray(each)
        if values.size and values.dtype.kind in "iuf" and classes:
            wrong = values[((values < 0) | (values >= classes)) & (values != ignored)]
            if wrong.size:
                return (
                    f"the label {wrong.ravel()[0]:g} is not a class number of the model, which are 0 to {classes - 1}"
                )
    return None


def _out_of_range(label: int, classes: int) -> ConfigError:
    return ConfigError(
        f"Labels must be class numbers, from 0 to {classes - 1} for {classes} outputs. Received: {label}. "
        "Correct them, or give the last layer more units; ignore_class of a loss leaves one class number out."
    )


def _is_of_keras(error: Exception) -> bool:
    """Returns whether Keras or TensorFlow raised it by themselves, and not a function of the user."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    name = frames[-1].f_globals.get("__name__", "") if frames else ""
    return name.split(".")[0] in ("keras", "tensorflow", "optree")


def _inputs(model: keras.Model) -> list[Any]:
    return keras.tree.flatten(getattr(model, "inputs", None) or [])


def _outputs(model: keras.Model) -> list[Any]:
    try:
        return keras.tree.flatten(model.outputs)
    except (AttributeError, ValueError):  # a model that is no graph
        return []


def _shapes(structure: Any) -> str:
    if isinstance(structure, dict):
        return ", ".join(f"{name!r}: {_shapes(each)}" for name, each in structure.items())
    return ", ".join(str(tuple(each.shape)) for each in keras.tree.flatten(structure) if each is not None)
