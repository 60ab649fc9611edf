"""The data of a script's fit, for an epoch of any length: arrays, a `tf.data.Dataset`, a `PyDataset` or a generator."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import ConfigError
from tfopt.tuning.workload import KERAS_BATCH

# What of a script's own call of fit stays.
KEPT = ("x", "y", "sample_weight", "class_weight", "shuffle")


@dataclass(frozen=True, kw_only=True)
class ScriptData:
    """The data of a script's fit.

    Attributes:
        arguments: Returns the arguments of fit for so many examples in a step, and so many steps in an epoch.
        inputs: The inputs of a batch.
        batch: Number of examples of a batch, as the script has them.
        examples: Number of examples; None if it is unknown.
        epoch_steps: Most steps of an epoch, if each begins the data anew; None if the data repeats.
        check: Raises an error if there was less data than steps.
    """

    arguments: Callable[[int, int], dict[str, Any]]
    inputs: Any
    batch: int
    examples: int | None
    epoch_steps: int | None = None
    check: Callable[[], None] = lambda: None


def data_of(given: Mapping[str, Any], *, rebatches: bool) -> ScriptData:
    """Returns the data of a script's call of fit.

    Args:
        given: The arguments of fit, by their names.
        rebatches: Whether the data is to get batches of any size. Else it stays as it is.
    Raises:
        ConfigError: It is of another kind, or a generator that cannot be read again and again.
    Example:
        >>> data = data_of({"x": np.zeros((70, 4)), "y": np.zeros(70)}, rebatches=False)
        >>> data.batch, data.epoch_steps, data.arguments(32, 1)["x"].shape
        (32, 2, (32, 4))
    """
    own = {name: given[name] for name in KEPT if given.get(name) is not None}
    data = own.pop("x", None)
    if isinstance(data, tf.data.Dataset):
        return _of_dataset(data, next(iter(data)), own, _count(data), rebatches=rebatches)
    if isinstance(data, keras.utils.PyDataset):
        return _of_py_dataset(data, own, rebatches=rebatches)
    if isinstance(data, Iterator):
        return _of_generator(data, own, given.get("steps_per_epoch"), rebatches=rebatches)
    if data is not None and hasattr(tf.nest.flatten(data)[0], "shape"):
        return _of_arrays(data, own, given.get("batch_size") or KERAS_BATCH, rebatches=rebatches)
    raise ConfigError(
        "The script's data must be arrays, a tf.data.Dataset, a keras.utils.PyDataset or a generator. Received: "
        f"{type(data).__name__}. Make a tf.data.Dataset of it, or see `tfopt doctor`."
    )


def _of_arrays(data: Any, own: dict[str, Any], batch: int, *, rebatches: bool) -> ScriptData:
    examples = int(tf.nest.flatten(data)[0].shape[0])
    batch = min(batch, examples)
    named: dict[str, Any] = {"x": data, **{name: own.pop(name) for name in ("y", "sample_weight") if name in own}}

    def arguments(size: int, steps: int) -> dict[str, Any]:
        count = size * max(1, min(steps, examples // size))  # whole epochs of full batches
        part = tf.nest.map_structure(lambda each: each[:count], named)
        return {**own, **part, "batch_size": size}

    epoch_steps = None if rebatches else examples // batch
    return ScriptData(arguments=arguments, inputs=data, batch=batch, examples=examples, epoch_steps=epoch_steps)


def _of_dataset(
    batched: tf.data.Dataset,
    first: Any,
    own: Mapping[str, Any],
    examples: int | None,
    *,
    rebatches: bool,
    check: Callable[[], None] = lambda: None,
) -> ScriptData:
    def arguments(size: int, steps: int) -> dict[str, Any]:
        repeated = batched.repeat()
        if rebatches:
            repeated = repeated.rebatch(size) if _is_even(batched) else repeated.unbatch().padded_batch(size)
        return {**own, "x": repeated, "steps_per_epoch": steps, "shuffle": False}

    inputs, batch = _inputs(first)
    return ScriptData(arguments=arguments, inputs=inputs, batch=batch, examples=examples, check=check)


def _of_py_dataset(data: keras.utils.PyDataset, own: Mapping[str, Any], *, rebatches: bool) -> ScriptData:
    first, batches = data[0], data.num_batches
    inputs, batch = _inputs(first)
    last = first if batches is None else data[batches - 1]
    examples = None if batches is None else (batches - 1) * batch + _inputs(last)[1]
    if rebatches:

        def again() -> Iterator[Any]:
            yield from (data[place] for place in (itertools.count() if batches is None else range(batches)))
            data.on_epoch_end()

        return _of_dataset(_as_dataset(again, first, last), first, own, examples, rebatches=True)

    def arguments(size: int, steps: int) -> dict[str, Any]:
        return {**own, "x": data, "steps_per_epoch": steps if batches is None else min(steps, batches)}

    return ScriptData(arguments=arguments, inputs=inputs, batch=batch, examples=examples, epoch_steps=batches)


def _of_generator(data: Iterator[Any], own: Mapping[str, Any], steps: int | None, *, rebatches: bool) -> ScriptData:
    if steps is None:
        raise ConfigError(
            "A generator must have no end, and fit a number of steps, so that it can be read on and on. Received: "
            "steps_per_epoch=None. Make a keras.utils.PyDataset or a tf.data.Dataset of it, or set steps_per_epoch."
        )
    source = _Source(data)
    first = next(source.read(), None)

    def check() -> None:
        if source.has_ended:
            raise ConfigError(
                "A generator must have no end, so that it can be read on and on. Received: one that has ended. Let it "
                "begin again (`while True`), or make a keras.utils.PyDataset or a tf.data.Dataset of it."
            )

    check()
    inputs, batch = _inputs(first)
    examples = steps * batch
    if rebatches:
        other = next(source.read(), first)
        return _of_dataset(_as_dataset(source.read, first, other), first, own, examples, rebatches=True, check=check)

    def arguments(size: int, steps: int) -> dict[str, Any]:
        return {**own, "x": source.read(), "steps_per_epoch": steps}

    return ScriptData(arguments=arguments, inputs=inputs, batch=batch, examples=examples, check=check)


class _Source:
    """A generator that several fits read on, one after the other: the threads of the last may still ask for a batch."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self._lock = batches, threading.Lock()
        self.has_ended = False

    def read(self) -> Iterator[Any]:
        while True:
            try:
                with self._lock:
                    batch = next(self._batches)
            except StopIteration:
                self.has_ended = True
                return
            yield batch


def _inputs(batch: Any) -> tuple[Any, int]:
    """Returns the inputs of a batch, and its number of examples."""
    inputs = batch[0] if isinstance(batch, tuple) else batch
    return inputs, int(tf.nest.flatten(inputs)[0].shape[0])


def _is_even(batched: tf.data.Dataset) -> bool:
    """Returns whether the examples of all batches have one shape, or no dense one: others are padded to the longest."""
    specs = tf.nest.flatten(batched.element_spec)
    dense = all(isinstance(each, tf.TensorSpec) and each.shape.rank for each in specs)
    return not dense or all(each.shape[1:].is_fully_defined() for each in specs)


def _as_dataset(batches: Callable[[], Iterator[Any]], first: Any, other: Any) -> tf.data.Dataset:
    """Returns a data set of the batches that Python makes, with the types that Keras gives them.

    Sizes in which two batches differ are open. So a model that is built by its data knows the others.
    """

    def tensors(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: tensors(each) for name, each in value.items()}
        if isinstance(value, tuple | list):
            return tuple(tensors(each) for each in value)
        array = np.asarray(value)
        return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array

    def spec(one: np.ndarray, another: np.ndarray) -> tf.TensorSpec:
        sizes = zip(one.shape[1:], another.shape[1:], strict=True)
        return tf.TensorSpec([None, *(size if size == also else None for size, also in sizes)], one.dtype)

    signature = tf.nest.map_structure(spec, tensors(first), tensors(other))
    return tf.data.Dataset.from_generator(lambda: map(tensors, batches()), output_signature=signature)


def _count(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of examples of a batched data set; None if it is unknown."""
    batches = int(dataset.cardinality())
    size = tf.nest.flatten(dataset.element_spec)[0].shape[0]
    if batches < 0:
        return None
    if size is None:
        first = next(iter(dataset), None)
        size = 0 if first is None else int(tf.nest.flatten(first)[0].shape[0])
    return math.ceil(batches * size)
