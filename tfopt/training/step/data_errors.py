"""Explains what Keras and TensorFlow say about the data of a `fit`: what failed, or what does not fit the model.

A file, the user's Python code or an operation fails where the batches are made, and shapes, class numbers or ids do not
fit the model. TensorFlow raises the same kinds of errors for all of them. Only their text tells them apart.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.tensorflow import words_of
from tfopt.errors import ConfigError, TfoptError, TrainingError
from tfopt.terminal import without_colors

_OF_FILES = (tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.PermissionDeniedError)
_READS = ("Decode", "Parse", "Read")  # how the names of operations begin that read or decode
_DIFFERENT_SHAPES = re.compile(
    r"Cannot batch tensors with different shapes in component \d+\. "
    r"First element had shape (\[[\d,]*\]) and element \d+ had shape (\[[\d,]*\])"
)
_NODE = re.compile(r"\{\{node (?:[^}]*/)?([^}/]+)\}\}")
# What the augmentation asserts, in the pipeline or in the step: the parts of a sentence, each in brackets.
_ASSERTED = re.compile(r"assertion failed: ((?:\[[^\[\]]*\] ?)+)")
_OF_AUGMENTATION = ("Images must be", "Targets must be")
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|__autograph_generated|^<")
_LABEL = re.compile(r"Received a label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
_INDEX = re.compile(r"indices\[([\d,]*)\] = (-?\d+) is not in \[0, (\d+)\)")
_TEXT = re.compile(r"Cast string to \w+ is not supported")
_NO_NUMBERS = re.compile(r"Invalid dtype: (str\d*|bytes\d*|object)")
_NO_CLASS_WEIGHT = "`class_weight` is only supported for Models with a single output."


def explained(error: tf.errors.OpError, class_weight: Any, checkpoint: str) -> TfoptError | None:
    """Returns the error of a `fit` that says what is wrong with its data, or None if that is not what failed.

    `class_weight` is the argument of `fit`, and `checkpoint` a sentence about the newest checkpoint.

    Example:
        >>> text = "Iterator::Root::Map: indices[3] = 2 is not in [0, 2) [[{{node GatherV2}}]]"
        >>> print(explained(tf.errors.InvalidArgumentError(None, None, text), {0: 1.0, 1: 2.0}, ""))
        class_weight must have a weight for each class. Received: a label of 2, and weights for the classes 0, 1. Add \
one, or correct the label.
    """
    text = str(error.message)
    if "Iterator::" not in text and (misfit := _of_values(text)) is not None:
        return misfit
    if (shapes := _DIFFERENT_SHAPES.search(text)) is not None:
        images = shapes[1].count(",") == 2  # height, width, channels
        remedy = "Resize the images to one size before" if images else "Pad them to one length before"
        return ConfigError(
            "The examples of a batch must have one shape. Received: examples of the shapes "
            f"{shapes[1]} and {shapes[2]}. {remedy} plan.pipeline, or give fit batches that dataset.padded_batch made."
        )
    if (asserted := _ASSERTED.search(text)) is not None:
        words = " ".join(re.findall(r"\[([^\[\]]*)\]", asserted[1]))
        if words.startswith(_OF_AUGMENTATION):
            return ConfigError(words)
    if "Iterator::" not in text and "IteratorGetNext" not in text:
        return None
    if _TRACEBACK in text:
        return TrainingError(f"{_of_python(text)} Correct that code, then train again. {checkpoint}".strip())
    missing, nodes = _INDEX.search(text), _NODE.findall(text)
    if missing is not None and isinstance(class_weight, Mapping) and int(missing[3]) == max(class_weight) + 1:
        known = ", ".join(str(each) for each in sorted(class_weight))
        return ConfigError(
            f"class_weight must have a weight for each class. Received: a label of {missing[2]}, and weights for the "
            f"classes {known}. Add one, or correct the label."
        )
    node = next((each for each in nodes if not each.startswith("Iterator")), "")
    if isinstance(error, _OF_FILES) or node.startswith(_READS):
        return TrainingError(
            f"The examples could not be read: {words_of(error)}. Repair the file or leave it out, then train again. "
            f"{checkpoint} For a folder of images, check='decode' names damaged files."
        )
    where = f"operation {node} of the data set failed" if node else "the data set failed"
    return TrainingError(
        f"A batch could not be made: {where}: {words_of(error)}. Look for it in the functions that make the examples, "
        f"or in a value of the data that they do not expect, then train again. {checkpoint}".strip()
    )


def of_arguments(error: ValueError) -> ConfigError | None:
    """Returns the error for NumPy arrays that hold no numbers, or for class weights; None if Keras refuses others."""
    if str(error) == _NO_CLASS_WEIGHT:
        return ConfigError(
            "class_weight is for a model with a single output and single labels. Received: class_weight with several "
            "outputs, or with the examples of a cached teacher. Give each example a weight in its place: batches "
            "(inputs, labels, weights)."
        )
    if (dtype := _NO_NUMBERS.fullmatch(str(error))) is None:
        return None
    return ConfigError(
        f"Arrays for fit must hold numbers. Received: an array of dtype {dtype[1]}. Convert it to numbers; a model "
        "that begins with a layer that reads text takes tf.constant(array)."
    )


def _of_python(text: str) -> str:
    """Returns what the user's Python code raised, and the innermost of its lines."""
    before, _, trace = text.partition(_TRACEBACK)
    raised = re.split(r"<stack traces unavailable>|\n\n", before.strip())[-1]
    raised = re.sub(r"^.*(Iterator::\S*|\{\{function_node \S*\}\}) ", "", " ".join(raised.split()))[:400]
    own = [frame for frame in _FRAME.findall(trace) if not _LIBRARY.search(frame[0])]
    where = f" in {own[-1][0]}:{own[-1][1]}, {own[-1][2]}" if own else ""
    return f"The Python code that makes the batches raised {raised.removesuffix('.')}{where}."


def explain_specs(error: Exception, model: keras.Model, batch: tuple[Any, Any, Any]) -> ConfigError | None:
    """Returns the error for a model that cannot be built for batches of some specs; None if its own code failed.

    `error` is what Keras raised as it built the model, its losses and its metrics for specs of x, y and sample_weight.
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
    words = without_colors(str(error)).split("Arguments received by")[0]
    lines = [line.strip() for line in words.splitlines() if line.strip() and "Exception encountered" not in line]
    of_model = f"{_shapes(getattr(model, 'inputs', None) or []) or 'unknown'} and outputs "
    of_model += _shapes(_outputs(model)) or "unknown"
    return ConfigError(
        "Batches must fit the model, its losses and its metrics. Received: "
        f"inputs {_shapes(x)} and labels {_shapes(y) or 'none'}, for a model with inputs {of_model} "
        f"({' '.join(lines)[:600].rstrip('.')}). Correct the shape of the one that differs, or the loss or metric."
    )


def _of_values(text: str) -> ConfigError | None:
    """Returns the error for text, or a class number or id that is too large, as a processor finds it; else None."""
    if _TEXT.search(text):
        return ConfigError(
            "Inputs and labels must be numbers where the model computes with them. Received: text. Convert it to "
            "numbers, or begin the model with a layer that reads text, such as keras.layers.TextVectorization."
        )
    if (label := _LABEL.search(text)) is not None:
        number, classes = int(label[1]), int(label[2])
        return ConfigError(
            f"Labels must be class numbers, from 0 to {classes - 1} for {classes} outputs. Received: {number}. "
            "Correct them, or give the last layer more units; ignore_class of a loss leaves one class number out."
        )
    if (index := _INDEX.search(text)) is not None:
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
    for values in map(np.asarray, labels):
        if values.dtype.kind in "iuf" and classes:
            wrong = values[((values < 0) | (values >= classes)) & (values != ignored)]
            if wrong.size:
                return f"the label {wrong[0]:g} is not a class number of the model, which are 0 to {classes - 1}"
    return None


def _is_of_keras(error: Exception) -> bool:
    """Returns whether Keras or TensorFlow raised it by themselves, and not a function of the user."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    name = frames[-1].f_globals.get("__name__", "") if frames else ""
    return name.split(".")[0] in ("keras", "tensorflow", "optree")


def _outputs(model: keras.Model) -> list[Any]:
    try:
        return keras.tree.flatten(model.outputs)
    except (AttributeError, ValueError):  # a model that is no graph
        return []


def _shapes(structure: Any) -> str:
    if isinstance(structure, dict):
        return ", ".join(f"{name!r}: {_shapes(each)}" for name, each in structure.items())
    return ", ".join(str(tuple(each.shape)) for each in keras.tree.flatten(structure) if each is not None)
