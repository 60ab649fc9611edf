"""The loops of ONNX: how many rounds they have, and the shapes of what they carry from round to round.

onnx infers no shapes of carried tensors, since a round may change them. Those that no round changes are set here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper, shape_inference

from tfopt.exporting.inspection.contents import rounds_between

ENDLESS = 2**31 - 1  # a loop of more rounds is one whose condition ends it
SAME_VALUE = ("Identity", "Cast")
Constants = Mapping[str, Any]  # tensors by name
Shape = tuple[int, ...]


def constants_of(graph: Any) -> dict[str, Any]:
    """Returns the constants of a graph, without those of the graphs around it."""
    found = {each.name: each for each in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            found.update((node.output[0], each.t) for each in node.attribute if each.name == "value")
    return found


def bodies_of(node: Any) -> list[Any]:
    """Returns the graphs that a loop or a branch runs."""
    return [body for each in node.attribute for body in ([each.g] if each.HasField("g") else each.graphs)]


def rounds_of(node: Any, graph: Any, constants: Constants) -> int | None:
    """Returns the rounds of a Loop by its limit, and by each counter that its condition compares with a known number.

    Args:
        node: The Loop.
        graph: The graph that it is in.
        constants: The constants of this graph and of those around it.
    Returns: None if only the run knows the rounds.
    """
    (body,) = bodies_of(node)
    limit = _number(node.input[0], constants)
    found = [int(limit)] if limit is not None and 0 <= limit < ENDLESS else []
    begins = _begins(node, graph, constants)
    if begins is False:
        return 0
    if begins:
        known = {**constants, **constants_of(body)}
        within = [_to_limit(each, node, body, constants, known) for each in _terms(body.output[0].name, body)]
        found += [rounds for rounds in within if rounds is not None]
    return min(found, default=None)


def with_carried_shapes(model: Any, infer: Callable[[Any], Any]) -> Any:
    """Returns a model with inferred shapes, also of what its loops carry, unless a round changes them."""
    changing: set[str] = set()
    while True:
        found, done = infer(model), set[str]()
        try:
            while (new := _carry(found.graph, {}, {}, changing)) - done:
                found, done = infer(found), done | new
        except shape_inference.InferenceError:  # what is set here contradicts something in the file
            return infer(model)
        changed = _changed(found.graph) - changing
        if not changed:
            return found
        changing |= changed


def _changed(graph: Any) -> set[str]:
    """Returns the inputs of the bodies of loops whose shapes are others after a round."""
    found = set()
    for node in graph.node:
        for body in bodies_of(node):
            found |= _changed(body)
            if node.op_type == "Loop":
                carried = [(each.name, _shape(each)) for each in body.input[2:]]
                after = [_shape(each) for each in body.output[1:]]
                found |= {
                    name
                    for (name, before), shape in zip(carried, after, strict=False)
                    if None not in (before, shape) and before != shape
                }
    return found


def _carry(graph: Any, around: Mapping[str, Shape], constants_around: Constants, changing: set[str]) -> set[str]:
    """Sets shapes that a graph's loops begin and end with. Returns the tensors whose shapes were not known before."""
    constants = {**constants_around, **constants_of(graph)}
    values = {each.name: each for each in (*graph.value_info, *graph.output, *graph.input)}
    shapes = {**around, **{name: tuple(each.dims) for name, each in constants_of(graph).items()}}
    shapes |= {name: shape for name, each in values.items() if (shape := _shape(each)) is not None}
    changed = set()
    for node in graph.node:
        for body in bodies_of(node):
            if node.op_type == "Loop":
                for value, given in zip(body.input[2:], node.input[2:], strict=False):
                    if given in shapes and _shape(value) is None and value.name not in changing:
                        changed |= _set(value, shapes[given])
            changed |= _carry(body, shapes, constants, changing)
        if node.op_type != "Loop":
            continue
        (body,) = bodies_of(node)
        for name, value in zip(node.output, _after(node, body, rounds_of(node, graph, constants)), strict=False):
            if name and name not in shapes and value is not None:
                shapes[name] = value[1]
                if name not in values:
                    values[name] = graph.value_info.add(name=name)
                    values[name].type.tensor_type.elem_type = value[0]
                changed |= _set(values[name], value[1])
    return changed


def _after(node: Any, body: Any, rounds: int | None) -> Iterator[tuple[int, Shape] | None]:
    """Yields the type and the shape of each output of a loop; None where they are unknown."""
    carried = body.input[2:]
    for place, value in enumerate(body.output[1:]):
        shape, dtype = _shape(value), value.type.tensor_type.elem_type
        if place < len(carried):
            yield (dtype, shape) if shape is not None and shape == _shape(carried[place]) else None
        else:
            yield (dtype, (rounds, *shape)) if shape is not None and rounds is not None else None


def _shape(value: Any) -> Shape | None:
    """Returns the sizes of a tensor; None if one is open."""
    tensor = value.type.tensor_type
    sizes = [each.dim_value if each.HasField("dim_value") else None for each in tensor.shape.dim]
    known = tuple(size for size in sizes if size is not None)
    return known if tensor.HasField("shape") and len(known) == len(sizes) else None


def _set(value: Any, shape: Shape) -> set[str]:
    """Sets the shape of a tensor of a known type, unless it has another rank. Returns its name if it was set."""
    tensor = value.type.tensor_type
    if not tensor.elem_type or (tensor.HasField("shape") and len(tensor.shape.dim) != len(shape)):
        return set()
    value.type.CopyFrom(helper.make_tensor_type_proto(tensor.elem_type, shape))
    return {value.name}


def _begins(node: Any, graph: Any, constants: Constants) -> bool | None:
    """Returns whether a loop has a first round; None if that is unknown."""
    condition = node.input[1] if len(node.input) > 1 else ""
    if not condition:
        return True
    found = [_compared(each, graph, constants) for each in _terms(condition, graph)]
    return None if None in found else all(found)


def _compared(tensor: str, graph: Any, constants: Constants) -> bool | None:
    node = _producer(graph, tensor)
    if node is None or node.op_type != "Less":
        value = _number(_origin(graph, tensor), constants)
        return None if value is None else bool(value)
    one, other = (_number(_origin(graph, name), constants) for name in node.input)
    return None if one is None or other is None else one < other


def _terms(tensor: str, graph: Any) -> set[str]:
    """Returns the tensors that must all be true for a condition to be."""
    found, seen, waiting = set(), set(), [tensor]
    while waiting:
        origin = _origin(graph, waiting.pop())
        node = _producer(graph, origin)
        if node is None or node.op_type != "And":
            found.add(origin)
        elif origin not in seen:
            seen.add(origin)
            waiting += node.input
    return found


def _to_limit(tensor: str, node: Any, body: Any, constants: Constants, known: Constants) -> int | None:
    """Returns the rounds after which a counter that a body compares is no longer less than its limit."""
    less = _producer(body, tensor)
    if less is None or less.op_type != "Less":
        return None
    counter, limit = (_origin(body, name) for name in less.input)
    begins = [each.name for each in body.input]
    ends = [_origin(body, each.name) for each in body.output]
    counted = next((place for place in range(2, len(begins)) if counter in (begins[place], ends[place - 1])), None)
    if counted is None:
        return None
    first = _number(node.input[counted], constants)
    step = _step(body, begins[counted], ends[counted - 1], known)
    if limit in begins[2:]:
        place = begins.index(limit)
        last = _number(node.input[place], constants) if ends[place - 1] == limit else None
    else:
        last = _number(limit, known)
    if first is None or last is None or not isinstance(first, int) or not math.isfinite(last):
        return None
    rounds = rounds_between(first, math.ceil(last), step)
    if rounds is None:
        return None
    # A round ends with the comparison, of the counter of the next round or of its own.
    return max(rounds, 1) if counter == ends[counted - 1] else rounds + 1


def _step(body: Any, begin: str, end: str, known: Constants) -> int | None:
    """Returns the integer that each round adds to a counter; None for any other change."""
    node = _producer(body, end)
    if node is None or node.op_type != "Add" or begin not in (reads := [_origin(body, each) for each in node.input]):
        return None
    step = _number(reads[1] if reads[0] == begin else reads[0], known)
    return step if isinstance(step, int) else None


def _number(tensor: str, constants: Constants) -> int | float | None:
    """Returns the number that a tensor always is; None for any other."""
    held = constants.get(tensor)
    if held is None or held.data_location == TensorProto.EXTERNAL or math.prod(held.dims) != 1:
        return None
    value = numpy_helper.to_array(held).reshape(-1)[0]
    if not (isinstance(value, np.bool_) or np.issubdtype(value.dtype, np.number)):
        return None
    return int(value) if np.issubdtype(value.dtype, np.integer) else float(value)


def _producer(graph: Any, tensor: str) -> Any:
    return next((node for node in graph.node if tensor and tensor in node.output), None)


def _origin(graph: Any, tensor: str) -> str:
    """Returns the tensor that has this one's value, before it was passed on or cast."""
    seen = set()  # a damaged graph may hold a circle
    node = _producer(graph, tensor)
    while node is not None and node.op_type in SAME_VALUE and tensor not in seen:
        seen.add(tensor)
        tensor = node.input[0]
        node = _producer(graph, tensor)
    return tensor
