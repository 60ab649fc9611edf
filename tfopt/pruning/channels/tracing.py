"""Walks through a model from its inputs to its outputs, and lets a rule note each call.

Nested models are walked through as well. A layer or operation without a rule keeps all channels that enter or leave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfopt.compat.layers import calls_in_order, operation_name
from tfopt.models.copying import as_functional, inputs_in_order, is_plain
from tfopt.pruning.channels.call import Axis, Fixed, LayerCall, Tensor, Trace
from tfopt.pruning.channels.elementwise import ELEMENTWISE, OPERATIONS
from tfopt.pruning.channels.products import NORMALIZATIONS, PRODUCTS
from tfopt.pruning.channels.sequences import SEQUENCES
from tfopt.pruning.channels.shapes import SHAPE_OPERATIONS, SHAPES

# A rule is chosen by the exact class: a subclass may compute something else.
LAYER_RULES = {**PRODUCTS, **NORMALIZATIONS, **ELEMENTWISE, **SHAPES, **SEQUENCES}
OPERATION_RULES = {**OPERATIONS, **SHAPE_OPERATIONS}


def trace_model(model: keras.Model, widths: bool = False, open_size: int | None = None) -> Trace:
    """Returns how the channels of a model depend on each other. The arguments are those of `ChannelGroups`."""
    trace = Trace(widths=widths, rules=LAYER_RULES)
    walk = _Walk(trace, open_size or 1)
    graph = as_functional(model)
    for tensor in graph.inputs:
        axes = (Fixed(f"it is the model's input {tensor.name!r}"),) * len(tensor.shape)
        walk.tensors[id(tensor)] = Tensor(tuple(tensor.shape), axes, walk.filled(tensor.shape))
    walk.run(graph, "")
    for name, tensor in zip(graph.output_names, graph.outputs, strict=True):
        for axis in walk.tensors[id(tensor)].axes:
            trace.elements.join(axis, Fixed(f"it is the model's output {name!r}"))
    return trace


class _Walk:
    def __init__(self, trace: Trace, open_size: int) -> None:
        self.trace = trace
        self._open_size = open_size
        self.tensors = trace.tensors
        self._graphs: dict[int, Any] = {}  # the graph of each nested model

    def run(self, graph: Any, path: str) -> None:
        """Notes the calls of a graph whose inputs are known."""
        for node in calls_in_order(graph):
            given = (node.arguments.args, node.arguments.kwargs)
            arguments = keras.tree.map_structure(self._known, given)
            operation = node.operation
            name = f"{path}/{operation.name}" if path else operation.name
            shapes = [tuple(out.shape) for out in node.outputs]
            if is_plain(operation):
                outputs = self._nested(LayerCall(self.trace, operation, name, arguments, shapes, []))
            else:
                sizes = self._sizes(operation, given, shapes)
                axes = self._call(LayerCall(self.trace, operation, name, arguments, shapes, sizes))
                outputs = [Tensor(*each) for each in zip(shapes, axes, sizes, strict=True)]
            self.tensors |= {id(out): each for out, each in zip(node.outputs, outputs, strict=True)}

    def filled(self, shape: Sequence[int | None]) -> tuple[int, ...]:
        """Returns a shape of one example, if the batch is open, without open sizes."""
        first, *others = [*shape] or [1]
        return (first or 1, *(self._open_size if size is None else size for size in others))[: len(shape)]

    def _sizes(self, operation: Any, given: Any, shapes: Sequence[tuple[int | None, ...]]) -> list[tuple[int, ...]]:
        """Returns the shapes of the outputs for inputs without open sizes. A stride or a sum makes them smaller."""
        if not any(None in shape for shape in shapes):
            return [self.filled(shape) for shape in shapes]
        args, named = keras.tree.map_structure(self._without_open_sizes, given)
        try:
            found = keras.tree.flatten(operation.compute_output_spec(*args, **named))
        except Exception:  # noqa: BLE001 - a layer of the user's own; count_flops says what it cannot take
            return [self.filled(shape) for shape in shapes]
        return [self.filled(each.shape) for each in found]

    def _known(self, argument: Any) -> Any:
        return self.tensors[id(argument)] if isinstance(argument, keras.KerasTensor) else argument

    def _without_open_sizes(self, argument: Any) -> Any:
        if not isinstance(argument, keras.KerasTensor):
            return argument
        return keras.KerasTensor(self.tensors[id(argument)].sizes, argument.dtype)

    def _call(self, call: LayerCall) -> list[tuple[Axis, ...]]:
        operation = call.operation
        if isinstance(operation, keras.Layer):
            rule = LAYER_RULES.get(type(operation))
            quantized = operation.dtype_policy.quantization_mode or getattr(operation, "lora_enabled", False)
            if rule is not None and quantized:  # its weights are not what its class says
                return call.fix_all("is quantized or has a LoRA part")
        else:
            rule = OPERATION_RULES.get(operation_name(operation) or "")
        if rule is None or not call.tensors:
            return call.fix_all("is an operation that tfopt does not follow")
        axes = [tuple(each) for each in rule(call)]
        for each, shape in zip(axes, call.shapes, strict=True):
            sizes = [size if isinstance(axis, Fixed) else axis.size for axis, size in zip(each, shape, strict=True)]
            assert tuple(sizes) == shape, (str(call), sizes, shape)
        return axes

    def _nested(self, call: LayerCall) -> list[Tensor]:
        """A nested model that is called again has the same channels in each call, and computes once more."""
        model = call.operation
        first = id(model) not in self._graphs
        graph = self._graphs.setdefault(id(model), as_functional(model))
        inputs = inputs_in_order(graph, call.arguments[0][0])
        for tensor, x in zip(graph.inputs, keras.tree.flatten(inputs), strict=True):
            if first:
                new = self.trace.elements.new
                axes = tuple(
                    axis if isinstance(axis, Fixed) or size is None else new(size)
                    for axis, size in zip(x.axes, tensor.shape, strict=True)
                )
            else:
                axes = self.tensors[id(tensor)].axes
            for one, other in zip(axes, x.axes, strict=True):
                self.trace.elements.join(one, other)
            self.tensors[id(tensor)] = Tensor(tuple(tensor.shape), axes, x.sizes)
        self.run(graph, call.path)
        return [self.tensors[id(tensor)] for tensor in graph.outputs]
