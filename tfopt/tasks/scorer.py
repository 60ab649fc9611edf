"""Scores of a model's outputs by any metric: the accuracy of a classifier, a Score, or the caller's own function."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfopt.errors import ConfigError
from tfopt.settings.validation import check_name
from tfopt.tasks.classifiers import decisions, read_labels
from tfopt.tasks.scores import SCORES, Score

Metric = Callable[[Any, Any], float]
ACCURACIES = ("accuracy", "categorical_accuracy", "binary_accuracy", "binary_accuracy_from_logits")
METRICS = (*ACCURACIES, *SCORES)


class Scorer:
    """Scores outputs against labels.

    The kind of classifier is found out once, from the outputs of the float model. So the outputs of a quantized model
    are scored in the same way.

    Args:
        metric: One of METRICS, a Score, or a function (labels, outputs) -> float.
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
        metric: str | Metric | Score,
        labels: Any,
        outputs: Mapping[str, np.ndarray],
        ops: Mapping[str, str | None] | None = None,
    ) -> None:
        self.metric, self._labels = metric, labels
        check_metric(metric)
        self._several = len(outputs) > 1
        self._targets: dict[str, np.ndarray] = {}
        self.decisions: dict[str, float | None] = {}  # the threshold of each output
        if new_score(metric) is not None:
            self._targets = by_output(labels, list(outputs))
        elif isinstance(metric, str):
            for name, given in by_output(labels, list(outputs)).items():
                found = read_labels(metric, name, given, outputs[name], (ops or {}).get(name))
                self.decisions[name], self._targets[name] = found

    def scores(self, outputs: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the scores by name: the metric's name, with the output's name before it if there are several outputs.

        Raises:
            ConfigError: The targets do not fit, or the caller's function fails, or a score is no finite number.
        """
        if new_score(self.metric) is not None:
            found = {}
            for name, targets in self._targets.items():
                score = new_score(self.metric)
                assert score is not None
                score.update(targets, outputs[name])
                found[score_name(score.name, name, self._several)] = finite(score)
            return found
        if not isinstance(self.metric, str):
            assert not isinstance(self.metric, Score)  # it has returned
            own = getattr(self.metric, "name", None) or getattr(self.metric, "__name__", None)
            title = own if isinstance(own, str) and own.isidentifier() else "metric"
            return {title: _measure(self.metric, self._labels, outputs)}
        return {
            score_name(self.metric, name, self._several): float(
                np.mean(decisions(outputs[name], threshold).reshape(-1) == self._targets[name])
            )
            for name, threshold in self.decisions.items()
        }

    def check(self, outputs: Mapping[str, np.ndarray]) -> None:
        """Raises ConfigError where the targets do not fit outputs. A score of few examples may be no finite number."""
        for name, targets in self._targets.items():
            if (score := new_score(self.metric)) is not None:
                score.update(targets, outputs[name])

    def value(self, outputs: Mapping[str, np.ndarray]) -> float:
        """Returns the mean of the scores."""
        return float(np.mean(list(self.scores(outputs).values())))

    def agreement(self, outputs: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> float | None:
        """Returns the share of equal decisions of classifiers; None if the metric tells no classes."""
        if not self.decisions:
            return None
        same = [
            np.mean(decisions(outputs[name], threshold) == decisions(others[name], threshold))
            for name, threshold in self.decisions.items()
        ]
        return float(np.mean(same))


def new_score(metric: str | Metric | Score) -> Score | None:
    """Returns a score without any batches for a name of SCORES or a Score; None for any other metric.

    Example:
        >>> new_score("mean_iou").name, new_score("accuracy")
        ('mean_iou', None)
    """
    if isinstance(metric, str):
        return SCORES[metric]() if metric in SCORES else None
    return copy.deepcopy(metric) if isinstance(metric, Score) else None


def higher_is_better(metric: str | Metric | Score) -> bool:
    """Returns whether a higher value of a metric is better. Of a function, it is.

    Example:
        >>> higher_is_better("accuracy"), higher_is_better("bits_per_byte")
        (True, False)
    """
    score = new_score(metric)
    return score is None or score.higher_is_better


def check_metric(metric: Any) -> None:
    """Raises ConfigError unless a metric is the name of one in METRICS, a Score, or a function.

    Example:
        >>> check_metric("top5")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: Unknown metric 'top5'. Expected one of: 'accuracy', 'binary_accuracy', ...
    """
    if not isinstance(metric, Score):
        check_name("metric", metric, METRICS, or_a="a function (labels, outputs) -> float", accepts=callable)


def score_name(metric: str, output: str, several: bool) -> str:
    """Returns the name of the score of one output.

    Example:
        >>> score_name("accuracy", "mask", several=True)
        'mask_accuracy'
    """
    return f"{output}_{metric}" if several else metric


def finite(score: Score) -> float:
    """Returns the result of a score. Raises ConfigError if it is no finite number."""
    value = float(score.result())
    if not np.isfinite(value):
        raise ConfigError(
            f"A score must be a finite number. Received: {score.name}={value}. Check that the data holds targets that "
            "count, and that the model's outputs are finite."
        )
    return value


def by_output(labels: Any, names: list[str]) -> dict[str, Any]:
    """Returns the labels of each output that has any. Raises ConfigError if they do not fit the outputs' names."""
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
