"""How right a model's outputs are: the accuracy of each kind of classifier, or a function of the caller's.

"accuracy" works out of which kind a classifier is. The shapes of outputs and labels tell nearly all; S below stands for
[batch], [batch, steps], [batch, height, width] and so on:

    outputs [*S, classes], labels S or [*S, 1]                    one class each: the largest output counts
    outputs [*S, classes], labels alike, with one 1 in each row   the same, labels being one-hot
    outputs [*S, labels], labels alike, 0 or 1                    several labels each: every output is a decision
    outputs S or [*S, 1], labels S or [*S, 1], 0 or 1             two classes: the output is a decision

A decision is yes above 0.5 where the output is a probability, above 0 where it is a logit. Which of the two it is, the
op that computes the output tells. Where it does not, values outside of [0, 1] are logits. What remains open is refused:
the other names of METRICS say it.
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
# Ops that pass on values of their first input, all or some of them; a bias makes no probability of a logit.
PASS_ON = frozenset(
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
        threshold: The output means yes above it; None where the largest of the last axis is the class.
    """

    threshold: float | None

    def of(self, output: np.ndarray) -> np.ndarray:
        """Returns class numbers, or truth values."""
        return np.asarray(output.argmax(axis=-1) if self.threshold is None else output > self.threshold)


class Scorer:
    """Scores outputs on labels.

    How outputs are read is decided once, from those of the float model: then a quantized one is read in the same way.

    Args:
        metric: One of METRICS, or a function (labels, outputs) -> float.
        labels: An array; with several outputs a dict by output name, or a tuple in their order. Outputs that a dict
            leaves out are not scored. A function gets the labels as they are.
        outputs: The float model's outputs by name.
        ops: The op that computes each output, as `output_ops` gives it.
    Raises:
        ConfigError: The metric is unknown, or labels and outputs do not fit it.
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
        """Returns each score by its name: that of the metric, with several outputs behind the output's name.

        Raises:
            ConfigError: The caller's function fails, or gives no finite number.
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
        """Returns one number: the mean of the scores."""
        return float(np.mean(list(self.scores(outputs).values())))

    def agreement(self, outputs: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> float | None:
        """Returns the share of decisions that are the same, None where the metric is the caller's function."""
        if not isinstance(self.metric, str):
            return None
        same = [decision.of(outputs[name]) == decision.of(others[name]) for name, decision in self.decisions.items()]
        return float(np.mean([np.mean(each) for each in same]))


def top1_accuracy(labels: np.ndarray, outputs: Any) -> float:
    """Returns the share of examples whose largest output is that of their class.

    Args:
        labels: Class numbers, or one-hot.
        outputs: [examples, classes].
    Raises:
        ConfigError: The labels are no classes.
    Example:
        >>> top1_accuracy(np.array([1, 0]), np.array([[0.1, 0.9], [0.2, 0.8]]))
        0.5
    """
    return Scorer("categorical_accuracy", labels, {"": outputs}).value({"": outputs})


def read_labels(
    metric: str, name: str, labels: Any, output: np.ndarray, op: str | None = None
) -> tuple[Decision, np.ndarray]:
    """Returns how an output is read, and what it should say of each example, flat.

    Args:
        metric: One of METRICS.
        name: The output's name.
        labels: Its labels.
        output: Its values.
        op: The op that computes it, if known.
    Raises:
        ConfigError: The labels do not fit the output, or leave open how to read it.
    """
    labels = np.asarray(labels)
    if labels.dtype.kind not in "biuf":
        raise ConfigError(f"Labels must be class numbers, one-hot or 0 and 1. Received: {_such_as(labels)}.")
    if len(labels) != len(output):
        raise ConfigError(
            f"data must have one label per example. Received: {len(output)} examples and {len(labels)} labels."
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
                f"metric='accuracy' must tell classes from several labels each. Received: output {name!r} of "
                "probabilities that do not sum to 1, and labels with one 1 in each row. Give "
                "metric='categorical_accuracy' if each example has one class, 'binary_accuracy' if each output is a "
                "decision of its own."
            )
        return Decision(threshold=None), _classes(name, labels, output)
    targets = _truths(name, labels, output)
    if op == "Softmax" and not single:
        raise ConfigError(
            f"Labels of the softmax output {name!r} must be class numbers, or one-hot. "
            f"Received: {_such_as(labels)}. Give metric='binary_accuracy' if each output is a decision of its own."
        )
    return Decision(threshold=_threshold(name, output, op)), targets


def output_ops(graph: FrozenGraph) -> dict[str, str]:
    """Returns the op that computes each output, by output name.

    Ops that pass values on are passed over, and so is a bias: "MatMul" stands for Dense without an activation.
    """
    nodes = {node.name: node for node in graph.graph_def.node}
    return {name: _computing_op(producer(tensor), nodes) for name, (tensor, _) in graph.outputs.items()}


def _computing_op(name: str, nodes: Mapping[str, Any]) -> str:
    node = nodes[name]
    while True:
        inputs = [producer(tensor) for tensor in node.input if not tensor.startswith("^")]
        if node.op in ("Add", "AddV2") and any(_is_constant(each, nodes) for each in inputs):
            inputs = [each for each in inputs if not _is_constant(each, nodes)]
        elif node.op not in PASS_ON:
            return str(node.op)
        if not inputs:
            return str(node.op)
        node = nodes[inputs[0]]


def _is_constant(name: str, nodes: Mapping[str, Any]) -> bool:
    node = nodes[name]
    while node.op in PASS_ON and node.input:
        node = nodes[producer(node.input[0])]
    return bool(node.op == "Const")


def _by_output(labels: Any, names: list[str]) -> dict[str, Any]:
    """Returns the labels of each output that has some."""
    if isinstance(labels, Mapping):
        unknown = sorted(map(str, labels.keys() - set(names)))
        if unknown or not labels:
            raise ConfigError(
                f"Labels in a dict must be given by output name, {names}. Received: {sorted(map(str, labels))}."
            )
        return {name: labels[name] for name in names if name in labels}
    if isinstance(labels, (tuple, list)):
        if len(labels) != len(names):
            raise ConfigError(f"Labels must be as many arrays as outputs, {names}. Received: {len(labels)}.")
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
    """Returns whether each value of the output should mean yes."""
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
        f"metric='accuracy' must tell logits from probabilities. Received: output {name!r} with values in [0, 1], "
        f"computed by {op or 'an op that is not known'}. Give metric='binary_accuracy' for probabilities, "
        "'binary_accuracy_from_logits' for logits."
    )


def _measure(metric: Metric, labels: Any, outputs: Mapping[str, np.ndarray]) -> float:
    """Returns what the caller's function makes of the labels and the outputs; a single output comes as it is."""
    if hasattr(metric, "reset_state"):  # a Keras metric, which adds up
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
    """Returns a shape without axes of size 1 at its end; the batch axis stays."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _sums_to_one(values: np.ndarray) -> bool:
    """Whether each row does, as of one-hot labels, smoothed ones too, and of a softmax."""
    return bool(np.isclose(values.sum(axis=-1, dtype=np.float64), 1, atol=1e-2).all())


def _in_unit(output: np.ndarray) -> bool:
    return bool(((output >= 0) & (output <= 1)).all())


def _such_as(labels: np.ndarray) -> str:
    return f"labels of shape {labels.shape}, such as {labels.reshape(-1)[:3].tolist()}"
