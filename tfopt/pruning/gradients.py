"""Gradients of a compiled model's loss over batches of data, which change nothing in the model.

The loss is that of `compile`, with the layers' own losses, computed as in `evaluate`: without dropout, and with the
moving statistics of batch normalisation. So the gradients of a batch are a fact of the weights and the batch alone.
Metrics, seeds and other states that the forward pass writes get their values back. The optimizer takes no part:
neither its clipping nor its loss scale touches the gradients.

Under a strategy, each replica computes the loss of its part of a batch. With n of the N examples it weights its
gradient by n / N, and the sum over the replicas is the gradient of the mean over the batch.

In half precision small gradients become zero, as in training. So the loss is multiplied by a power of two, by which the
gradient is divided again. If a gradient overflows, a smaller power is tried.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.layers import layers_inside, takes_training
from tfopt.compat.tensorflow import keras_generator
from tfopt.compat.trainer import built_under, loss_of, losses_not_scaled, symbolic_build
from tfopt.errors import ConfigError, TfoptError, UnsupportedModelError
from tfopt.pruning.criteria import Products

A_DATA_SET = "Pass data=: a tf.data.Dataset or a list of batches (inputs, targets)."


def check_data(data: Any) -> None:
    """Raises ConfigError unless data can be read more than once, and its first batch has inputs and targets."""
    if isinstance(data, Iterator):
        raise ConfigError(
            "data must be readable more than once, because the masks change more than once. "
            f"Received: data={type(data).__name__}(...), which is used up by the first reading. {A_DATA_SET}"
        )
    next(_read(data, 1))


class LossGradients:
    """The gradients of a compiled model's loss, batch by batch. The computation is traced once, for many uses.

    A variable that the loss does not depend on has gradients of zero. Batches are (inputs, targets) or (inputs,
    targets, weights).

    Raises:
        UnsupportedModelError: The model is not compiled, the loss depends on no variable, or a gradient is not finite.
        ConfigError: There is no data, a batch has no targets, or the loss cannot be computed on it.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        >>> model.compile("sgd", "mse")
        >>> gradients, data = LossGradients(model, [model.layers[0].kernel]), [(np.ones((4, 2)), np.zeros((4, 1)))]
        >>> [kernel.ravel() for kernel, in gradients.of_batches(data, 8)]
        [array([4., 4.], dtype=float32)]
        >>> gradients.mean_products(data, 8)[0].squared.ravel()
        array([16., 16.], dtype=float32)
    """

    def __init__(self, model: keras.Model, variables: Sequence[keras.Variable]) -> None:
        if not model.compiled:
            raise UnsupportedModelError(
                f"model must be compiled, because gradients of its loss are needed. Received: {model.name!r} without "
                "a loss. Call model.compile or tfopt.compile first."
            )
        self._model = model
        self._variables = variables
        self._distributed = built_under(model) is not None
        self._strategy = model.distribute_strategy
        half = any(layer.compute_dtype == "float16" for layer in layers_inside(model))
        self._scales = (2.0**15, 2.0**10, 2.0**5, 1.0) if half else (1.0,)
        function = tf.autograph.experimental.do_not_convert(self._on_all_replicas)
        # A partial: tf.function would bind a method to a weak reference of its object.
        self._compute = (
            function if model.run_eagerly else tf.function(functools.partial(function), reduce_retracing=True)
        )

    def mean_products(self, data: Any, batches: int) -> list[Products]:
        """Returns, for each variable, the means over batches of its gradient and of its squared product with it.

        If there are fewer batches than `batches`, all are read.
        """
        values = [np.asarray(variable.numpy(), np.float32) for variable in self._variables]
        sums = [np.zeros_like(value) for value in values]
        squares = [np.zeros_like(value) for value in values]
        count = 0
        for count, gradients in enumerate(self.of_batches(data, batches), start=1):  # noqa: B007
            for place, gradient in enumerate(gradients):
                sums[place] += gradient
                squares[place] += (values[place] * gradient) ** 2
        means = zip(sums, squares, strict=True)
        return [Products(gradient=total / count, squared=square / count) for total, square in means]

    def of_batches(self, data: Any, batches: int) -> Iterator[list[np.ndarray]]:
        """Yields the float32 gradients of all variables for each of the first batches of the data."""
        yield from map(self._finite, _read(data, batches))

    def _finite(self, batch: tuple[Any, ...]) -> list[np.ndarray]:
        try:
            parts = self._divided(batch)
            with _unchanged(self._model, self._strategy):
                for scale in self._scales:
                    computed = self._compute(tf.constant(scale), parts)
                    gradients = [np.asarray(each, np.float32) / scale for each in computed]
                    if all(np.isfinite(gradient).all() for gradient in gradients):
                        return gradients
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            if isinstance(error, TfoptError):
                raise
            raise ConfigError(
                f"data must hold batches that the model is trained on. Received: a batch that {self._model.name!r} "
                f"has no loss for: {' '.join(str(error).split())[:400]}. {A_DATA_SET}"
            ) from error
        wrong = next(place for place, gradient in enumerate(gradients) if not np.isfinite(gradient).all())
        raise UnsupportedModelError(
            "The gradients of the loss must be finite. Received: NaN or infinity in that of "
            f"{self._variables[wrong].path!r}. Look for such values in the data, or lower the learning rate."
        )

    def _divided(self, batch: tuple[Any, ...]) -> Any:
        """Returns (share of the batch, batch) for this device, or for each replica of this process."""
        batch = keras.tree.map_structure(_tensor, batch)
        with self._strategy.scope():
            symbolic_build(self._model, batch)  # variables of metrics cannot be made in a traced function
        if not self._distributed:
            return tf.constant(1.0), batch
        size = int(next(item for item in keras.tree.flatten(batch) if item is not None).shape[0])
        local, total = len(self._strategy.extended.worker_devices), self._strategy.num_replicas_in_sync
        bounds = itertools.pairwise(size * number // local for number in range(local + 1))

        def part(context: Any) -> Any:
            begin, end = next(bounds)
            share = (end - begin) / size * local / total  # other workers read batches of their own
            # A replica without examples computes one for nothing: the mean over none is not a number.
            rows = slice(begin, end) if end > begin else slice(1)
            piece = keras.tree.map_structure(lambda item: None if item is None else item[rows], batch)
            return tf.constant(share, tf.float32), piece

        return self._strategy.experimental_distribute_values_from_function(part)

    def _on_all_replicas(self, scale: tf.Tensor, parts: Any) -> list[tf.Tensor]:
        if not self._distributed:
            return self._on_replica(scale, *parts)
        with losses_not_scaled():
            summed = self._strategy.run(self._on_replica, args=(scale, *parts))
        return [self._strategy.experimental_local_results(each)[0] for each in summed]

    def _on_replica(self, scale: tf.Tensor, share: tf.Tensor, batch: Any) -> list[tf.Tensor]:
        model = self._model
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        values = [variable.value for variable in self._variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)  # also those of frozen layers
            y_pred = model(x, training=False) if takes_training(model) else model(x)
            loss = loss_of(model, x=x, y=y, y_pred=y_pred, sample_weight=weight, training=False)
            weighted = loss * tf.cast(share * scale, loss.dtype)
        gradients = tape.gradient(weighted, values)
        if values and all(gradient is None for gradient in gradients):
            raise UnsupportedModelError(
                f"The loss must depend on the weights. Received: {model.name!r}, with a loss that has no gradient for "
                "any of them. Compile the model with the loss that it is trained with."
            )
        dense = [
            tf.zeros(variable.shape, variable.dtype) if gradient is None else tf.convert_to_tensor(gradient)
            for gradient, variable in zip(gradients, self._variables, strict=True)
        ]
        if not self._distributed:
            return dense
        return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, dense))


def _read(data: Any, batches: int) -> Iterator[tuple[Any, ...]]:
    """Yields the first batches, each checked; at least one."""
    if data is None:
        raise ConfigError(f"data must be given, because the criterion or regrowth needs gradients. {A_DATA_SET}")
    try:
        iterator = iter(data)
    except TypeError as error:
        raise ConfigError(f"data must hold batches. Received: data={type(data).__name__}(...). {A_DATA_SET}") from error
    empty = True
    for batch in itertools.islice(iterator, batches):
        empty = False
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3) or batch[1] is None:
            parts = len(batch) if isinstance(batch, tuple | list) else 1
            raise ConfigError(
                "data must hold batches of inputs and targets, because the loss needs targets. Received: a batch "
                f"of type {type(batch).__name__} with {parts} part{'s' if parts > 1 else ''}. {A_DATA_SET}"
            )
        yield tuple(batch)
    if empty:
        raise ConfigError(f"data must hold a batch. Received: data without one. {A_DATA_SET}")


def _tensor(value: Any) -> Any:
    """Returns a tensor in the precision that `fit` would use."""
    if value is None or isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        return value
    tensor = tf.convert_to_tensor(value)
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype == tf.float64 else tensor


@contextlib.contextmanager
def _unchanged(model: keras.Model, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Gives all states that a forward pass or a loss writes their values back, those of each replica too."""
    generator = keras_generator(make=False)
    variables = [*model.non_trainable_variables, *model.metrics_variables, *([generator.state] if generator else [])]
    own = [each for variable in variables for each in strategy.experimental_local_results(variable.value)]
    before = [each.numpy() for each in own]
    try:
        yield
    finally:
        for variable, value in zip(own, before, strict=True):
            variable.assign(value)
