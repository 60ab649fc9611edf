"""Runs several training or test steps in one call into TensorFlow, and sizes the calls of an epoch."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.tensorflow import spec_of_first_replica
from tfopt.compat.trainer import built_under, element_spec
from tfopt.training.step.ledger import Ledger
from tfopt.training.xla import tells_of_a_long_compilation


class StepRunner:
    """Runs several steps in one call into TensorFlow, and returns the metrics after them.

    `run` runs one step on a batch, and returns its logs, or None if they are the results of the metrics. The ledger
    records traces and, with `watch_shapes`, the input shapes for each of which XLA compiles the step again.
    """

    def __init__(
        self, model: keras.Model, run: Callable[[Any], Any], ledger: Ledger | None, *, watch_shapes: bool
    ) -> None:
        self._model = model
        self._run = run
        self._ledger = ledger
        self._watch_shapes = watch_shapes
        self._last_shapes: Any = None  # a variable, made with the first batch
        self.probed = False  # whether a call has ended without an error
        self.on_batch = self._function(self._on_batch)
        self._next = self._function(self._on_next)
        self._several = self._function(self._on_several)

    def from_iterator(self, iterator: Any, count: int, *, while_finite: bool = False) -> tuple[Any, dict[str, Any]]:
        """Runs up to `count` steps. Returns the number of steps that ran, and the metrics.

        With `while_finite`, the step whose loss is not finite is the last one.

        Raises:
            tf.errors.OutOfRangeError: The data has ended, and `steps_per_execution` is 1.
        """
        if self._model.steps_per_execution == 1:
            return 1, self._next(iterator)
        return self._several(iterator, tf.constant(count), while_finite)

    def from_batch(
        self, batch: Any, iterator: Any, count: int, *, while_finite: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """Runs up to `count` steps. The first of their batches is already taken from the iterator."""
        self.watch_from(batch)
        # With the iterator's signature, XLA compiles the first batch as it compiles all others.
        with tells_of_a_long_compilation():
            logs = self._function(self._on_batch, input_signature=[iterator.element_spec])(batch)
        if count == 1 or (while_finite and not loss_is_finite(logs)):
            return 1, logs
        done, logs = self.from_iterator(iterator, count - 1, while_finite=while_finite)
        return int(done) + 1, logs

    def watch_from(self, batch: Any) -> None:
        """Begins to watch the shapes of batches. A trace must not make the variable."""
        self._last_shapes = tf.Variable(tf.fill(tf.shape(_shapes(batch)), -1))

    def _function(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return function
        # A partial, because TensorFlow counts the traces of one Python function over all models that it trains, and
        # warns if there are many. The ledger counts the traces of this model.
        function = functools.partial(tf.autograph.experimental.do_not_convert(function))
        return tf.function(function, reduce_retracing="input_signature" not in options, **options)

    def _on_batch(self, batch: Any) -> dict[str, Any]:
        with self._traced(batch):
            return self._step(batch) or self._model.get_metrics_result()

    def _on_next(self, iterator: Any) -> dict[str, Any]:
        with self._traced(iterator.element_spec):
            return self._step(iterator.get_next()) or self._model.get_metrics_result()

    def _on_several(self, iterator: Any, count: tf.Tensor, while_finite: bool) -> tuple[Any, dict[str, Any]]:
        def step(batch: Any) -> tf.Tensor:
            """Runs a step, and returns whether another one may follow."""
            logs = self._step(batch)
            return loss_is_finite(logs or self._model.get_metrics_result()) if while_finite else tf.constant(True)

        def in_turn(done: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            batch = iterator.get_next_as_optional()
            return tf.cond(
                batch.has_value(),
                lambda: (done + 1, step(batch.get_value())),
                lambda: (done, tf.constant(False)),
            )

        def side_by_side(done: tf.Tensor, more: tf.Tensor, batch: Any) -> tuple[tf.Tensor, tf.Tensor, Any]:
            # Requested before the step, so that it is loaded during the step. The last step requests no batch.
            following = tf.cond(done + 1 < count, iterator.get_next_as_optional, lambda: batch)
            return done + 1, step(batch.get_value()), following

        with self._traced(iterator.element_spec):
            if built_under(self._model) is None:
                done, _, _ = tf.while_loop(
                    lambda done, more, batch: tf.logical_and(tf.logical_and(done < count, more), batch.has_value()),
                    side_by_side,
                    (tf.constant(0), tf.constant(True), iterator.get_next_as_optional()),
                )
            else:  # workers agree on whether there is a batch; that must not overlap with another collective operation
                done, _ = tf.while_loop(
                    lambda done, more: tf.logical_and(done < count, more),
                    in_turn,
                    (tf.constant(0), tf.constant(True)),
                    parallel_iterations=1,
                )
            return done, self._model.get_metrics_result()

    def _step(self, batch: Any) -> Any:
        if self._watch_shapes and self._last_shapes is not None:
            self._watch(batch)
        return self._run(batch)

    def _watch(self, batch: Any) -> None:
        """Reports a batch to the ledger if its shape is not that of the batch before."""
        ranks = [len(tensor.shape) for tensor in _tensors(batch)]
        shapes, last, ledger = _shapes(batch), self._last_shapes, self._ledger
        assert ledger is not None  # shapes are watched for the ledger

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


class MeasuringRunner:
    """Runs steps as `StepRunner` does, the first and then one in `every` by a function of its own, which also measures.

    So a step that is not measured costs what it costs in a training that measures nothing.
    """

    def __init__(self, plain: StepRunner, measuring: StepRunner, every: int) -> None:
        self._plain, self._measuring, self._every = plain, measuring, every
        self._done = 0
        self.on_batch = plain.on_batch
        self.probed = False

    def from_iterator(self, iterator: Any, count: int, *, while_finite: bool = False) -> tuple[Any, dict[str, Any]]:
        """See `StepRunner.from_iterator`."""
        total, more = 0, True
        while more:
            runner, wanted = self._next(count - total)
            done, logs = runner.from_iterator(iterator, wanted, while_finite=while_finite)
            if wanted == count:  # one call, whose end nobody waits for here
                self._done += wanted
                return done, logs
            total, self._done = total + int(done), self._done + int(done)
            more = int(done) == wanted and total < count and (not while_finite or bool(loss_is_finite(logs)))
        return total, logs

    def from_batch(
        self, batch: Any, iterator: Any, count: int, *, while_finite: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """See `StepRunner.from_batch`."""
        self._plain.watch_from(batch)
        done, logs = self._measuring.from_batch(batch, iterator, 1)
        self._done = 1
        if count == 1 or (while_finite and not loss_is_finite(logs)):
            return done, logs
        done, logs = self.from_iterator(iterator, count - 1, while_finite=while_finite)
        return int(done) + 1, logs

    def _next(self, left: int) -> tuple[StepRunner, int]:
        """Returns the runner of the next steps, and how many of those that are left it runs in one call."""
        plain = -self._done % self._every
        if plain:
            return self._plain, min(plain, left)
        return self._measuring, left if self._every == 1 else 1


class CallSizes:
    """Divides the steps of an epoch into calls of one size, and a smaller last one for the remaining steps.

    Keras' `fit` only makes calls of one size, and may run past the end of the epoch. Keras reads the size from its
    iterator whenever it counts steps. So this class sets the size of the next call there. Then the batch numbers that
    callbacks receive are right as well.
    """

    def __init__(self, iterator: Any, size: int, total: int | None) -> None:
        """Takes Keras' iterator of a `fit` or an `evaluate`; a total of None lets the data decide where it ends."""
        self.iterator = iterator
        self._size = size
        self._total = total
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Starts to count from zero."""
        self._done = 0  # steps of this epoch
        self._fit_next()

    def next(self) -> int:
        """Returns the number of steps of the next call, and sets the size of the one after it."""
        size: int = self.iterator.steps_per_execution
        self._done += size
        self._fit_next()
        return size

    @property
    def last_batch(self) -> int:
        """The number of the last batch of this epoch that was trained on."""
        return self._done - 1

    def stopped(self, missing: int) -> None:
        """Tells that the last call ended so many steps early, with data left."""
        self._done -= missing

    def data_ended(self) -> None:
        """Tells Keras that the data ended within a call.

        Keras would count the call as complete. With `steps_per_epoch`, it would not warn that the epoch is too
        short. It would not start the data again for the next epoch either, which would have no steps and a loss of 0.
        """
        if self.iterator.steps_per_epoch:
            with self.iterator.catch_stop_iteration():
                raise StopIteration

    def _fit_next(self) -> None:
        left = self._total - self._done % self._total if self._total else self._size
        self.iterator.steps_per_execution = min(self._size, left)


def loss_is_finite(logs: dict[str, Any]) -> tf.Tensor:
    """Returns whether the loss that callbacks are shown is finite. A loss that they are not shown is."""
    return tf.math.is_finite(tf.cast(logs.get("loss", 0.0), tf.float64))


def of_one_replica(item: Any) -> Any:
    """Returns the first replica's part of a distributed value or spec, or None if the value is missing."""
    if isinstance(item, tf.experimental.Optional | tf.OptionalSpec | tf.NoneTensorSpec):
        return None
    if isinstance(item, tf.distribute.DistributedValues):
        return item.values[0]
    return spec_of_first_replica(item)


def as_one_replica_sees(iterator: Any, data_batch: Any) -> Any:
    """Returns the specs of the iterator's batches, or else the batch as tensors."""
    if iterator is not None:
        return keras.tree.map_structure(of_one_replica, element_spec(iterator))
    return keras.tree.map_structure(lambda item: None if item is None else tf.convert_to_tensor(item), data_batch)


def _tensors(batch: Any) -> list[Any]:
    """Returns the dense tensors, or their specs, of the first replica's part of a batch."""
    items = keras.tree.flatten(keras.tree.map_structure(of_one_replica, batch))
    return [item for item in items if isinstance(item, tf.Tensor | tf.TensorSpec)]


def _shapes(batch: Any) -> tf.Tensor:
    return tf.concat([tf.shape(tensor) for tensor in _tensors(batch)], 0)
