"""Estimates the memory of a training step from its graph, before a GPU runs it.

The peak is the largest sum of the tensors that exist at the same time. The operations run in the order of the trace. A
tensor exists from the operation that writes it to the last one that reads it. Some operations write no new memory:
those that only pass a tensor on share its memory, and elementwise operations write over an input that nothing else
reads.

Not in the sum: the inputs of the graph, its constants and variables, the work space of kernels, and tensors of unknown
size. Operations that run at the same time on several threads may need more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.tensorflow import custom_gradients_forgotten
from tfopt.errors import ConfigError, UnsupportedModelError, unknown_name
from tfopt.models.structure import output_layers
from tfopt.models.unbuilt_copy import unbuilt_copy
from tfopt.profiling.cost.trace import checks_open_size, input_specs
from tfopt.profiling.cost.walk import LOOPS, Scope, inner, needed_operations
from tfopt.report import Record
from tfopt.report.formatting import short_bytes
from tfopt.report.sheet import Sheet, Shown, Table

PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
SHARES_INPUT = frozenset({
    "Identity", "IdentityN", "ReadVariableOp", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient",
    "EnsureShape", "CheckNumerics",
})  # fmt: skip
WRITES_NOTHING = frozenset({"Const", "Placeholder", "NoOp", "VarHandleOp", "Shape", "ShapeN"})
OVERWRITES_INPUT = frozenset({
    "Add", "AddV2", "AddN", "BiasAdd", "Cast", "Elu", "EluGrad", "Erf", "Exp", "GreaterEqual", "LeakyRelu", "Log",
    "Log1p", "LogSoftmax", "Maximum", "Minimum", "Mul", "MulNoNan", "Neg", "Pow", "RealDiv", "Reciprocal", "Relu",
    "Relu6", "Relu6Grad", "ReluGrad", "Rsqrt", "RsqrtGrad", "Select", "SelectV2", "Selu", "SeluGrad", "Sigmoid",
    "SigmoidGrad", "Softmax", "Softplus", "SoftplusGrad", "Sqrt", "SqrtGrad", "Square", "SquaredDifference", "Sub",
    "Tanh", "TanhGrad", "Xdivy",
})  # fmt: skip


@dataclass(frozen=True, order=True)
class Peak:
    """The tensors at the moment of the largest sum."""

    total_bytes: int = 0  # the sum
    marked_bytes: int = 0  # the part of it in marked tensors

    def plus(self, buffer: Buffer, sign: int) -> Peak:
        """Returns the sums after a buffer was taken (1) or freed (-1)."""
        change = sign * buffer.size
        return Peak(self.total_bytes + change, self.marked_bytes + change * buffer.marked)


@dataclass
class Buffer:
    """A piece of memory, which one or more tensors share. Inputs, constants and variables have the size 0 here."""

    size: int = 0
    marked: bool = False
    readers: int = 0
    is_free: bool = False


def peak_memory(graph: Any, marked: Iterable[Any] = ()) -> Peak:
    """Returns the largest sum of the tensors of a graph that exist at the same time, and the part of marked ones in it.

    Example:
        >>> import tensorflow as tf
        >>> product = tf.function(lambda x: tf.nn.relu(x @ x)).get_concrete_function(tf.TensorSpec((100, 100)))
        >>> peak_memory(product.graph).total_bytes
        40000
    """
    return _peak(Scope(graph), frozenset(id(tensor) for tensor in marked))


def _peak(scope: Scope, marked: frozenset[int] = frozenset()) -> Peak:
    operations = needed_operations(scope.graph)
    # The readers of a tensor: operations, and the caller that gets it as an output and keeps it.
    readers = Counter(id(tensor) for operation in operations for tensor in operation.inputs)
    readers.update(id(tensor) for tensor in scope.graph.outputs)
    buffers: dict[int, Buffer] = {}
    live, peak = Peak(), Peak()
    for operation in operations:
        inputs = [buffers[id(tensor)] for tensor in operation.inputs]
        for place, tensor in enumerate(operation.outputs):
            shares = operation.type in SHARES_INPUT
            buffer = inputs[place] if shares else _overwritten(operation, tensor, inputs)
            if buffer is None:
                buffer = Buffer(_size(operation, tensor, scope))
                live = live.plus(buffer, 1)
            if id(tensor) in marked and not buffer.marked:
                live = live.plus(buffer, -1)
                buffer.marked = True
                live = live.plus(buffer, 1)
            buffer.readers += readers[id(tensor)]
            buffers[id(tensor)] = buffer
        inside = max((_peak(graph) for graph in inner(operation, scope)[0]), default=Peak())
        peak = max(peak, Peak(live.total_bytes + inside.total_bytes, live.marked_bytes + inside.marked_bytes))
        for buffer in inputs:
            buffer.readers -= 1
        for buffer in (*inputs, *(buffers[id(tensor)] for tensor in operation.outputs)):
            if buffer.readers == 0 and not buffer.is_free:
                live = live.plus(buffer, -1)
                buffer.is_free = True
    return peak


def _overwritten(operation: Any, tensor: Any, inputs: Sequence[Buffer]) -> Buffer | None:
    """Returns the memory of an input that this operation alone still reads, and that has the size of the output."""
    if operation.type not in OVERWRITES_INPUT:
        return None
    size = tensor_bytes(tensor)
    fitting = (buffer for buffer in inputs if buffer.size == size and buffer.readers == 1)
    return next(fitting, None) if size else None


def _size(operation: Any, tensor: Any, scope: Scope) -> int:
    if operation.type in WRITES_NOTHING:
        return 0
    if tensor.dtype == tf.variant:
        return _list_bytes(operation, tensor, scope)
    return tensor_bytes(tensor)


def tensor_bytes(tensor: Any) -> int:
    """Returns the size of a tensor; 0 for a tensor of unknown size, for a variable and for a list of tensors."""
    known = tensor.shape.is_fully_defined() and tensor.dtype not in (tf.resource, tf.variant, tf.string)
    return math.prod(tensor.shape) * tensor.dtype.size if known else 0


def _list_bytes(operation: Any, tensor: Any, scope: Scope) -> int:
    """Returns the size of a list of tensors: that of the tensor it is made from, or what a loop adds to it."""
    if operation.type == "TensorListFromTensor":
        return tensor_bytes(operation.inputs[0])
    if operation.type not in LOOPS:
        return 0
    (body,), rounds = inner(operation, scope)
    result = body.graph.outputs[tensor.value_index].op
    while result.type == "Identity":
        result = result.inputs[0].op
    if result.type not in ("TensorListPushBack", "TensorListSetItem"):
        return 0
    added = result.inputs[-1]
    return 0 if _is_variable(added) else (rounds or 1) * tensor_bytes(added)


def _is_variable(tensor: Any) -> bool:
    """Returns whether a tensor shares the memory of a variable: a loop keeps the weights for its gradient."""
    operation = tensor.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    return bool(operation.type == "ReadVariableOp")


@dataclass(frozen=True, kw_only=True)
class TrainingMemory(Record, Shown):
    """The memory of a training step in bytes, by what it holds.

    Attributes:
        batch_size: Number of examples.
        precision: Name of the dtype policy.
        optimizer: Name of the optimizer.
        weights_bytes: The weights, also those that are not trained.
        optimizer_bytes: The variables of the optimizer.
        input_bytes: One batch of inputs.
        gradient_bytes: The gradients that exist at the peak of the step.
        activation_bytes: The other tensors that exist at the peak: results of layers that the gradient needs, and
            intermediate results.
    """

    batch_size: int
    precision: str
    optimizer: str
    weights_bytes: int
    optimizer_bytes: int
    input_bytes: int
    gradient_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.parts().values())

    @property
    def headline(self) -> str:
        """The sum, and what it is for."""
        head = f"{short_bytes(self.total_bytes)} for a batch of {self.batch_size} with {self.optimizer}"
        return f"{head} in {self.precision}"

    def parts(self) -> dict[str, int]:
        return {
            "weights": self.weights_bytes,
            "optimizer": self.optimizer_bytes,
            "inputs": self.input_bytes,
            "gradients": self.gradient_bytes,
            "activations": self.activation_bytes,
        }

    def _sheet(self) -> Sheet:
        rows = [(part, short_bytes(size)) for part, size in self.parts().items()]
        return Sheet(title=self.headline, tables=[Table(rows=rows, figures={1})])


def training_memory(
    model: keras.Model,
    batch_size: int,
    precision: str | None = None,
    optimizer: str | keras.optimizers.Optimizer = "adam",
    *,
    open_size: int | None = None,
    inputs: Any = None,
) -> TrainingMemory:
    """Estimates the memory of a training step on one device.

    The step is traced, not run. A walk over its graph finds the largest sum of tensors that exist at the same time. Not
    included: the work space of kernels, TensorFlow itself (on a GPU with its context several hundred megabytes), and
    batches that are prepared in advance. The step is that of Keras without XLA, with the cross-entropy of the outputs
    as loss. The docs give the error against measured peaks.

    Args:
        model: A built Keras model. It is not changed.
        batch_size: Number of examples on the device in one step.
        precision: Name of the dtype policy; None keeps the policies of the layers. Another policy needs a functional or
            Sequential model.
        optimizer: Name of a Keras optimizer, or an optimizer, which is not changed.
        open_size: Size of the open dimensions besides the batch, such as the length of a sequence.
        inputs: An array or `tf.TensorSpec` for each input, for a subclassed model of several inputs.
    Raises:
        ConfigError: A setting is wrong.
        UnsupportedModelError: The model is not built, or its layers cannot have another precision.
    Example:
        >>> model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(100)])
        >>> memory = training_memory(model, batch_size=32)
        >>> memory.weights_bytes, memory.optimizer_bytes >= 2 * memory.weights_bytes
        (314000, True)
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1. Received: batch_size={batch_size}. Pass for example 64.")
    policy = precision or model.dtype_policy.name
    if policy != model.dtype_policy.name:
        model = _with_precision(model, policy)
    specs = input_specs(model, batch_size, open_size, inputs)
    own = unbuilt_copy(keras.optimizers.get(optimizer))
    name = type(own).__name__.lower()
    if policy == "mixed_float16" and not isinstance(own, keras.optimizers.LossScaleOptimizer):
        own = keras.optimizers.LossScaleOptimizer(own)  # as keras.Model.compile does
    own.build(model.trainable_variables)
    with checks_open_size(open_size):
        graph, gradients = _step_graph(model, own, specs)
    peak = peak_memory(graph, gradients)
    return TrainingMemory(
        batch_size=batch_size,
        precision=policy,
        optimizer=name,
        weights_bytes=_sum_bytes(model.variables),
        optimizer_bytes=_sum_bytes(own.variables),
        input_bytes=_sum_bytes(keras.tree.flatten(specs)),
        gradient_bytes=peak.marked_bytes,
        activation_bytes=peak.total_bytes - peak.marked_bytes,
    )


def step_bytes(graph: Any, model: keras.Model, specs: Any) -> int:
    """Returns the estimated memory of a traced training step: variables, a batch, and the tensors at the peak.

    Args:
        graph: The graph of the step, as `train_graph` returns it.
        model: The compiled model.
        specs: The specs of a batch.
    """
    variables = [*model.variables, *(() if model.optimizer is None else model.optimizer.variables)]
    given = [each for each in keras.tree.flatten(specs) if each is not None]
    return _sum_bytes(variables) + _sum_bytes(given) + peak_memory(graph).total_bytes


def _step_graph(model: keras.Model, optimizer: keras.optimizers.Optimizer, specs: Any) -> tuple[Any, list[Any]]:
    """Returns the graph of a training step, and the gradients in it."""
    found: list[Any] = []

    def step(inputs: Any) -> Any:
        with custom_gradients_forgotten():
            with tf.GradientTape() as tape:
                outputs = keras.tree.flatten(model(inputs, training=True))
                loss = tf.add_n(
                    [_loss(output) for output in outputs] + [tf.cast(each, tf.float32) for each in model.losses]
                )
                scaled = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, [variable.value for variable in model.trainable_variables])
            pairs = [
                (gradient, variable)
                for gradient, variable in zip(gradients, model.trainable_variables, strict=True)
                if gradient is not None
            ]
            found.extend(tf.convert_to_tensor(gradient) for gradient, _ in pairs)
            optimizer.apply_gradients(pairs)
            return loss

    return tf.function(step).get_concrete_function(specs).graph, found


def _loss(output: Any) -> Any:
    """Returns the cross-entropy of logits, or the mean squared error of single values, for targets of zero."""
    output = tf.cast(output, tf.float32)
    if output.shape.rank < 2 or output.shape[-1] == 1:
        return tf.reduce_mean(output**2)
    targets = tf.zeros(tf.shape(output)[:-1], tf.int32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, output))


def _sum_bytes(tensors: Sequence[Any]) -> int:
    return sum(int(tf.TensorShape(each.shape).num_elements()) * tf.as_dtype(each.dtype).size for each in tensors)


def _with_precision(model: keras.Model, precision: str) -> keras.Model:
    """Returns a copy of a model whose layers have another dtype policy. The output layers keep float32."""
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    outputs = {layer.name for layer in output_layers(model)}

    def changed(layer: keras.Layer) -> keras.Layer:
        config = layer.get_config()
        if layer.name not in outputs:
            config["dtype"] = precision
        return type(layer).from_config(config)

    try:
        copy = keras.models.clone_model(model, clone_function=changed)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"precision needs a model that can be built again from its configuration. Received: {model.name!r} "
            f"({error}). Build it with the policy {precision!r} and leave precision out."
        ) from error
    return copy
