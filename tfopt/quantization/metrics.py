"""Metrics of a model's outputs: the accuracy of each kind of classifier, or the caller's own function.

"accuracy" finds out the kind of classifier, mostly from the shapes of outputs and labels. Below, S stands for [batch],
[batch, steps], [batch, height, width] and so on:

    outputs [*S, classes], labels S or [*S, 1]                     one class each: the largest output counts
    outputs [*S, classes], labels of this shape, one 1 per row     the same, with one-hot labels
    outputs [*S, labels], labels of this shape, 0 or 1             several labels each: every output is a decision
    outputs S or [*S, 1], labels S or [*S, 1], 0 or 1              two classes: the output is a decision

A decision is "yes" above 0.5 if the output is a probability, and above 0 if it is a logit. The op that computes the
output tells which of the two it is. If the op does not tell, values outside of [0, 1] mean logits. If the values do not
tell either, the metric is an error: the caller must choose another name of METRICS, which tells the kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfopt.errors import ConfigError
from tfopt.graph.edit import producer
from tfopt.graph.frozen import FrozenGraph
from tfopt.quantization.config import Metric, check_metric

THRESHOLDS = {"binary_accuracy": 0.5, "binary_accuracy_from_logits": 0.0}

PROBABILITIES = frozenset({"Sigmoid", "Softmax"})
PRODUCTS = frozenset(
    {
        "MatMul",
        "BatchMatMul",
        "BatchMatMulV2",
        "Einsum",
        "Conv2D",
        "Conv3D",
        "Conv2DBackpropInput",
        "Conv3DBackpropInputV2",
        "DepthwiseConv2dNative",
    }
)
# Ops whose result holds values of the first input. BiasAdd counts too: a logit plus a bias is still a logit.
VALUE_PRESERVING = frozenset(
    {
        "Identity",
        "IdentityN",
        "Cast",
        "Reshape",
        "Squeeze",
        "ExpandDims",
        "Transpose",
        "StridedSlice",
        "Slice",
        "BiasAdd",
    }
)
OWN_FUNCTION = "For another measure pass a function (labels, outputs) -> float as the metric."


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How an output becomes a decision.

    Attributes:
        threshold: An output above it means "yes". None: the index of the largest output on the last axis is the class.
    """

    threshold: float | None

    def of(self, output: np.ndarray) -> np.ndarray:
        """Returns class numbers, or booleans."""
        return np.asarray(output.argmax(axis=-1) if self.threshold is None else output > self.threshold)


class Scorer:
    """Scores outputs against labels.

    The kind of classifier is found out once, from the outputs of the float model. So the outputs of a quantized model
    are scored in the same way.

    Args:
        metric: One of METRICS, or a function (labels, outputs) -> float.
        labels: An array. For several outputs, a dict by output name or a tuple in the order of the outputs. Outputs
            that a dict leaves out are not scored. A function gets the labels unchanged.
        outputs: The float model's outputs by name.
        ops: The op that computes each output, as `output_ops` gives it.
    Raises:
        ConfigError: The metric is unknown, or does not fit the labels and outputs.
    Example:
        >>> outputs = {"y": np.array([[0.1, 0.9], [0.2, 0.8]])}
        >>> Scorer("accuracy", np.array([1, 0]), outputs).scores(outputs)
        {'accuracy': 0.5}
    """

    def __init__(
        self,
        metric: str | Metric,
        labels: Any,
        outputs: Mapping[str, np.ndarray],
        ops: Mapping[str, str | None] | None = None,
    ) -> None:
        self.metric, self._labels = metric, labels
        check_metric(metric)
        if not isinstance(metric, str):
            return
        self._several = len(outputs) > 1
        self._targets: dict[str, np.ndarray] = {}
        self.decisions: dict[str, Decision] = {}
        for name, given in _by_output(labels, list(outputs)).items():
            found = read_labels(metric, name, given, outputs[name], (ops or {}).get(name))
            self.decisions[name], self._targets[name] = found

    def scores(self, outputs: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the scores by name: the metric's name, with the output's name before it if there are several outputs.

        Raises:
            ConfigError: The caller's function fails, or returns no finite number.
        """
        if not isinstance(self.metric, str):
            return {_name_of(self.metric): _measure(self.metric, self._labels, outputs)}
        return {
            f"{name}_{self.metric}" if self._several else self.metric: float(
                np.mean(decision.of(outputs[name]).reshape(-1) == self._targets[name])
            )
            for name, decision in self.decisions.items()
        }

    def value(self, outputs: Mapping[str, np.ndarray]) -> float:
        """Returns the mean of the scores."""
        return float(np.mean(list(self.scores(outputs).values())))

    def agreement(self, outputs: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> float | None:
        """Returns the share of equal decisions; None if the metric is the caller's function."""
        if not isinstance(self.metric, str):
            return None
        same = [decision.of(outputs[name]) == decision.of(others[name]) for name, decision in self.decisions.items()]
        return float(np.mean([np.mean(each) for each in same]))


def top1_accuracy(labels: np.ndarray, outputs: Any) -> float:
    """Returns the share of examples for which the output of the right class is the largest.

    Args:
        labels: Class numbers, or one-hot.
        outputs: [examples, classes].
    Raises:
        ConfigError: The labels are not classes.
    Example:
        >>> top1_accuracy(np.array([1, 0]), np.array([[0.1, 0.9], [0.2, 0.8]]))
        0.5
    """
    return Scorer("categorical_accuracy", labels, {"": outputs}).value({"": outputs})


def read_labels(
    metric: str, name: str, labels: Any, output: np.ndarray, op: str | None = None
) -> tuple[Decision, np.ndarray]:
    """Returns how an output becomes a decision, and the right decisions as a flat array.

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
        return Decision(threshold=THRESHOLDS[metric]), _truths(name, labels, output)
    if metric == "categorical_accuracy" or (not single and not alike):
        return Decision(threshold=None), _classes(name, labels, output)
    if not single and _sums_to_one(labels):
        unknown = op != "Softmax" and op not in PRODUCTS
        if op == "Sigmoid" or (unknown and _in_unit(output) and not _sums_to_one(output)):
            raise ConfigError(
                "metric='accuracy' must know whether an example has one class or several labels. Received: output "
                f"{name!r} of probabilities that do not sum to 1, and labels with one 1 in each row. Give "
                "metric='categorical_accuracy' if each example has one class, 'binary_accuracy' if an example can have "
                "several labels."
            )
        return Decision(threshold=None), _classes(name, labels, output)
    targets = _truths(name, labels, output)
    if op == "Softmax" and not single:
        raise ConfigError(
            f"Labels of the softmax output {name!r} must be class numbers, or one-hot. "
            f"Received: {_such_as(labels)}. Give metric='binary_accuracy' if an example can have several labels."
        )
    return Decision(threshold=_threshold(name, output, op)), targets


def output_ops(graph: FrozenGraph) -> dict[str, str]:
    """Returns the op that computes each output, by output name.

    Ops that pass on values are skipped, and so is a bias: a Dense without an activation gives "MatMul".
    """
    nodes = {node.name: node for node in graph.graph_def.node}
    return {name: _computing_op(producer(tensor), nodes) for name, (tensor, _) in graph.outputs.items()}


def _computing_op(name: str, nodes: Mapping[str, Any]) -> str:
    node = nodes[name]
    while True:
        inputs = [producer(tensor) for tensor in node.input if not tensor.startswith("^")]
        if node.op in ("Add", "AddV2") and any(_is_constant(each, nodes) for each in inputs):
            inputs = [each for each in inputs if not _is_constant(each, nodes)]
        elif node.op not in VALUE_PRESERVING:
            return str(node.op)
        if not inputs:
            return str(node.op)
        node = nodes[inputs[0]]


def _is_constant(name: str, nodes: Mapping[str, Any]) -> bool:
    node = nodes[name]
    while node.op in VALUE_PRESERVING and node.input:
        node = nodes[producer(node.input[0])]
    return bool(node.op == "Const")


def _by_output(labels: Any, names: list[str]) -> dict[str, Any]:
    """Returns the labels of each output that has labels."""
    if isinstance(labels, Mapping):
        unknown = sorted(map(str, labels.keys() - set(names)))
        if unknown or not labels:
            raise ConfigError(
                f"Labels in a dict must be given by output name, {names}. Received: {sorted(map(str, labels))}. "
                "Use the names of the outputs as keys."
            )
        return {name: labels[name] for name in names if name in labels}
    if isinstance(labels, (tuple, list)):
        if len(labels) != len(names):
            raise ConfigError(
                f"Labels must be as many arrays as outputs, {names}. Received: {len(labels)}. "
                "Give one array per output."
            )
        return dict(zip(names, labels, strict=True))
    if len(names) > 1:
        raise ConfigError(
            f"Labels for several outputs, {names}, must be a dict by output name. Received: one array of shape "
            f"{np.shape(labels)}. Give {{{names[0]!r}: labels}} to score one of them, or a function "
            "(labels, outputs) -> float as the metric."
        )
    return {names[0]: labels}


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
            f"Received: {_such_as(labels)}. The model is read as a classifier; for regression pass a function "
            "(labels, outputs) -> float as the metric."
        )
    return labels.reshape(-1).astype(bool)


def _threshold(name: str, output: np.ndarray, op: str | None) -> float:
    if op in PROBABILITIES:
        return 0.5
    if op in PRODUCTS or not _in_unit(output):
        return 0.0
    raise ConfigError(
        f"metric='accuracy' must know whether outputs are logits or probabilities. Received: output {name!r} "
        f"with values in [0, 1], computed by {op or 'an unknown op'}. Give metric='binary_accuracy' for probabilities, "
        "'binary_accuracy_from_logits' for logits."
    )


def _measure(metric: Metric, labels: Any, outputs: Mapping[str, np.ndarray]) -> float:
    """Returns the value of the caller's function. A single output is passed as an array, several outputs as a dict."""
    if hasattr(metric, "reset_state"):  # a Keras metric, which accumulates
        metric.reset_state()
    try:
        value = float(metric(labels, next(iter(outputs.values())) if len(outputs) == 1 else dict(outputs)))
    except ConfigError:
        raise
    except Exception as error:  # whatever the caller's function raises
        raise ConfigError(
            "metric must be a function (labels, outputs) -> float that takes these labels and outputs. "
            f"Received: {metric!r}, which raised {type(error).__name__}: {error}. "
            "Try it on the labelled examples and the model's own outputs."
        ) from error
    if not np.isfinite(value):
        raise ConfigError(
            f"metric must be a finite number. Received: {value} from {metric!r}. Check it on the model's own outputs."
        )
    return value


def _name_of(metric: Metric) -> str:
    name = getattr(metric, "name", None) or getattr(metric, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() else "metric"


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
