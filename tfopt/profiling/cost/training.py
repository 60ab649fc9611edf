"""The cost of one training step of a compiled model: operations and bytes, counted in its graph.

The step is forward, gradient and update of the optimizer, with the loss, the losses of layers and the metrics. A matrix
product or a convolution of the forward pass has two in the gradient: one for its weights, one for its inputs. The
gradient for the inputs of the model is not computed. So a step has three times the multiply-adds of the forward pass,
less those of the first layer. Layers that are frozen have no gradient for their weights. The update of the optimizer
has no matrix products, only bytes. A layer whose results are computed again in the gradient (`remat`) counts twice in
the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.tensorflow import custom_gradients_forgotten
from tfopt.compat.trainer import built_under, symbolic_build
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.profiling.cost.bytes import kernels, moved_bytes
from tfopt.profiling.cost.flops import count_graph
from tfopt.report import Record
from tfopt.report.formatting import short_bytes, short_count
from tfopt.report.sheet import Sheet, Shown, Table, pairs


@dataclass(frozen=True, kw_only=True)
class TrainCost(Record, Shown):
    """The operations and the bytes of one training step, over all replicas.

    Attributes:
        examples: Number of examples.
        multiply_adds: Multiply-adds of matrix products and convolutions, forward and gradient.
        unfused_bytes: Bytes that are moved if every operation is a kernel of its own.
        fused_bytes: Bytes that are moved if chains of elementwise operations are one kernel, as under XLA.
        unfused_kernels: Number of kernels that are started if every operation is one.
        fused_kernels: Number of kernels that are started under XLA.
        jit_compile: Whether the model is compiled with XLA.
        uncounted: What could not be counted, with the reason.
    """

    examples: int
    multiply_adds: int
    unfused_bytes: int
    fused_bytes: int
    unfused_kernels: int
    fused_kernels: int
    jit_compile: bool
    uncounted: Sequence[str] = ()

    @property
    def flops(self) -> int:
        """Floating-point operations: a multiplication with its addition counts as 2."""
        return 2 * self.multiply_adds

    @property
    def moved_bytes(self) -> int:
        """The bytes as the model is compiled: fused with XLA, otherwise unfused."""
        return self.fused_bytes if self.jit_compile else self.unfused_bytes

    def _sheet(self) -> Sheet:
        rows = {
            "unfused": f"{short_bytes(self.unfused_bytes)} moved by {self.unfused_kernels:,} kernels",
            "fused": f"{short_bytes(self.fused_bytes)} moved by {self.fused_kernels:,} kernels",
        }
        return Sheet(
            title=f"a training step of {self.examples} examples: {short_count(self.flops)} floating-point operations",
            tables=[pairs(rows), Table(rows=[("not counted", reason) for reason in self.uncounted])],
        )


def train_cost(model: keras.Model, batch: Any) -> TrainCost:
    """Counts the operations and the bytes of one training step of a compiled model.

    The step is traced, not run. It is the `train_step` of the model, also after `tfopt.compile`, whose step computes
    the same. Keras' variables of metrics and optimizer are made if `fit` has not made them before.

    Args:
        model: A model that Keras or tfopt has compiled.
        batch: A batch as `fit` trains on it, of arrays or `tf.TensorSpec`: (x, y) or (x, y, sample_weight).
    Raises:
        UnsupportedModelError: The model is not compiled.
        ConfigError: The batch has no known number of examples.
    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(2)])
        >>> model.compile("sgd", "mse")
        >>> train_cost(model, (np.zeros((16, 8)), np.zeros((16, 2)))).multiply_adds == 16 * (2 * 8 * 4 + 3 * 4 * 2)
        True
    """
    graph, examples = train_graph(model, batch)
    count = count_graph(graph)
    unfused, fused = kernels(graph, fused=False), kernels(graph, fused=True)
    return TrainCost(
        examples=examples,
        multiply_adds=count.multiply_adds,
        unfused_bytes=moved_bytes(unfused),
        fused_bytes=moved_bytes(fused),
        unfused_kernels=sum(kernel.executions for kernel in unfused),
        fused_kernels=sum(kernel.executions for kernel in fused),
        jit_compile=bool(model.jit_compile),
        uncounted=tuple(count.uncounted),
    )


def train_graph(model: keras.Model, batch: Any) -> tuple[Any, int]:
    """Returns the graph of a training step, and its number of examples. Under a strategy, it holds every replica."""
    if not model.compiled:
        raise UnsupportedModelError(
            f"The model must be compiled. Received: {model.name!r}, which is not. Call model.compile or tfopt.compile."
        )
    is_alone = not isinstance(batch, tuple | list)  # then a step gets the examples as they are
    specs = tuple(keras.tree.map_structure(_spec, (batch,) if is_alone else batch))
    examples = int(keras.tree.flatten(specs)[0].shape[0])
    strategy = built_under(model)
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    part = keras.tree.map_structure(
        lambda spec: tf.TensorSpec([max(1, spec.shape[0] // replicas), *spec.shape[1:]], spec.dtype), specs
    )
    with model.distribute_strategy.scope():
        if type(model).call is not keras.Model.call:  # without one, the layers are built by themselves
            symbolic_build(model, part)
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    @custom_gradients_forgotten()
    def step(*data: Any) -> Any:
        taken = data[0] if is_alone else data
        return model.train_step(taken) if strategy is None else strategy.run(model.train_step, (taken,))

    return tf.function(step, autograph=False).get_concrete_function(*part).graph, examples  # as Keras traces it


def _spec(value: Any) -> Any:
    """Returns the spec of an array. `fit` makes arrays in float64 float32."""
    if value is None:
        return None
    spec = value
    if not isinstance(value, tf.TensorSpec):
        array = value if tf.is_tensor(value) else np.asarray(value)
        dtype = keras.config.floatx() if array.dtype == "float64" and isinstance(array, np.ndarray) else array.dtype
        spec = tf.TensorSpec(array.shape, dtype)
    if spec.shape.rank in (None, 0) or not spec.shape.is_fully_defined():
        raise ConfigError(
            f"batch must have known shapes. Received: batch with {spec}. Pass the arrays of one batch, such as (x, y)."
        )
    return spec
