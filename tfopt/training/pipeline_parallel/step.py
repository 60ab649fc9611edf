"""Pipeline parallelism: the stages of a model are on different devices and work on different micro-batches.

In the forward pass, stage s maps its inputs h[s-1] and its weights to h[s]. In the backward pass, it maps dL/dh[s] to
dL/dh[s-1] and to the gradient of its weights. Each stage has its own GradientTape. The reason is that the operations of
a backward pass run on the device under which `tape.gradient` is called, not on the device of the forward pass. One tape
for the whole model would run all backward passes on the first device.

The schedule is that of GPipe: all micro-batches are independent until their gradients are summed. TensorFlow's executor
carries it out: inside a `tf.function`, it starts each operation as soon as its inputs are ready. So device 1 works on
one micro-batch while device 0 works on the next.

A loss L that averages over the batch is the sum over micro-batches m of n[m] / n * L[m], where n[m] are their sizes.
The same holds for its gradients. It does not hold for losses that sum. Losses that average over weights or masks are
corrected by their counts (losses.py), so all micro-batches run forward before the first loss is computed. BatchNorm
computes its statistics, and dropout its noise, for each micro-batch. With one micro-batch, the result is the same as on
one device.

Reference:
    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019,
    arXiv:1811.06965.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.layers import calls_in_order, standardize_inputs
from tfopt.compat.trainer import loss_of
from tfopt.errors import ConfigError, unknown_name
from tfopt.training.losses import Part, compute_loss, counts_of, visible_reductions
from tfopt.training.pipeline_parallel.passes import (
    MicroBatch,
    Pass,
    StageCall,
    Sums,
    Values,
    differentiable,
    entering,
    micro_batches_of,
)
from tfopt.training.pipeline_parallel.stages import (
    Placement,
    cut,
    functional_form,
    move,
    place_slots,
    placement,
    updates_in_place,
)


def split(
    model: keras.Model,
    devices: Sequence[str],
    cuts: Sequence[str] | None = None,
    *,
    batch_size: int,
) -> Stages:
    """Splits a model into one stage per device. The model is not changed.

    Args:
        model: A built functional or Sequential model. A nested model stays in one stage.
        devices: The devices of the stages, in order, for example ["GPU:0", "GPU:1"]. A device may occur twice.
        cuts: The first layers of the second and later stages. None balances the bytes of layer outputs and parameters.
            A trainable parameter counts four times, for its gradient and the two slots of Adam.
        batch_size: The examples of a step, all micro-batches together.
    Raises:
        UnsupportedModelError: The model is subclassed or not built.
        ConfigError: A device does not exist, or the cuts do not match the graph.
    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64), keras.layers.Dense(2)])
        >>> stages = split(model, ["CPU:0", "CPU:0"], batch_size=4)
        >>> [len(stage.layers) for stage in stages.records]
        [1, 1]
    """
    names = _devices(devices)
    graph = functional_form(model)
    parts = cut(calls_in_order(graph), len(names), cuts, batch_size)
    records = [placement(device, part, batch_size) for device, part in zip(names, parts, strict=True)]
    return Stages(model, graph, records, parts)


class Stages:
    """A model in stages. `print(stages)` shows each stage's device, bytes and layers, which are in its `records`."""

    def __init__(
        self, model: keras.Model, graph: keras.Model, records: Sequence[Placement], parts: Sequence[list[Any]]
    ) -> None:
        self.model = model
        self.records = tuple(records)
        self._graph = graph
        needed = {id(tensor) for tensor in graph.outputs}
        calls = []
        for place, part in reversed(list(enumerate(parts))):
            call = StageCall(part, set(map(id, graph.inputs)), needed, name=f"stage_{place}")
            needed |= set(call.takes)
            calls.append(call)
        self._calls = calls[::-1]

    def __str__(self) -> str:
        return "\n".join(f"stage {place}  {record}" for place, record in enumerate(self.records))

    def place(self) -> None:
        """Moves each stage's variables (weights, BatchNorm statistics, random seeds) to its device. Values stay.

        Functions traced before still use the old variables, so compile the model after this call. `place_optimizer`
        updates an optimizer that was built before.
        """
        for record, call in zip(self.records, self._calls, strict=True):
            for variable in call.variables:
                move(variable, record.device)

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Moves the slots of the model's optimizer. Step counter, learning rate and loss scale stay on their device."""
        place_slots(optimizer, self.model.trainable_variables)

    def apply_gradients(self, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]) -> None:
        """Applies gradients of the model's trainable variables, each update computed on its variable's device."""
        with updates_in_place(optimizer):
            optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))

    def forward(self, x: Any, training: bool = False) -> Any:
        """Returns the model's outputs, each stage computed on its device."""
        values = self._inputs(x)
        for record, call in zip(self.records, self._calls, strict=True):
            with tf.device(record.device):
                values.update(call.run(values, training))
        return self._packed([values[id(tensor)] for tensor in self._graph.outputs])

    def forward_backward(
        self, x: Any, y: Any, sample_weight: Any = None, *, micro_batches: int = 1
    ) -> tuple[tf.Tensor, Any, list[Any]]:
        """Runs a batch in micro-batches, forward and backward. With more of them, devices are idle for less time.

        If micro_batches does not divide the size of the batch, the micro-batches differ by one example. One without
        examples repeats one, with weight zero; but BatchNorm counts it.

        Returns: the loss; the outputs for the whole batch; and for each of model.trainable_variables, on its device,
            the gradient of the loss as the model's optimizer scales it, or None.
        Raises:
            ConfigError: micro_batches is not a positive whole number.
        """
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise ConfigError(
                f"micro_batches must be a whole number of at least 1. Received: micro_batches={micro_batches!r}."
            )
        parts = micro_batches_of(x, micro_batches)
        batches = [part.of((x, y, sample_weight)) for part in parts]
        forward = [self._forward(batch[0]) for batch in batches]
        with visible_reductions(), tf.device(self.records[-1].device):
            counts = [
                [count * tf.cast(part.size > 0, count.dtype) for count in self._counts(batch, passed)]
                for batch, part, passed in zip(batches, parts, forward, strict=True)
            ]
        totals = tf.reduce_sum(counts, 0) if micro_batches > 1 and counts[0] else None
        losses, outputs, gradients = [], [], Sums()
        for batch, part, passed in zip(batches, parts, forward, strict=True):
            loss, y_pred = self._backward(batch, part, totals, passed, gradients)
            losses.append(loss)
            outputs.append(keras.tree.map_structure(lambda tensor, size=part.size: tensor[:size], y_pred))
        with tf.device(self.records[-1].device):
            y_pred = keras.tree.map_structure(lambda *tensors: tf.concat(tensors, 0), *outputs)
            loss = tf.add_n(losses)
        return loss, y_pred, [gradients.get(id(variable)) for variable in self.model.trainable_variables]

    def _forward(self, x: Any) -> tuple[Values, list[Pass]]:
        """Returns all values of a micro-batch, and what its backward pass needs."""
        values = self._inputs(x)
        passes = []
        for record, call in zip(self.records, self._calls, strict=True):
            with tf.device(record.device):
                done = call.run_recorded(values)
            values.update(done.gives)
            passes.append(done)
        return values, passes

    def _counts(self, batch: tuple[Any, Any, Any], passed: tuple[Values, list[Pass]]) -> list[Any]:
        x, y, sample_weight = batch
        y_pred = self._packed([passed[0][id(tensor)] for tensor in self._graph.outputs])
        return counts_of(
            lambda: loss_of(self.model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True),
            self.model,
        )

    def _backward(
        self,
        batch: tuple[Any, Any, Any],
        part: MicroBatch,
        totals: Any,
        passed: tuple[Values, list[Pass]],
        sums: Sums,
    ) -> tuple[tf.Tensor, Any]:
        x, y, sample_weight = batch
        values, passes = passed
        for call, done in zip(self._calls, passes, strict=True):
            call.set_added_losses(done.added_losses)  # a later micro-batch has replaced them
        gradients = Sums()
        with tf.device(self.records[-1].device):
            copies = [entering(values[id(tensor)]) for tensor in self._graph.outputs]
            added = [loss for done in passes for loss in done.added_losses]
            regularized = [variable for variable in self.model.trainable_variables if variable.regularizer is not None]
            sources = [*copies, *added, *regularized]
            with tf.GradientTape() as tape:
                tape.watch([tensor for tensor in [*copies, *added] if differentiable(tensor)])
                loss = compute_loss(
                    self.model,
                    x=x,
                    y=y,
                    y_pred=self._packed(copies),
                    sample_weight=sample_weight,
                    training=True,
                    examples=part.size,
                    part=Part(part.share, totals),
                )
                loss *= tf.cast(part.share, loss.dtype)
                scaled = self.model.optimizer.scale_loss(loss)
            keys = [*map(id, self._graph.outputs), *map(id, added), *map(id, regularized)]
            gradients.add(keys, tape.gradient(scaled, sources))

        for record, call, done in reversed(list(zip(self.records, self._calls, passes, strict=True))):
            with tf.device(record.device):
                done.backward(gradients)
                own = [id(variable) for variable in call.trainable_variables]
                sums.add(own, [gradients.get(key) for key in own])
        return loss, self._packed(copies)

    def _inputs(self, x: Any) -> Values:
        return dict(zip(map(id, self._graph.inputs), standardize_inputs(self._graph, x), strict=True))

    def _packed(self, outputs: list[Any]) -> Any:
        packed = keras.tree.pack_sequence_as(self._graph.output, outputs)
        return packed[0] if isinstance(packed, list | tuple) and len(packed) == 1 else packed


def _devices(devices: Sequence[str]) -> list[str]:
    """Returns the devices as TensorFlow writes them. It checks that they exist, which TensorFlow itself does not."""
    known = [device.name.removeprefix("/device:") for device in tf.config.list_logical_devices()]
    if isinstance(devices, str) or not devices:
        raise ConfigError(f"pipeline_devices must be a list of devices. Received: pipeline_devices={devices!r}.")
    names = [str(device).upper().split("/")[-1].removeprefix("DEVICE:") for device in devices]
    for given, name in zip(devices, names, strict=True):
        if name not in known:
            raise unknown_name("device in pipeline_devices", str(given), known)
    return names
