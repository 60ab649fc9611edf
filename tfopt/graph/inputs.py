"""What inputs a graph accepts, where there is no example of one: sizes for open axes, and the ids that tables hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfopt.graph.edit import GraphEditor, producer
from tfopt.graph.frozen import FrozenGraph

OPEN_SIZES = (64, 16, 4, 1)  # tried in this order; a position embedding, for example, limits the size
MOST_PLACES = 64**2  # of all open axes of an input together: volumes of 64 by 64 by 64 take gigabytes
# Ops between an input of ids and a table. They change shapes, or make negative ids positive.
ID_OPS = frozenset({"Identity", "Cast", "Reshape", "ExpandDims", "Squeeze", "Less", "AddV2", "SelectV2"})


def open_size(graph: FrozenGraph) -> int:
    """Returns the first of OPEN_SIZES with which a graph runs, and with which no input has over MOST_PLACES.

    Without an open axis, or if no size works, it is the first of those. The batch axis does not count.

    Example:
        >>> import keras
        >>> from tfopt.graph import freeze
        >>> open_size(freeze(keras.Sequential([keras.Input((None, 4)), keras.layers.Conv1D(2, 3)])))
        64
    """
    axes = max((shape[1:].count(None) for shape in _shapes(graph).values()), default=0)
    sizes = [size for size in OPEN_SIZES if size**axes <= MOST_PLACES]
    for size in sizes if axes else ():
        try:
            graph.predict(zeros(graph, size))
        except tf.errors.OpError:
            continue
        return size
    return sizes[0]


def zeros(graph: FrozenGraph, size: int) -> dict[str, tf.Tensor]:
    """Returns a batch of zeros, with one example where the batch size is open. Other open axes have this size."""
    return {
        name: tf.zeros([each or (size if axis else 1) for axis, each in enumerate(shape)], graph.inputs[name].dtype)
        for name, shape in _shapes(graph).items()
    }


def _shapes(graph: FrozenGraph) -> dict[str, list[int | None]]:
    return {name: [None] if spec.shape.rank is None else spec.shape.as_list() for name, spec in graph.inputs.items()}


def table_rows(graph: FrozenGraph) -> dict[str, int]:
    """Returns the number of rows of the smallest table that each input looks up. Other inputs are left out.

    Ids may be floats that the graph casts: Keras does not know the types of a subclassed model's inputs.
    """
    numbers = {
        name: spec.name for name, spec in graph.inputs.items() if spec.dtype.is_integer or spec.dtype.is_floating
    }
    if not numbers:
        return {}
    editor, shapes = GraphEditor(graph.graph_def), graph.shapes()
    found = {}
    for name, placeholder in numbers.items():
        sizes = [_table_size(editor, gather, shapes) for gather in _gathers(editor, placeholder)]
        known = [size for size in sizes if size is not None]
        if known:
            found[name] = min(known)
    return found


def _gathers(editor: GraphEditor, placeholder: str) -> Iterator[Any]:
    """Yields the Gather nodes whose indices come from a placeholder."""
    waiting, seen = [placeholder], {placeholder}
    while waiting:
        name = waiting.pop()
        for node in (editor.nodes[reader] for reader in editor.consumers.get(name, ())):
            if node.op == "GatherV2" and producer(node.input[1]) == name:
                yield node
            elif node.op in ID_OPS and node.name not in seen:
                seen.add(node.name)
                waiting.append(node.name)


def _table_size(editor: GraphEditor, gather: Any, shapes: Mapping[str, tf.TensorShape]) -> int | None:
    axis, shape = editor.constant(gather.input[2], behind="Identity"), shapes.get(gather.input[0].removesuffix(":0"))
    if axis is None or shape is None or shape.rank is None:
        return None
    size: int | None = shape.as_list()[int(axis)]
    return size or None
