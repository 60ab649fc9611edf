"""The training step that Keras' `fit` runs on a model compiled by `tfopt.compile`.

A batch of B examples is divided over replicas, and on each replica into micro-batches of m examples. The loss of a
micro-batch is the mean over its examples. It is weighted by its share m / B before the gradient is computed, so that

    sum over replicas and micro-batches of (m / B) * gradient(mean)  =  gradient of the mean over the batch

for all sizes. Losses that count some items only, such as those under a mask, are corrected; see losses.py. Every
example of the last, smaller batch of an epoch has the same weight, and a replica without examples adds zeros instead of
0/0. Keras instead divides some losses by the number of replicas: those that have a value for each example. That is
switched off. Gradients are summed over the replicas before the optimizer receives them. So it clips the same gradients
as on one device, and sets the loss scale by the gradients of all replicas. Keras' own step only checks those of the
first replica.

Under mixed_float16, gradients below 6e-8 would be zero. So Keras' `compile` wraps the optimizer in a LossScaleOptimizer
(Micikevicius et al., "Mixed Precision Training", ICLR 2018, arXiv:1710.03740): the loss is multiplied by a large scale
before the backward pass, and the optimizer divides the gradients by it. If a gradient overflows, the optimizer halves
the scale, and the weights stay as they are. After many steps without an overflow it doubles the scale.

XLA cannot compile the communication between replicas. So under a strategy, and with several micro-batches, it compiles
the forward and backward pass, but not the communication and the update. On one device it compiles the whole step.

This module must not create variables: inside loops, conditions and compiled functions that fails. The runtime builds
the model, the metrics and the optimizer before.

Keras lets XLA compile each grouped convolution alone. On CPUs the step traces plain operations in their place, unless
XLA compiles the step itself: the gradient of such a convolution is many times faster.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.layers import takes_training
from tfopt.compat.optimizers import gradients_already_summed
from tfopt.compat.plain import plain_operations
from tfopt.compat.tensorflow import custom_gradients_forgotten
from tfopt.compat.trainer import built_under, loss_tracker, losses_not_scaled, symbolic_call
from tfopt.training.checkpointing.state import differs_between_replicas
from tfopt.training.losses import Part, compute_loss, counts_of, parts_in_words, visible_reductions
from tfopt.training.pipeline_parallel.step import Stages
from tfopt.training.step.augment import StepAugmentation
from tfopt.training.step.noise import FIGURES, GradientNoise, without_changes

Noise = GradientNoise | None
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


class Step:
    """One training or test step of a model, on every replica of the strategy that the model was built under.

    Args:
        model: A built and compiled Keras model.
        jit_compile: Whether XLA compiles the step.
        accumulate: The number of micro-batches of a step, which run one after the other.
        sparse_gradients: Whether the optimizer receives sparse gradients unchanged, instead of the sum of each row.
        stages, micro_batches: The stages of a pipeline, and the micro-batches that run on them at the same time.
        augment: Changes the images of a batch before it is divided into micro-batches.
        output_losses_as_keras: Whether the losses of single outputs weigh batches as in Keras; see losses.py.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        jit_compile: bool,
        accumulate: int = 1,
        sparse_gradients: bool = False,
        stages: Stages | None = None,
        micro_batches: int = 1,
        augment: StepAugmentation | None = None,
        output_losses_as_keras: bool = False,
    ) -> None:
        self.jit_compile = jit_compile
        self._augment = augment
        self._output_losses_as_keras = output_losses_as_keras
        self._model = model
        self._accumulate = accumulate
        self._sparse_gradients = sparse_gradients
        self._stages = stages
        self._stage_batches = micro_batches
        self._strategy = model.distribute_strategy
        self._replicas = self._strategy.num_replicas_in_sync
        # The places of the variables without a gradient. With run_eagerly, a replica without examples does not compute
        # gradients, so it reads this list. The first replica always has examples, and runs first.
        self._unused: list[int] = []
        self.divided = parts_in_words(self._replicas, max(accumulate, micro_batches))
        # How many losses count some items only, in batches with or without labels and weights; see `prepare`.
        self._counting: dict[tuple[bool, bool], int] = {}
        # A strategy with one replica is distributed too: its variables differ from those of one device.
        self.is_distributed = distributed = built_under(model) is not None
        # XLA compiles the whole step, or only the parts without communication.
        whole = jit_compile and not distributed and accumulate == 1 and stages is None
        inner = jit_compile and not whole and stages is None
        self._forward_backward = self._compiled(self._forward_backward_once, inner)
        self._forward = self._compiled(self._forward_once, inner)
        self._update = self._compiled(self._apply_gradients, inner and not distributed)
        self._train_one_device = self._traced(custom_gradients_forgotten()(self._train_on_replica), whole)
        self._test_one_device = self._traced(self._test_on_replica, whole)

    def prepare(self, spec: Any) -> None:
        """Finds out which losses count some items only, such as those under a mask, in a batch of some specs.

        The model, its losses and its metrics must be built.
        """
        batch = _unpack(keras.tree.map_structure(_symbolic, spec))
        # A pipeline sees the masks of all micro-batches before it computes the first loss.
        if not self.divided or self._stages is not None or _kind(*batch) in self._counting:
            return
        found: list[Any] = []

        def count(x: Any, y: Any, weight: Any) -> Any:
            found.extend(self._counts_once(x, y, weight))
            return x

        symbolic_call(count, *batch)
        self._counting[_kind(*batch)] = len(found)

    def train(self, data: Any, noise: Noise = None) -> None:
        """Trains on one batch, distributed or not, and updates the model's metrics. Measures the noise, if given."""
        with without_islands(self.jit_compile), custom_gradients_forgotten():  # once for all replicas
            if not self.is_distributed:
                self._train_one_device(self._augmented(data), noise)
                return
            with gradients_already_summed(self._model.optimizer), losses_not_scaled(), visible_reductions():
                self._strategy.run(lambda data: self._train_on_replica(self._augmented(data), noise), args=(data,))

    def test(self, data: Any) -> None:
        """Evaluates the model on one batch, distributed or not, and updates its metrics."""
        with without_islands(self.jit_compile):
            if not self.is_distributed:
                self._test_one_device(self._unchanged(data))
                return
            with losses_not_scaled(), visible_reductions():
                self._strategy.run(lambda data: self._test_on_replica(self._unchanged(data)), args=(data,))

    def spec(self, batch: Any) -> Any:
        """Returns the specs of a batch as the model is trained on it."""
        return batch if self._augment is None or batch is None else self._augment.spec(*_unpack(batch))

    def _compiled(self, function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        function = custom_gradients_forgotten()(function)
        return self._traced(function, True) if jit_compile else function

    def _traced(self, function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        partial = functools.partial(tf.autograph.experimental.do_not_convert(function))  # see StepRunner
        traced = tf.function(partial, jit_compile=jit_compile or None, reduce_retracing=True)
        return lambda *args: (function if self._model.run_eagerly else traced)(*args)

    def _augmented(self, data: Any) -> Any:
        # Outside of XLA, which has no kernel for the projective transform.
        return data if self._augment is None else self._augment.on_replica(*_unpack(data))

    def _unchanged(self, data: Any) -> Any:
        return data if self._augment is None else self._augment.one_hot(*_unpack(data))

    def synchronize(self) -> None:
        """Averages the variables that each replica updates by itself, such as the moving statistics of batch norms.

        These are linear in the updates. So the result is the same as if they were averaged after every step.
        """
        local = [
            variable
            for variable in self._model.non_trainable_variables
            if tf.as_dtype(variable.dtype).is_floating and differs_between_replicas(variable)
        ]
        if not local:
            return

        def average() -> None:
            values = tf.distribute.get_replica_context().all_reduce(MEAN, [v.value.read_value() for v in local])
            for variable, value in zip(local, values, strict=True):
                variable.assign(value)

        self._strategy.run(average)

    def _train_on_replica(self, data: Any, noise: Noise) -> None:
        x, y, weight = _unpack(data)
        context = tf.distribute.get_replica_context()
        if self._stages is not None:
            loss, y_pred, gradients = self._stages.forward_backward(x, y, weight, micro_batches=self._stage_batches)
            self._record(loss, _batch_size(x), x, y, y_pred, weight)
        elif self._accumulate == 1 and (not self.is_distributed or self._parts_are_equal(x)):
            part = Part(1 / self._replicas, self._totals(x, y, weight)) if self._replicas > 1 else None
            loss, y_pred, gradients = self._forward_backward(x, y, weight, part, noise)
            self._record(loss, _batch_size(x), x, y, y_pred, weight)
        else:
            total = context.all_reduce(SUM, _batch_size(x)) if self.is_distributed else _batch_size(x)
            gradients = self._accumulated_gradients(x, y, weight, total, noise)
        if self.is_distributed:
            gradients = _all_reduce(context, gradients)
        if noise is not None:
            gradients = self._measured(noise, gradients, x, y, weight)
        self._update(gradients)

    def _accumulated_gradients(self, x: Any, y: Any, weight: Any, total: Any, noise: Noise) -> list[Any]:
        """Returns the gradients summed over micro-batches. They run one after the other, in the same memory.

        A replica with fewer examples than micro-batches runs one micro-batch for each example.
        """
        variables = self._model.trainable_weights
        size, totals = _batch_size(x), self._totals(x, y, weight)
        count = tf.minimum(self._accumulate, size)
        unused = self._unused

        def add(index: tf.Tensor, *sums: tf.Tensor) -> tuple[Any, ...]:
            begin, end = index * size // count, (index + 1) * size // count
            part_x, part_y, part_weight = _examples(begin, end, (x, y, weight))
            share = tf.cast(end - begin, "float32") / tf.cast(total, "float32")
            part = Part(share, totals)
            loss, y_pred, gradients = self._forward_backward(part_x, part_y, part_weight, part, noise)
            self._record(loss, end - begin, part_x, part_y, y_pred, part_weight)
            unused[:] = [place for place, gradient in enumerate(gradients) if gradient is None]
            added = [
                before if gradient is None else before + tf.ensure_shape(tf.convert_to_tensor(gradient), before.shape)
                for before, gradient in zip(sums, gradients, strict=True)
            ]
            return index + 1, *added

        zeros = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
        zeros += [] if noise is None else [tf.zeros(FIGURES)]
        _, *sums = tf.while_loop(lambda index, *_: index < count, add, (tf.constant(0), *zeros), parallel_iterations=1)
        return [None if place in unused else value for place, value in enumerate(sums)]

    def _totals(self, x: Any, y: Any, weight: Any) -> Any:
        """Returns how many items count in the whole batch, for each loss that does not count all of them."""
        losses = self._counting.get(_kind(x, y, weight))
        if not losses:
            return None
        if self._model.run_eagerly and not int(_batch_size(x)):  # some layers fail without examples
            counts = tf.zeros(losses)
        else:
            counts = tf.stack(self._counts_once(x, y, weight))
        return tf.distribute.get_replica_context().all_reduce(SUM, counts) if self.is_distributed else counts

    def _counts_once(self, x: Any, y: Any, weight: Any) -> list[Any]:
        # TensorFlow computes the masks alone, since nothing reads the other results.
        return counts_of(lambda: self._loss(x, y, self._call(x, training=True), weight, training=True), self._model)

    def _forward_backward_once(self, x: Any, y: Any, weight: Any, part: Part | None, noise: Noise) -> Any:
        model = self._model
        variables = [variable.value for variable in model.trainable_weights]
        with tf.GradientTape() as tape:
            y_pred = self._call(x, training=True)
            loss = self._loss(x, y, y_pred, weight, training=True, part=part)
            # The loss is divided here: each part of the batch counts by its share.
            weighted = loss if part is None else loss * tf.cast(part.share, loss.dtype)
            scaled = model.optimizer.scale_loss(weighted)
        gradients = tape.gradient(scaled, variables)
        if noise is not None and part is not None:  # what is measured is summed as gradients are
            gradients.append(noise.of_part(gradients, part.share, _batch_size(x)))
        return loss, y_pred, gradients

    def _measured(self, noise: GradientNoise, gradients: list[Any], x: Any, y: Any, weight: Any) -> list[Any]:
        """Measures the noise of the gradients of a batch, and returns them without the figures of its parts."""
        of_model = gradients[: len(self._model.trainable_weights)]
        if noise.halves and _first(x).shape[0] == 1:
            return of_model

        def of_parts() -> list[Any]:
            return self._gradients_of_halves(x, y, weight, noise) if noise.halves else gradients

        with tf.control_dependencies([each for each in of_model if each is not None]):  # memory: one pass at a time
            noise.note(of_parts, self._model.optimizer, _batch_size(x))
        return of_model

    def _gradients_of_halves(self, x: Any, y: Any, weight: Any, noise: GradientNoise) -> list[Any]:
        """Returns the gradients of a batch, computed from its halves, and their figures. No state changes."""
        size = _batch_size(x)
        with without_changes(self._model):
            halves = [
                self._forward_backward_once(
                    *_examples(begin, end, (x, y, weight)),
                    Part(tf.cast(end - begin, "float32") / tf.cast(size, "float32")),
                    noise,
                )[2]
                for begin, end in ((0, size // 2), (size // 2, size))
            ]
        return [None if one is None else _dense(one) + _dense(other) for one, other in zip(*halves, strict=True)]

    def _apply_gradients(self, gradients: Sequence[Any]) -> None:
        if not self._sparse_gradients:
            # The gradient of an embedding holds a row as often as the batch names it. Keras' optimizers clip and square
            # these rows one by one, not their sum. So the update would depend on how the batch is divided.
            gradients = [_dense(gradient) for gradient in gradients]
        if self._stages is not None:
            self._stages.apply_gradients(self._model.optimizer, gradients)
        elif gradients:  # there are none if all weights are frozen
            self._model.optimizer.apply_gradients(zip(gradients, self._model.trainable_weights, strict=True))

    def _test_on_replica(self, data: Any) -> None:
        x, y, weight = _unpack(data)
        size = _batch_size(x)
        part = None
        if self._counting.get(_kind(x, y, weight)) and self._replicas > 1:
            total = tf.distribute.get_replica_context().all_reduce(SUM, size)
            part = Part(tf.cast(size, "float32") / tf.cast(total, "float32"), self._totals(x, y, weight))

        def evaluate() -> tf.Tensor:
            loss, y_pred = self._forward(x, y, weight, part)
            self._record(loss, size, x, y, y_pred, weight)
            return tf.constant(0)

        if self.is_distributed and not self._parts_are_equal(x):
            tf.cond(size > 0, evaluate, lambda: tf.constant(0))  # the loss of no examples would be 0/0
        else:
            evaluate()

    def _parts_are_equal(self, x: Any) -> bool:
        """Returns whether all replicas surely have the same number of examples. Eagerly, a replica cannot know that."""
        return not self._model.run_eagerly and _first(x).shape[0] is not None

    def _forward_once(self, x: Any, y: Any, weight: Any, part: Part | None) -> tuple[Any, Any]:
        y_pred = self._call(x, training=False)
        return self._loss(x, y, y_pred, weight, training=False, part=part), y_pred

    def _loss(self, x: Any, y: Any, y_pred: Any, weight: Any, *, training: bool, part: Part | None = None) -> Any:
        return compute_loss(
            self._model,
            x=x,
            y=y,
            y_pred=y_pred,
            sample_weight=weight,
            training=training,
            examples=None if self._output_losses_as_keras else _batch_size(x),
            part=part,
        )

    def _call(self, x: Any, *, training: bool) -> Any:
        if self._stages is not None:
            return self._stages.forward(x, training=training)
        if takes_training(self._model):
            return self._model(x, training=training)
        return self._model(x)

    def _record(self, loss: Any, size: Any, x: Any, y: Any, y_pred: Any, weight: Any) -> None:
        loss_tracker(self._model).update_state(loss, sample_weight=size)
        self._model.compute_metrics(x, y, y_pred, sample_weight=weight)


def without_islands(jit_compile: bool) -> contextlib.AbstractContextManager[None]:
    """Returns a scope for tracing a model, in which Keras' layers make no detours, such as XLA for one convolution.

    It is for CPUs, where that was measured. XLA, where it compiles all that is traced, inlines these convolutions.
    """
    on_cpus = all(device.device_type == "CPU" for device in tf.config.list_logical_devices())
    return plain_operations(gradients=True) if on_cpus and not jit_compile else contextlib.nullcontext()


def _dense(gradient: Any) -> Any:
    """Returns a dense gradient, which holds the sum of each row, on the same device."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    with tf.device(gradient.values.device):
        return tf.convert_to_tensor(gradient)


def _unpack(data: Any) -> tuple[Any, Any, Any]:
    x, y, weight = keras.utils.unpack_x_y_sample_weight(keras.tree.map_structure(or_none, data))
    return x, y, weight


def or_none(item: Any) -> Any:
    """Returns None for the Optional by which Keras replaces a missing value, since tf.data has no None."""
    return None if isinstance(item, tf.experimental.Optional) else item


def _symbolic(spec: Any) -> Any:
    return None if spec is None else keras.KerasTensor(spec.shape, keras.backend.standardize_dtype(spec.dtype))


def _examples(begin: Any, end: Any, batch: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    part: tuple[Any, Any, Any] = keras.tree.map_structure(lambda each: None if each is None else each[begin:end], batch)
    return part


def _kind(x: Any, y: Any, weight: Any) -> tuple[bool, bool]:
    return y is None, weight is None


def _first(x: Any) -> Any:
    return next(item for item in keras.tree.flatten(x) if item is not None)


def _batch_size(x: Any) -> Any:
    return tf.shape(_first(x))[0]


def _all_reduce(context: Any, gradients: Sequence[Any]) -> list[Any]:
    present = [gradient for gradient in gradients if gradient is not None]
    reduced = iter(context.all_reduce(SUM, present) if present else ())  # none if all weights are frozen
    return [None if gradient is None else next(reduced) for gradient in gradients]
