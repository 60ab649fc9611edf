"""Runs training or test steps as one call into TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.tensorflow import spec_of_first_replica
from tfopt.compat.trainer import built_under
from tfopt.training.step.ledger import Ledger


class Execution:
    """Runs steps as one call into TensorFlow: those of one execution, and what the metrics say after them.

    Args:
        model: Whose `steps_per_execution` and metrics count.
        run: Runs one step on a batch.
        ledger: Told of traces and, where shapes are watched, of new input shapes.
        watch_shapes: Whether new shapes are compiled anew.
    """

    def __init__(
        self, model: keras.Model, run: Callable[[Any], None], ledger: Ledger | None, *, watch_shapes: bool
    ) -> None:
        self._model = model
        self._run = run
        self._ledger = ledger
        self._watch_shapes = watch_shapes
        self._last_shapes: Any = None
        self.on_batch = self._function(self._on_batch)
        self._next = self._function(self._on_next)
        self._several = self._function(self._on_several)

    def from_iterator(self, iterator: Any, count: int) -> tuple[Any, dict[str, Any]]:
        """Runs up to so many steps. Returns how many there were, and the figures.

        Raises:
            tf.errors.OutOfRangeError: The data has ended and an execution is of one step.
        """
        if self._model.steps_per_execution == 1:
            return 1, self._next(iterator)
        done, logs = self._several(iterator, tf.constant(count))
        return done, logs

    def from_batch(self, batch: Any, iterator: Any, count: int) -> tuple[Any, dict[str, Any]]:
        """Runs up to so many steps, of which the first batch was already taken from the iterator."""
        self._last_shapes = tf.Variable(tf.fill(tf.shape(_shapes(batch)), -1))  # here, since a trace must make none
        # The signature is the iterator's, so that what XLA compiles here it compiles for all batches.
        logs = self._function(self._on_batch, input_signature=[iterator.element_spec])(batch)
        if count == 1:
            return 1, logs
        done, logs = self.from_iterator(iterator, count - 1)
        return int(done) + 1, logs

    def _function(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return function
        # A partial, because TensorFlow counts the traces of a Python function over all models that were trained by it,
        # and warns. The ledger counts those of this model.
        function = functools.partial(tf.autograph.experimental.do_not_convert(function))
        return tf.function(function, reduce_retracing="input_signature" not in options, **options)

    def _on_batch(self, batch: Any) -> dict[str, Any]:
        with self._traced(batch):
            self._step(batch)
            return self._model.get_metrics_result()

    def _on_next(self, iterator: Any) -> dict[str, Any]:
        with self._traced(iterator.element_spec):
            self._step(iterator.get_next())
            return self._model.get_metrics_result()

    def _on_several(self, iterator: Any, count: tf.Tensor) -> tuple[Any, dict[str, Any]]:
        def in_turn(done: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            batch = iterator.get_next_as_optional()

            def step() -> tf.Tensor:
                self._step(batch.get_value())
                return done + 1

            more = batch.has_value()
            return tf.cond(more, step, lambda: done), more

        def side_by_side(done: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
            # Asked for before the step, so that it is made ready meanwhile; never one more than this call trains on.
            following = tf.cond(done + 1 < count, iterator.get_next_as_optional, lambda: batch)
            self._step(batch.get_value())
            return done + 1, following

        with self._traced(iterator.element_spec):
            if built_under(self._model) is None:
                done, _ = tf.while_loop(
                    lambda done, batch: tf.logical_and(done < count, batch.has_value()),
                    side_by_side,
                    (tf.constant(0), iterator.get_next_as_optional()),
                )
            else:  # workers agree on whether there is a batch, and must not do so in the middle of another agreement
                done, _ = tf.while_loop(
                    lambda done, more: tf.logical_and(done < count, more),
                    in_turn,
                    (tf.constant(0), tf.constant(True)),
                    parallel_iterations=1,
                )
            return done, self._model.get_metrics_result()

    def _step(self, batch: Any) -> None:
        if self._watch_shapes and self._last_shapes is not None:
            self._watch(batch)
        self._run(batch)

    def _watch(self, batch: Any) -> None:
        """Tells the ledger of a batch that is of another shape than the one before."""
        ranks = [len(tensor.shape) for tensor in _tensors(batch)]
        shapes, last, ledger = _shapes(batch), self._last_shapes, self._ledger
        assert ledger is not None  # or there would be nothing to watch for

        def tell(shapes: tf.Tensor) -> None:
            sizes = iter(shapes.numpy().tolist())
            ledger.met_shapes(", ".join(str(tuple(next(sizes) for _ in range(rank))) for rank in ranks))

        def note() -> tf.Tensor:
            last.assign(shapes)
            tf.py_function(tell, [shapes], [])
            return tf.constant(0)

        tf.cond(tf.reduce_all(shapes == last), lambda: tf.constant(0), note)

    @contextlib.contextmanager
    def _traced(self, spec: Any) -> Any:
        begin = time.perf_counter()
        yield
        if self._ledger is not None and not self._model.run_eagerly:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in _tensors(spec))
            self._ledger.traced(shapes, time.perf_counter() - begin)


class Executions:
    """Divides the steps of an epoch into executions: whole ones, and a last one of those that are left.

    Keras' `fit` runs whole ones alone, beyond the end of the epoch if need be. It asks its iterator for their size
    whenever it counts, so the iterator is told the size of the next one; then the numbers of batches that callbacks
    get are right as well.

    Args:
        iterator: Keras' own over the epochs of a `fit`, or of an `evaluate`.
        size: Steps of a whole execution.
        total: Steps of an epoch; None leaves its end to the data.
    """

    def __init__(self, iterator: Any, size: int, total: int | None) -> None:
        self.iterator = iterator
        self._size = size
        self._total = total
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Begins to count anew."""
        self._done = 0
        self._fit_next()

    def next(self) -> int:
        """Returns how many steps the execution has that Keras asks for, and turns to the one after it."""
        size: int = self.iterator.steps_per_execution
        self._done += size
        self._fit_next()
        return size

    def data_ended(self) -> None:
        """Tells Keras that the data ended within an execution.

        Keras counts executions as whole ones. Of an epoch with `steps_per_epoch` it would neither warn that it was cut
        short, nor take the data from the beginning in the next, which would then have no steps and a loss of 0.
        """
        if self.iterator.steps_per_epoch:
            with self.iterator.catch_stop_iteration():
                raise StopIteration

    def _fit_next(self) -> None:
        left = self._total - self._done % self._total if self._total else self._size
        self.iterator.steps_per_execution = min(self._size, left)


def of_one_replica(item: Any) -> Any:
    """Returns the first replica's part of a distributed value or spec, None for what is missing."""
    if isinstance(item, tf.experimental.Optional | tf.OptionalSpec):
        return None
    if isinstance(item, tf.distribute.DistributedValues):
        return item.values[0]
    return spec_of_first_replica(item)


def _tensors(batch: Any) -> list[Any]:
    """Returns the dense tensors, or their specs, of the first replica's part of a batch."""
    items = keras.tree.flatten(keras.tree.map_structure(of_one_replica, batch))
    return [item for item in items if isinstance(item, tf.Tensor | tf.TensorSpec)]


def _shapes(batch: Any) -> tf.Tensor:
    return tf.concat([tf.shape(tensor) for tensor in _tensors(batch)], 0)
