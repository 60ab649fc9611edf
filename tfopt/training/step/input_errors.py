"""Says what failed where the batches of a `fit` are made: a file, the user's Python code, or an operation.

TensorFlow raises the same kinds of errors for all of them. Only their text tells them apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfopt.compat.tensorflow import words_of
from tfopt.errors import ConfigError, TfoptError, TrainingError

_OF_FILES = (tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.PermissionDeniedError)
_READS = ("Decode", "Parse", "Read")  # how the names of operations begin that read or decode
_DIFFERENT_SHAPES = re.compile(
    r"Cannot batch tensors with different shapes in component \d+\. "
    r"First element had shape (\[[\d,]*\]) and element \d+ had shape (\[[\d,]*\])"
)
_NODE = re.compile(r"\{\{node (?:[^}]*/)?([^}/]+)\}\}")
_NO_INDEX = re.compile(r"indices\[[\d,]*\] = (-?\d+) is not in \[0, (\d+)\)")
# What the augmentation asserts, in the pipeline or in the step: the parts of a sentence, each in brackets.
_ASSERTED = re.compile(r"assertion failed: ((?:\[[^\[\]]*\] ?)+)")
_OF_AUGMENTATION = ("Images must be", "Targets must be")
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|__autograph_generated|^<")


def explained(error: tf.errors.OpError, class_weight: Any, checkpoint: str) -> TfoptError | None:
    """Returns the error of a `fit` that says what failed in its input, or None if the input is not what failed.

    Args:
        error: TensorFlow's error.
        class_weight: The argument of `fit`.
        checkpoint: The sentence about the newest checkpoint.
    Example:
        >>> text = "Iterator::Root::Map: indices[3] = 2 is not in [0, 2) [[{{node GatherV2}}]]"
        >>> print(explained(tf.errors.InvalidArgumentError(None, None, text), {0: 1.0, 1: 2.0}, ""))
        class_weight must have a weight for each class. Received: a label of 2, and weights for the classes 0, 1. Add \
one, or correct the label.
    """
    text = str(error.message)
    if (shapes := _DIFFERENT_SHAPES.search(text)) is not None:
        return ConfigError(
            "The examples of a batch must have one shape. Received: examples of the shapes "
            f"{shapes[1]} and {shapes[2]}. Pad them to one length before plan.pipeline, or give fit batches "
            "that dataset.padded_batch made."
        )
    if (asserted := _ASSERTED.search(text)) is not None:
        words = " ".join(re.findall(r"\[([^\[\]]*)\]", asserted[1]))
        if words.startswith(_OF_AUGMENTATION):
            return ConfigError(words)
    if "Iterator::" not in text and "IteratorGetNext" not in text:
        return None
    if _TRACEBACK in text:
        return TrainingError(f"{_of_python(text)} Correct that code, then train again. {checkpoint}".strip())
    missing, nodes = _NO_INDEX.search(text), _NODE.findall(text)
    if missing is not None and isinstance(class_weight, Mapping) and int(missing[2]) == max(class_weight) + 1:
        known = ", ".join(str(each) for each in sorted(class_weight))
        return ConfigError(
            f"class_weight must have a weight for each class. Received: a label of {missing[1]}, and weights for the "
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


def _of_python(text: str) -> str:
    """Returns what the user's Python code raised, and the innermost of its lines."""
    before, _, trace = text.partition(_TRACEBACK)
    raised = re.split(r"<stack traces unavailable>|\n\n", before.strip())[-1]
    raised = re.sub(r"^.*(Iterator::\S*|\{\{function_node \S*\}\}) ", "", " ".join(raised.split()))[:400]
    own = [frame for frame in _FRAME.findall(trace) if not _LIBRARY.search(frame[0])]
    where = f" in {own[-1][0]}:{own[-1][1]}, {own[-1][2]}" if own else ""
    return f"The Python code that makes the batches raised {raised.removesuffix('.')}{where}."
