"""The kinds of classifiers, and what is right for each.

The metric "accuracy" finds out the kind of classifier, mostly from the shapes of outputs and labels. Below, S stands
for [batch], [batch, steps], [batch, height, width] and so on:

    outputs [*S, classes], labels S or [*S, 1]                     one class each: the largest output counts
    outputs [*S, classes], labels of this shape, one 1 per row     the same, with one-hot labels
    outputs [*S, labels], labels of this shape, 0 or 1             several labels each: every output is a decision
    outputs S or [*S, 1], labels S or [*S, 1], 0 or 1              two classes: the output is a decision

A decision is "yes" above 0.5 if the output is a probability, and above 0 if it is a logit. The op that computes the
output tells which of the two it is. If the op does not tell, values outside of [0, 1] mean logits. If the values do not
tell either, the metric is an error: the caller must choose another name of METRICS, which tells the kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tfopt.errors import ConfigError

THRESHOLDS = {"binary_accuracy": 0.5, "binary_accuracy_from_logits": 0.0}

PROBABILITIES = ("Sigmoid", "Softmax")
PRODUCTS = (
    *("MatMul", "BatchMatMul", "BatchMatMulV2", "Einsum"),
    *("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Conv2DBackpropInput", "Conv3DBackpropInputV2"),
)
OWN_FUNCTION = "For another measure pass a function (labels, outputs) -> float as the metric."


def decisions(output: np.ndarray, threshold: float | None) -> np.ndarray:
    """Returns whether values are above a threshold; without one the classes, each the index of the largest value."""
    return np.asarray(output.argmax(axis=-1) if threshold is None else output > threshold)


def read_labels(
    metric: str, name: str, labels: Any, output: np.ndarray, op: str | None = None
) -> tuple[float | None, np.ndarray]:
    """Returns the threshold by which an output becomes decisions, and the right decisions as a flat array.

    Args:
        metric: One of METRICS.
        name: The output's name.
        labels: Its labels.
        output: Its values.
        op: The op that computes it, if known.
    Raises:
        ConfigError: The labels do not fit the output, or do not tell the kind of classifier.
    """
    labels = np.asarray(labels)
    if labels.dtype.kind not in "biuf":
        raise ConfigError(
            f"Labels must be class numbers, one-hot or 0 and 1. Received: {_such_as(labels)}. Convert them to numbers."
        )
    if len(labels) != len(output):
        raise ConfigError(
            f"data must have one label per example. Received: {len(output)} examples and {len(labels)} labels. "
            "Give a label for each example."
        )
    single = output.ndim == 1 or output.shape[-1] == 1
    alike = _trimmed(labels.shape) == _trimmed(output.shape)
    labels = labels.reshape(output.shape) if alike else labels
    if metric in THRESHOLDS:
        return THRESHOLDS[metric], _truths(name, labels, output)
    if metric == "categorical_accuracy" or (not single and not alike):
        return None, _classes(name, labels, output)
    if not single and _sums_to_one(labels):
        unknown = op != "Softmax" and op not in PRODUCTS
        if op == "Sigmoid" or (unknown and _in_unit(output) and not _sums_to_one(output)):
            raise ConfigError(
                "metric='accuracy' must know whether an example has one class or several labels. Received: output "
                f"{name!r} of probabilities that do not sum to 1, and labels with one 1 in each row. Give "
                "metric='categorical_accuracy' if each example has one class, 'binary_accuracy' if an example can have "
                "several labels."
            )
        return None, _classes(name, labels, output)
    targets = _truths(name, labels, output)
    if op == "Softmax" and not single:
        raise ConfigError(
            f"Labels of the softmax output {name!r} must be class numbers, or one-hot. "
            f"Received: {_such_as(labels)}. Give metric='binary_accuracy' if an example can have several labels."
        )
    if op in PROBABILITIES:
        return 0.5, targets
    if op in PRODUCTS or not _in_unit(output):
        return 0.0, targets
    raise ConfigError(
        f"metric='accuracy' must know whether outputs are logits or probabilities. Received: output {name!r} "
        f"with values in [0, 1], computed by {op or 'an unknown op'}. Give metric='binary_accuracy' for probabilities, "
        "'binary_accuracy_from_logits' for logits."
    )


def _classes(name: str, labels: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Returns the class number of each position of the output."""
    if output.ndim < 2 or output.shape[-1] < 2:
        raise ConfigError(
            f"metric='categorical_accuracy' is for outputs of [batch, classes] or more axes. Received: output {name!r} "
            f"of shape {output.shape}. {OWN_FUNCTION}"
        )
    *positions, count = output.shape
    if labels.shape == output.shape:
        if np.isfinite(labels).all() and labels.min(initial=0) >= 0 and _sums_to_one(labels):
            return labels.argmax(axis=-1).reshape(-1)
    elif _trimmed(labels.shape) == _trimmed(tuple(positions)) and np.isin(labels, np.arange(count)).all():
        return labels.reshape(-1)
    raise ConfigError(
        f"Labels must be class numbers from 0 to {count - 1}, or one-hot, for the output {name!r} of shape "
        f"{output.shape}. Received: {_such_as(labels)}. {OWN_FUNCTION}"
    )


def _truths(name: str, labels: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Returns the right decision for each value of the output, as a flat array of booleans."""
    if _trimmed(labels.shape) != _trimmed(output.shape) or not np.isin(labels, (0, 1)).all():
        raise ConfigError(
            f"Labels must be 0 or 1 for each value of the output {name!r}, of shape {output.shape}. "
            f"Received: {_such_as(labels)}. The model is read as a classifier; for regression set the metric "
            "'mean_absolute_error', or pass a function (labels, outputs) -> float. Of several outputs, labels as a "
            "dict may leave this one out."
        )
    return labels.reshape(-1).astype(bool)


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without the axes of size 1 at its end. The batch axis stays."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _sums_to_one(values: np.ndarray) -> bool:
    """Whether each row sums to 1, as in one-hot labels, smoothed or not, and in a softmax."""
    return bool(np.isclose(values.sum(axis=-1, dtype=np.float64), 1, atol=1e-2).all())


def _in_unit(output: np.ndarray) -> bool:
    return bool(((output >= 0) & (output <= 1)).all())


def _such_as(labels: np.ndarray) -> str:
    return f"labels of shape {labels.shape}, such as {labels.reshape(-1)[:3].tolist()}"
