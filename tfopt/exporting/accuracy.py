"""Accuracy of artifacts on labelled examples, each artifact running in its own process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfopt.data.batches import iterate_batches
from tfopt.errors import ConfigError
from tfopt.exporting.process import SavedModelProcess


@dataclass(frozen=True, kw_only=True)
class LabelledExamples:
    """Examples as an artifact takes them: arrays by input name, and one class number per example."""

    inputs: Mapping[str, np.ndarray]
    classes: np.ndarray

    def predict(self, process: SavedModelProcess) -> np.ndarray:
        """Returns the class that an artifact gives to each example.

        Raises:
            ConfigError: Its first output is not [batch, classes].
        """
        outputs = next(iter(process.predict(self.inputs).values()))
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise ConfigError(
                f"data can be given for classifiers only, whose first output is [batch, classes]. "
                f"Received: {process.path} with an output of shape {outputs.shape}. Leave data out."
            )
        if self.classes.max() >= outputs.shape[1]:
            raise ConfigError(
                f"Labels must be below the number of classes, {outputs.shape[1]}. Received: {self.classes.max()}."
            )
        return np.asarray(outputs.argmax(axis=1))


def labelled_examples(data: Any, specs: Mapping[str, Any]) -> LabelledExamples:
    """Gathers labelled data of any form that `iterate_batches` reads.

    Args:
        data: (inputs, labels), or batches of such. Labels are class numbers, or one-hot.
        specs: Input name to its shape and dtype, as the artifact's process reported them.
    Raises:
        ConfigError: There are no examples or no labels, or they do not fit the inputs.
    """
    batches = list(iterate_batches(data, inputs=len(specs)))
    if not batches or any(labels is None for _, labels in batches):
        several = f" The model's inputs, {list(specs)}, go into one dict or tuple." if len(specs) > 1 else ""
        raise ConfigError(
            f"data must be labelled examples, (inputs, labels). Received: no examples, or no labels.{several}"
        )
    inputs = _join([values for values, _ in batches], specs)
    labels = np.concatenate([_flat(labels) for _, labels in batches])
    count = len(next(iter(inputs.values())))
    if len(labels) != count:
        raise ConfigError(f"data must have one label per example. Received: {count} examples and {len(labels)} labels.")
    if not np.array_equal(labels, np.rint(labels)) or labels.min() < 0:
        raise ConfigError(
            f"Labels must be class numbers from 0, or one-hot. Received: such as {labels.reshape(-1)[:3].tolist()}."
        )
    return LabelledExamples(inputs=inputs, classes=labels.argmax(axis=1) if labels.shape[1] > 1 else labels[:, 0])


def _flat(labels: Any) -> np.ndarray:
    labels = np.asarray(labels)
    return labels.reshape(len(labels), int(np.prod(labels.shape[1:])))


def _join(batches: list[Any], specs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns all batches as one array per input of the artifact."""
    joined = {}
    for position, (name, spec) in enumerate(specs.items()):
        try:
            parts = [_part(values, name, position) for values in batches]
            joined[name] = np.concatenate(parts).astype(spec["dtype"])
        except (LookupError, ValueError) as error:
            raise ConfigError(f"data must give the inputs {list(specs)}. Received: no {name!r} ({error}).") from error
        shape = joined[name].shape
        wanted = spec["shape"] or [None] * len(shape)
        if len(shape) != len(wanted) or any(size not in (None, own) for size, own in zip(wanted, shape, strict=True)):
            raise ConfigError(
                f"data must have the shape of input {name!r}, {tuple(wanted)}. Received: examples of shape {shape}."
            )
    return joined


def _part(values: Any, name: str, position: int) -> np.ndarray:
    if isinstance(values, dict):
        return np.asarray(values[name])
    return np.asarray(values[position] if isinstance(values, (tuple, list)) else [values][position])
