"""Calibration: the example data of a quantization or an export, read once, and the ranges that tensors take on them.

Of the data, the `inputs` are calibrated on, `held_out` examples are not, and the `sample` is the first batch, which
shows what inputs look like.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.data.user_data import iterate_batches
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.graph.frozen import FrozenGraph, reason_of
from tfopt.quantization.annotation.grids import Range
from tfopt.quantization.calibration.observers import make_observer
from tfopt.quantization.config import QuantizationConfig

HELD_OUT = 32  # the number of examples on which an export compares the int8 model with the float model
# Examples per run. All observed tensors are in memory at once: 0.4 GB for a ResNet-50 at 224x224.
PIECE = 8


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class HeldOut:
    """Examples that were not used for the calibration, all of one shape, and where they come from."""

    inputs: Mapping[str, np.ndarray]
    origin: str

    @classmethod
    def of(cls, batches: Sequence[Mapping[str, Any]], origin: str) -> HeldOut | None:
        """Returns the first examples of one shape, HELD_OUT at most, or None where there are none.

        Example:
            >>> batches = [{"x": np.zeros((20, 3))}, {"x": np.zeros((20, 3))}, {"x": np.zeros((20, 4))}]
            >>> HeldOut.of(batches, "the rest").inputs["x"].shape
            (32, 3)
        """
        parts: list[dict[str, np.ndarray]] = []
        for batch in batches:
            arrays = {name: np.asarray(value) for name, value in batch.items()}
            if parts and any(value.shape[1:] != parts[0][name].shape[1:] for name, value in arrays.items()):
                break
            parts.append(arrays)
        if not parts:
            return None
        joined = {name: np.concatenate([part[name] for part in parts])[:HELD_OUT] for name in parts[0]}
        return cls(inputs=joined, origin=origin)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CalibrationData:
    """Batches of examples in memory, in the dtypes of the graph.

    Attributes:
        inputs: The batches of inputs to calibrate on.
        rest: The inputs of some examples behind these.
        sample: The first batch, whole. None where there is none.
        evaluation: The same of the evaluation data, which fills its `inputs` and `labels`.
    """

    inputs: Sequence[Mapping[str, Any]] = ()
    labels: Sequence[Any] = ()
    rest: Sequence[Mapping[str, Any]] = ()
    sample: Mapping[str, np.ndarray] | None = None
    evaluation: CalibrationData | None = None

    def held_out(self, *, calibrated: bool = True) -> HeldOut | None:
        """Returns examples that are not calibrated on, the evaluation data first. None where there are none.

        If the model was not calibrated at all, those of `inputs` count too.
        """
        others = {"the rest of calibration_data": self.rest} if calibrated else {"calibration_data": self.inputs}
        evaluation = self.evaluation.inputs if self.evaluation else ()
        found = (HeldOut.of(batches, origin) for origin, batches in ({"evaluation_data": evaluation} | others).items())
        return next((each for each in found if each is not None), None)

    def labelled(self) -> tuple[Sequence[Mapping[str, Any]], Any]:
        """Returns the inputs and labels for the accuracy, of the evaluation data if there are any.

        Raises:
            ConfigError: There are no examples, or no labels.
        """
        labels, inputs = (self.evaluation or self).labels, (self.evaluation or self).inputs
        if not labels or any(each is None for each in labels):
            raise ConfigError(
                f"max_accuracy_drop needs labelled examples. Received: {'no labels' if labels else 'no examples'}. "
                "Pass evaluation_data=(inputs, labels), preferably of examples that the model was not trained on, or "
                "calibration data with labels."
            )
        return inputs, tf.nest.map_structure(lambda *parts: np.concatenate(parts), *labels)


def read_calibration_data(
    graph: FrozenGraph, data: Any, evaluation_data: Any = None, config: QuantizationConfig | None = None
) -> CalibrationData:
    """Reads calibration data and evaluation data, as much of them as is needed; without a config nothing is calibrated.

    Raises:
        ConfigError: The data is missing or empty, or does not fit the model's inputs.
        UnsupportedModelError: The model has no input, so it cannot be calibrated.
    """
    if config is None:
        found = _read(graph, data, HELD_OUT)
    else:
        if not graph.inputs:
            raise UnsupportedModelError(
                f"A model must have an input to be quantized. Received: {graph.name!r} without one. Export it in "
                "float32."
            )
        if data is None:
            raise ConfigError(
                "calibration_data must be given for static int8 quantization. Received: None. "
                "Pass 100 to 500 examples of real inputs, for example calibration_data=x_train[:256]."
            )
        found = _read(graph, data, config.calibration_examples, HELD_OUT)
        if not found.inputs:
            raise ConfigError(
                "calibration_data must hold at least one example. Received: none (or an iterator used up)."
            )
    if evaluation_data is None:
        return found
    every = config is not None and config.max_accuracy_drop is not None
    return replace(found, evaluation=_read(graph, evaluation_data, None if every else HELD_OUT))


def _read(graph: FrozenGraph, data: Any, limit: int | None, rest: int = 0) -> CalibrationData:
    """Reads up to `limit` examples, and up to `rest` further ones."""
    inputs: list[dict[str, Any]] = []
    labels: list[Any] = []
    others: list[dict[str, Any]] = []
    sample: dict[str, np.ndarray] | None = None
    taken = 0
    for values, given in () if data is None or not graph.inputs else iterate_batches(data, inputs=len(graph.inputs)):
        fed = graph.feed(values)
        if sample is None:
            sample = {name: value.numpy() for name, value in fed.items()}
        size = length(fed)
        kept, end = (size, size) if limit is None else (max(limit - taken, 0), limit + rest - taken)
        if kept:
            inputs.append({name: value[:kept] for name, value in fed.items()})
            labels.append(tf.nest.map_structure(lambda part, end=kept: None if part is None else part[:end], given))
        if kept < min(size, end):
            others.append({name: value[kept:end] for name, value in fed.items()})
        taken += size
        if limit is not None and taken >= limit + rest:
            break
    return CalibrationData(inputs=inputs, labels=labels, rest=others, sample=sample)


def in_pieces(batches: Iterable[Mapping[str, Any]], size: int = PIECE) -> Iterator[dict[str, Any]]:
    """Yields the batches in pieces of at most `size` examples."""
    for batch in batches:
        for start in range(0, length(batch), size):
            yield {name: value[start : start + size] for name, value in batch.items()}


def length(batch: Mapping[str, Any]) -> int:
    return len(next(iter(batch.values())))


def calibrate(
    graph: FrozenGraph, tensors: Sequence[str], batches: Sequence[Mapping[str, Any]], config: QuantizationConfig
) -> dict[str, Range]:
    """Returns the range of each tensor over the data.

    Raises:
        ConfigError: The data drives a tensor to NaN or infinity, or leaves none of its values.
    """
    observers = {tensor: make_observer(config) for tensor in tensors}
    function = graph.as_function(fetch=tensors)
    examples = 0
    for piece in in_pieces(batches):
        values = function(**piece)
        for (tensor, observer), value in zip(observers.items(), values, strict=True):
            array = value.numpy()
            if not np.isfinite(array).all():
                raise ConfigError(
                    "calibration_data must keep every activation finite. "
                    f"Received: NaN or infinity in tensor {tensor!r}, shape {array.shape}, among examples "
                    f"{examples} to {examples + length(piece) - 1}. Remove these examples or normalise the inputs."
                )
            if not array.size:
                shapes = [tuple(given.shape[1:]) for given in piece.values()]
                raise ConfigError(
                    f"calibration_data must leave values in every tensor. Received: examples of the shapes {shapes}, "
                    f"with which tensor {tensor!r} has the shape {array.shape}. Pass larger examples."
                )
            observer.update(array)
        examples += length(piece)
    return {tensor: observer.range() for tensor, observer in observers.items()}


@contextmanager
def computable() -> Iterator[None]:
    """Turns an error of TensorFlow into one that says what to do.

    Raises:
        ConfigError: The model cannot compute with the examples, for example with ids beyond its table.
        UnsupportedModelError: This processor has no kernel for an op, for example for channels first.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        raise ConfigError(
            "calibration_data and evaluation_data must be examples that the model can compute with. Received: "
            f"{reason_of(str(error))}. Remove such examples, or encode them as for the training: ids must be below the "
            "number of rows of their table."
        ) from error
    except tf.errors.UnimplementedError as error:
        raise UnsupportedModelError(
            f"Each op of the model must have a kernel on this processor. Received: {reason_of(str(error))}. Replace "
            "the layer, or give it data_format='channels_last'."
        ) from error
