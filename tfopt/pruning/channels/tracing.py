"""Walks through a model from its inputs to its outputs, and lets a rule note each call.

Nested models are walked through as well. A layer or operation without a rule keeps all channels that enter or leave it.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfopt.compat.layers import calls_in_order, operation_name
from tfopt.models.plain_models import as_functional, inputs_in_order, is_plain
from tfopt.pruning.channels.attention import ATTENTION
from tfopt.pruning.channels.call import Call, Tensor, Trace
from tfopt.pruning.channels.elements import Axis, Fixed
from tfopt.pruning.channels.elementwise import ELEMENTWISE, OPERATIONS
from tfopt.pruning.channels.normalizations import NORMALIZATIONS
from tfopt.pruning.channels.products import PRODUCTS
from tfopt.pruning.channels.recurrent import RECURRENT
from tfopt.pruning.channels.shapes import SHAPE_OPERATIONS, SHAPES

# A rule is chosen by the exact class: a subclass may compute something else.
LAYER_RULES = {**PRODUCTS, **NORMALIZATIONS, **ELEMENTWISE, **SHAPES, **ATTENTION, **RECURRENT}
OPERATION_RULES = {**OPERATIONS, **SHAPE_OPERATIONS}


def trace_model(model: keras.Model, widths: bool = False) -> Trace:
    """Returns how the channels of a model depend on each other.

    Args:
        model: A built functional or Sequential model.
        widths: Whether axes over which a layer computes statistics may lose channels.
    """
    trace = Trace(widths=widths, rules=LAYER_RULES)
    walk = _Walk(trace)
    graph = as_functional(model)
    for tensor in graph.inputs:
        walk.tensors[id(tensor)] = _fixed(tensor, f"it is the model's input {tensor.name!r}")
    walk.run(graph, "")
    for name, tensor in zip(graph.output_names, graph.outputs, strict=True):
        for axis in walk.tensors[id(tensor)].axes:
            trace.elements.join(axis, Fixed(f"it is the model's output {name!r}"))
    trace.tensors = walk.tensors
    return trace


class _Walk:
    """The tensors of all graphs that were walked through, by the id of the symbolic tensor."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.tensors: dict[int, Tensor] = {}
        self._graphs: dict[int, Any] = {}  # the graph of each nested model

    def run(self, graph: Any, path: str) -> None:
        """Notes the calls of a graph whose inputs are known."""
        for node in calls_in_order(graph):
            arguments = keras.tree.map_structure(self._known, (node.arguments.args, node.arguments.kwargs))
            operation = node.operation
            name = f"{path}/{operation.name}" if path else operation.name
            call = Call(self.trace, operation, name, arguments, [tuple(out.shape) for out in node.outputs])
            axes = self._nested(call) if is_plain(operation) else self._call(call)
            for out, each in zip(node.outputs, axes, strict=True):
                self.tensors[id(out)] = Tensor(tuple(out.shape), each)

    def _known(self, argument: Any) -> Any:
        return self.tensors[id(argument)] if isinstance(argument, keras.KerasTensor) else argument

    def _call(self, call: Call) -> list[tuple[Axis, ...]]:
        operation = call.operation
        if isinstance(operation, keras.Layer):
            rule = LAYER_RULES.get(type(operation))
            if rule is not None and _is_quantized(operation):
                return call.fix_all("is quantized or has a LoRA part")
        else:
            rule = OPERATION_RULES.get(operation_name(operation) or "")
        if rule is None or not call.tensors:
            return call.fix_all("is an operation that tfopt does not follow")
        axes = [tuple(each) for each in rule(call)]
        for each, shape in zip(axes, call.shapes, strict=True):
            sizes = [
                axis.size if isinstance(axis, np.ndarray) else size for axis, size in zip(each, shape, strict=True)
            ]
            assert tuple(sizes) == shape, (str(call), sizes, shape)
        return axes

    def _nested(self, call: Call) -> list[tuple[Axis, ...]]:
        """A nested model that is called again has the same channels in each call."""
        model = call.operation
        first = id(model) not in self._graphs
        graph = self._graphs.setdefault(id(model), as_functional(model))
        inputs = inputs_in_order(graph, call.arguments[0][0])
        for tensor, x in zip(graph.inputs, keras.tree.flatten(inputs), strict=True):
            if first:
                axes = [self._like(axis, size) for axis, size in zip(x.axes, tensor.shape, strict=True)]
                self.tensors[id(tensor)] = Tensor(tuple(tensor.shape), tuple(axes))
            for one, other in zip(self.tensors[id(tensor)].axes, x.axes, strict=True):
                self.trace.elements.join(one, other)
        if first:
            self.run(graph, call.path)
        return [self.tensors[id(tensor)].axes for tensor in graph.outputs]

    def _like(self, axis: Axis, size: int | None) -> Axis:
        return axis if isinstance(axis, Fixed) or size is None else self.trace.elements.new(size)


def _fixed(tensor: Any, reason: str) -> Tensor:
    return Tensor(tuple(tensor.shape), (Fixed(reason),) * len(tensor.shape))


def _is_quantized(layer: Any) -> bool:
    """Returns whether a layer's weights are not what its class says: they are quantized or have a LoRA part."""
    return layer.dtype_policy.quantization_mode is not None or getattr(layer, "lora_enabled", False)
