"""What is stored of a teacher's outputs: all of them, or the largest values of the last axis.

With `top_k`, the largest values are stored with their places, and one value that each of the others gets: their mean
probability, so that the sum of all stays 1. For logits it is log(mean(exp(others))).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.compat.tensorflow import words_of
from tfopt.distillation.losses import SIGMOID, SOFTMAX
from tfopt.distillation.teacher import Teacher
from tfopt.errors import ConfigError


class Computation:
    """Runs the teacher on batches, one at a time, and measures its time.

    It runs in Python, not as a part of tf.data, whose functions never run on a GPU.

    Attributes:
        seconds: The time of the teacher so far.
        examples: The examples so far.
        error: Why the teacher computes no outputs; None as long as it does. tf.data tells of errors of an op only.
    """

    def __init__(
        self,
        model: Teacher,
        inputs: Sequence[str],
        specs: Mapping[str, tf.TensorSpec],
        top_k: int | None,
        dtype: str,
    ) -> None:
        self._model, self._inputs, self._specs, self._top_k, self._dtype = model, inputs, specs, top_k, dtype
        self._lock = threading.Lock()
        self.seconds, self.examples = 0.0, 0
        self.error: ConfigError | None = None

    def stored(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns in TensorFlow what is stored of the outputs for a batch, by the name of the output."""
        layout: dict[str, Any] = {}
        for name, spec in self._specs.items():
            shape = tf.TensorShape(None) if spec.shape.rank is None else tf.TensorShape((None, *spec.shape[1:]))
            if self._top_k is None:
                layout[name] = tf.TensorSpec(shape, self._dtype)
                continue
            some = tf.TensorShape((*shape[:-1], self._top_k))
            places = tf.uint16 if shape[-1] <= 2**16 else tf.int32
            layout[name] = {
                "values": tf.TensorSpec(some, self._dtype),
                "places": tf.TensorSpec(some, places),
                "rest": tf.TensorSpec(shape[:-1], self._dtype),
            }
        flat = tf.nest.flatten(layout)
        found = tf.numpy_function(self._run, [inputs[name] for name in self._inputs], [each.dtype for each in flat])
        shaped = [tf.ensure_shape(tensor, each.shape) for tensor, each in zip(found, flat, strict=True)]
        stored: dict[str, Any] = tf.nest.pack_sequence_as(layout, shaped)
        return stored

    def _run(self, *inputs: np.ndarray) -> list[np.ndarray]:
        try:
            return self._parts(self._outputs(inputs))
        except ConfigError as error:
            self.error = error
            raise
        except tf.errors.OpError as error:
            self.error = ConfigError(
                "teacher must compute outputs for every training example. Received: "
                f"{self._model.name!r}, which raises {words_of(error)}. Check that it was trained on such examples."
            )
            raise

    def _outputs(self, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        with self._lock:
            begin = time.perf_counter()
            outputs, _ = self._model.outputs(dict(zip(self._inputs, inputs, strict=True)))
            found = {name: np.asarray(value, np.float32) for name, value in outputs.items()}
            self.seconds += time.perf_counter() - begin
            self.examples += len(inputs[0])
        return found

    def _parts(self, found: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Returns what is stored of outputs, in the order of `stored`."""
        parts: list[np.ndarray] = []
        for name in sorted(found):  # the order of tf.nest
            if self._top_k is None:
                parts.append(self._narrowed(name, found[name]))
                continue
            values, places, rest = largest(found[name], self._top_k, self._model.ops[name])
            places = places.astype(np.uint16 if found[name].shape[-1] <= 2**16 else np.int32)
            parts += [places, self._narrowed(name, rest), self._narrowed(name, values)]
        return parts

    def _narrowed(self, name: str, values: np.ndarray) -> np.ndarray:
        if np.isnan(values).any() or np.isposinf(values).any():  # -inf is the logit of a class that is impossible
            raise ConfigError(
                f"The outputs of the teacher must be numbers. Received: NaN or an infinite value in {name!r}. Look for "
                "such values in the examples and in the teacher's weights."
            )
        with np.errstate(over="ignore"):
            narrow = values.astype(self._dtype)
        if not np.isfinite(narrow).all() and np.isfinite(values).all():
            raise ConfigError(
                f"float16 holds values up to 65504. Received: {np.abs(values).max():.6g} in {name!r} of the teacher. "
                "Set dtype='float32'."
            )
        return narrow


def largest(values: np.ndarray, k: int, op: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the k largest values of the last axis, their places, and the value that each other one gets.

    Example:
        >>> values, places, rest = largest(np.array([[0.1, 0.6, 0.2, 0.1]]), 1, "Softmax")
        >>> values.tolist(), places.tolist(), rest.round(3).tolist()
        ([[0.6]], [[1]], [0.133])
    """
    places = np.argpartition(values, -k, axis=-1)[..., -k:]
    found = np.take_along_axis(values, places, -1)
    others = values.shape[-1] - k
    if op == SOFTMAX:
        return found, places, np.maximum(1 - found.sum(-1), 0) / others
    left = values.copy()
    np.put_along_axis(left, places, -np.inf, -1)
    most = left.max(-1, keepdims=True)
    most = np.where(np.isfinite(most), most, 0)  # of classes that are all impossible
    with np.errstate(divide="ignore"):
        others_each = most[..., 0] + np.log(np.exp(left - most).sum(-1) / others)
    return found, places, others_each.astype(values.dtype)


def spread(stored: Mapping[str, Any], size: int) -> tf.Tensor:
    """Returns all values of the last axis from the largest and the one that all others get."""
    values, places = tf.cast(stored["values"], tf.float32), tf.cast(stored["places"], tf.int32)
    rest = tf.cast(stored["rest"], tf.float32)
    k = values.shape[-1]
    rows = tf.repeat(tf.reshape(rest, (-1, 1)), size, axis=1)
    numbers = tf.repeat(tf.range(tf.shape(rows)[0])[:, None], k, axis=1)
    indices = tf.stack([numbers, tf.reshape(places, (-1, k))], axis=-1)
    filled = tf.tensor_scatter_nd_update(rows, indices, tf.reshape(values, (-1, k)))
    return tf.ensure_shape(tf.reshape(filled, tf.concat([tf.shape(rest), [size]], 0)), (*rest.shape, size))


def check_top_k(top_k: int, specs: Mapping[str, tf.TensorSpec], ops: Mapping[str, str]) -> None:
    """Raises ConfigError unless outputs are of classes that exclude each other, and more than `top_k`."""
    for name, spec in specs.items():
        classes = spec.shape[-1] if spec.shape.rank else None
        if classes is None or top_k >= classes or ops[name] == SIGMOID:
            found = f"a {SIGMOID}" if ops[name] == SIGMOID else f"outputs of shape {spec.shape}"
            raise ConfigError(
                "top_k must be below the number of classes, which exclude each other. Received: "
                f"top_k={top_k} and {found}, {name!r}. Set top_k=None to store all outputs."
            )
