"""Labelled examples in the form that artifacts take, and the scores of an artifact on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.data.batches import iterate_batches
from tfopt.errors import ConfigError
from tfopt.exporting.manifest import TensorRecord
from tfopt.quantization.metrics import Scorer

NO_DATA = "no labelled data given"


@dataclass(frozen=True, kw_only=True)
class LabelledExamples:
    """Examples in the form that artifacts take: arrays by input name, and the labels of all batches, joined."""

    inputs: Mapping[str, np.ndarray]
    labels: Any


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of one artifact on labelled examples.

    Attributes:
        scorer: The scorer that computed them.
        outputs: The artifact's outputs by name.
        by_name: Its scores by name.
    """

    scorer: Scorer
    outputs: Mapping[str, np.ndarray]
    by_name: Mapping[str, float]

    @classmethod
    def measure(cls, scorer: Scorer, outputs: Mapping[str, np.ndarray]) -> Scores:
        """Scores the outputs."""
        return cls(scorer=scorer, outputs=outputs, by_name=scorer.scores(outputs))

    @property
    def accuracy(self) -> float | None:
        """The one accuracy. None where there are several, or where the metric is a function."""
        scores = list(self.by_name.values())
        return scores[0] if len(scores) == 1 and isinstance(self.scorer.metric, str) else None

    def agreement(self, other: Scores) -> float | None:
        """Returns the share of decisions that both artifacts have in common."""
        return self.scorer.agreement(self.outputs, other.outputs)


def labelled_examples(data: Any, specs: Mapping[str, TensorRecord]) -> LabelledExamples:
    """Collects labelled data in any form that `iterate_batches` reads.

    Args:
        data: (inputs, labels), or batches of (inputs, labels).
        specs: The artifact's inputs by name, in the model's order.
    Raises:
        ConfigError: The data holds no examples or no labels, or they do not fit the inputs.
    """
    batches = list(iterate_batches(data, inputs=len(specs)))
    if not batches or any(labels is None for _, labels in batches):
        several = f" The model's inputs, {list(specs)}, go into one dict or tuple." if len(specs) > 1 else ""
        raise ConfigError(
            f"data must be labelled examples, (inputs, labels). Received: no examples, or no labels.{several}"
        )
    try:
        labels = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *[labels for _, labels in batches])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data must have labels of one form in every batch. Received: {error}.") from error
    inputs = _join([values for values, _ in batches], specs)
    count = len(next(iter(inputs.values())))
    for part in tf.nest.flatten(labels):
        if len(part) != count:
            raise ConfigError(
                f"data must have one label per example. Received: {count} examples and {len(part)} labels."
            )
    return LabelledExamples(inputs=inputs, labels=labels)


def not_scored(scores: Scores | None, no_baseline: str) -> dict[str, str]:
    """Returns the reasons why there is no accuracy or no agreement.

    Args:
        scores: The artifact's scores. None without labelled examples.
        no_baseline: Why there is no baseline. It is empty where there is one.
    """
    several = ""
    if scores is None:
        nothing = NO_DATA
    elif not isinstance(scores.scorer.metric, str):
        nothing = "metric is a function"
    else:
        nothing = ""
        several = "each output has its own" if len(scores.scorer.decisions) > 1 else ""
    reasons = {
        "accuracy": nothing or several,
        "baseline_accuracy": no_baseline or nothing or several,
        "agreement": no_baseline or nothing,
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _join(batches: list[Any], specs: Mapping[str, TensorRecord]) -> dict[str, np.ndarray]:
    """Returns all batches as one array per input of the artifact."""
    joined = {}
    for position, (name, spec) in enumerate(specs.items()):
        try:
            parts = [_part(values, name, position) for values in batches]
            joined[name] = np.concatenate(parts).astype(spec.numpy_dtype)
        except (LookupError, ValueError) as error:
            raise ConfigError(f"data must give the inputs {list(specs)}. Received: no {name!r} ({error}).") from error
        shape = joined[name].shape
        wanted = spec.shape or (None,) * len(shape)
        if len(shape) != len(wanted) or any(size not in (None, own) for size, own in zip(wanted, shape, strict=True)):
            raise ConfigError(
                f"data must have the shape of input {name!r}, {tuple(wanted)}. Received: examples of shape {shape}."
            )
    return joined


def _part(values: Any, name: str, position: int) -> np.ndarray:
    if isinstance(values, dict):
        return np.asarray(values[name])
    return np.asarray(values[position] if isinstance(values, (tuple, list)) else [values][position])
