"""Labelled examples in the form that artifacts take, and the scores of several artifacts on them.

The examples come in chunks, so a test part needs not fit in memory. A Score is updated chunk by chunk. For the accuracy
of a classifier and for a function of the user, labels and outputs are kept until the end: the kind of classifier is
found out from all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.data.user_data import iterate_batches
from tfopt.errors import ConfigError
from tfopt.exporting.manifest import TensorRecord
from tfopt.graph.frozen import signature_name
from tfopt.tasks.scorer import Metric, Scorer, by_output, finite, higher_is_better, new_score, score_name
from tfopt.tasks.scores import Score

NO_DATA = "no labelled data given"
CHUNK_BYTES = 2**26


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of one artifact by name.

    Attributes:
        accuracy: The one accuracy of a classifier. None for other metrics and for several, with the `reason`.
        agreement: Share of decisions in common, by the other artifact. Empty if the metric tells no classes.
    """

    by_name: Mapping[str, float]
    accuracy: float | None
    agreement: Mapping[Any, float]
    higher_is_better: bool
    reason: str = ""


class Scoreboard:
    """Scores several artifacts on the same examples, chunk by chunk. `ops` has the op that computes each output."""

    def __init__(self, metric: str | Metric | Score, ops: Mapping[str, str | None]) -> None:
        self._metric, self._ops = metric, ops
        self._kept: list[tuple[Any, Mapping[Any, Mapping[str, np.ndarray]]]] = []
        self._streamed: dict[Any, dict[str, Score]] = {}
        self._equal: Counter[Any] = Counter()
        self._decided = 0
        self._reference: Any = None

    def add(self, labels: Any, outputs: Mapping[Any, Mapping[str, np.ndarray]], reference: Any) -> None:
        """Adds a chunk. The outputs are by artifact and name; those of `reference` tell the kind of classifier.

        An artifact that a chunk leaves out must be left out of all that follow, and has no scores.
        """
        self._reference = reference
        if new_score(self._metric) is None:
            self._kept.append((labels, outputs))
            return
        for gone in self._streamed.keys() - outputs.keys():
            del self._streamed[gone]
        names = list(outputs[reference])
        for name, targets in by_output(labels, names).items():
            decisions = {}
            for artifact, given in outputs.items():
                scores = self._streamed.setdefault(artifact, {})
                if name not in scores:
                    fresh = new_score(self._metric)
                    assert fresh is not None  # only a Score is updated chunk by chunk: see the beginning
                    scores[name] = fresh
                scores[name].update(targets, given[name])
                decide = getattr(scores[name], "decisions", None)
                if decide is not None:
                    decisions[artifact] = decide(given[name])
            for one, own in decisions.items():
                self._decided += own.size if one is reference else 0
                self._equal.update({(one, other): int((own == its).sum()) for other, its in decisions.items()})

    def scores(self) -> Mapping[Any, Scores]:
        """Returns the scores of each artifact. Raises ConfigError if the metric does not fit the labels and outputs."""
        return self._of_kept() if self._kept else self._of_streamed()

    def _of_streamed(self) -> dict[Any, Scores]:
        found = {}
        for artifact, scores in self._streamed.items():
            several = len(self._ops) > 1
            by_name = {score_name(score.name, output, several): finite(score) for output, score in scores.items()}
            pairs = {other: count for (one, other), count in self._equal.items() if one is artifact}
            found[artifact] = Scores(
                by_name=by_name,
                accuracy=None,
                agreement={other: count / self._decided for other, count in pairs.items()},
                higher_is_better=higher_is_better(self._metric),
                reason=f"the score is {next(iter(scores.values())).name}",
            )
        return found

    def _of_kept(self) -> dict[Any, Scores]:
        labels = _concatenated([labels for labels, _ in self._kept])
        outputs = {
            artifact: {name: np.concatenate([chunk[artifact][name] for _, chunk in self._kept]) for name in given}
            for artifact, given in self._kept[-1][1].items()
        }
        scorer = Scorer(self._metric, labels, outputs[self._reference], self._ops)
        found = {}
        for artifact, own in outputs.items():
            by_name = scorer.scores(own)
            one = isinstance(self._metric, str) and len(by_name) == 1
            agreement = {other: scorer.agreement(own, its) for other, its in outputs.items()}
            found[artifact] = Scores(
                by_name=by_name,
                accuracy=next(iter(by_name.values())) if one else None,
                agreement={other: share for other, share in agreement.items() if share is not None},
                higher_is_better=higher_is_better(self._metric),
                reason="" if one else "each output has its own" if scorer.decisions else "metric is a function",
            )
        return found


def chunks(data: Any, specs: Mapping[str, TensorRecord]) -> Iterator[tuple[dict[str, np.ndarray], Any]]:
    """Yields labelled data in chunks of about 64 MiB: the inputs, as arrays by name, and the labels.

    The data are (inputs, labels), or batches of these, in any form that `iterate_batches` reads.

    Raises:
        ConfigError: The data holds no examples or no labels, or they do not fit the inputs.
    """
    waiting: list[tuple[Any, Any]] = []
    size, form = 0, None
    for values, labels in iterate_batches(data, inputs=len(specs)):
        if labels is None:
            raise _no_labels(specs)
        its_form = [part.shape[1:] for part in tf.nest.flatten((values, labels)) if part is not None]
        if waiting and (size > CHUNK_BYTES or its_form != form):
            yield _chunk(waiting, specs)
            waiting, size = [], 0
        waiting.append((values, labels))
        form = its_form
        size += sum(part.nbytes for part in tf.nest.flatten(values))
    if not waiting:
        raise _no_labels(specs)
    yield _chunk(waiting, specs)


def not_scored(scores: Scores | None, no_baseline: str) -> dict[str, str]:
    """Returns why there is no accuracy or no agreement. `no_baseline` is empty where there is a baseline."""
    no_accuracy = NO_DATA if scores is None else scores.reason
    no_agreement = "" if scores is not None and scores.agreement else no_accuracy
    reasons = {
        "accuracy": no_accuracy,
        "baseline_accuracy": no_baseline or no_accuracy,
        "agreement": no_baseline or no_agreement,
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _no_labels(specs: Mapping[str, TensorRecord]) -> ConfigError:
    several = f" The model's inputs, {list(specs)}, go into one dict or tuple." if len(specs) > 1 else ""
    return ConfigError(
        f"data must be labelled examples, (inputs, labels). Received: no examples, or no labels.{several}"
    )


def _chunk(batches: list[tuple[Any, Any]], specs: Mapping[str, TensorRecord]) -> tuple[dict[str, np.ndarray], Any]:
    labels = _concatenated([labels for _, labels in batches])
    inputs = _join([values for values, _ in batches], specs)
    count = len(next(iter(inputs.values())))
    for part in tf.nest.flatten(labels):
        if len(part) != count:
            raise ConfigError(
                f"data must have one label per example. Received: {count} examples and {len(part)} labels."
            )
    return inputs, labels


def _concatenated(labels: list[Any]) -> Any:
    try:
        return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *labels)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data must have labels of one form in every batch. Received: {error}.") from error


def _join(batches: list[Any], specs: Mapping[str, TensorRecord]) -> dict[str, np.ndarray]:
    joined = {}
    for position, (name, spec) in enumerate(specs.items()):
        try:
            parts = [_part(values, name, position) for values in batches]
            given = np.concatenate(parts)
            joined[name] = given.astype(spec.numpy_dtype)
        except (LookupError, ValueError) as error:
            raise ConfigError(f"data must give the inputs {list(specs)}. Received: no {name!r} ({error}).") from error
        if spec.numpy_dtype.kind in "iu" and given.dtype.kind in "fiu" and not np.array_equal(joined[name], given):
            raise ConfigError(
                f"data must be whole numbers that {spec.dtype} holds, for input {name!r}. Received: {given.dtype.name} "
                f"from {given.min():g} to {given.max():g}. Pass what the artifact takes, such as unscaled pixels."
            )
        shape = joined[name].shape
        wanted = spec.shape or (None,) * len(shape)
        # The number of examples may differ from a fixed batch size: the process divides them.
        if len(shape) != len(wanted) or not tf.TensorShape(wanted[1:]).is_compatible_with(shape[1:]):
            raise ConfigError(
                f"data must have the shape of input {name!r}, {tuple(wanted)}. Received: examples of shape {shape}."
            )
    return joined


def _part(values: Any, name: str, position: int) -> np.ndarray:
    if isinstance(values, dict):
        return np.asarray({**{signature_name(str(key)): value for key, value in values.items()}, **values}[name])
    return np.asarray(values[position] if isinstance(values, (tuple, list)) else [values][position])
