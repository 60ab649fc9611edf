"""Lets the bodies of functions that XLA must compile become part of the graph.

Keras on TensorFlow puts each grouped convolution into such a function, and a layer may have one of its own. TensorFlow
does not inline a call of it, and compiles it by itself when the graph runs: neither batch norm nor bias nor activation
meets the convolution inside, no int8 kernel takes it, and on a CPU XLA computes it several times slower than
TensorFlow's own kernel. Without the mark the call is inlined as any other.

An island stays where plain kernels cannot compute it: ops that exist for XLA alone, and convolutions with channels
first or in three dimensions, for which the CPU has no kernel or no grouped one. A Keras model has none of these islands
when it is frozen: its convolutions are traced without; see tfopt.compat.convolutions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tfopt.compat.tensorflow import has_cpu_kernel
from tfopt.graph.edit import attribute, functions_of, is_nhwc

ISLAND = "_XlaMustCompile"


def open_islands(graph_def: Any) -> None:
    """Removes from functions and their calls the mark that XLA must compile them, where plain kernels compute them.

    Args:
        graph_def: A graph with its functions, which is changed.
    """
    functions = {function.signature.name: function for function in graph_def.library.function}
    opened = {
        name
        for name, function in functions.items()
        if attribute(function, ISLAND).b and not _obstacle(function, functions)
    }
    for name in opened:
        functions[name].attr.pop(ISLAND)
        functions[name].attr.pop("_noinline", None)
    for node in _nodes(graph_def):
        if ISLAND in node.attr and attribute(node, "f").func.name in opened:
            node.attr.pop(ISLAND)


def islands(graph_def: Any) -> dict[str, str]:
    """Returns the calls that XLA still compiles by itself, with the reason, by the names of their nodes."""
    functions = {function.signature.name: function for function in graph_def.library.function}
    found = {}
    for node in _nodes(graph_def):
        if attribute(node, ISLAND).b:
            function = functions.get(attribute(node, "f").func.name)
            reason = "its body is unknown" if function is None else _obstacle(function, functions)
            found[node.name] = reason or "only its call is marked"
    return found


def _obstacle(function: Any, functions: Mapping[str, Any]) -> str:
    """Returns why plain kernels cannot compute a function and those that it calls; "" if they can."""
    waiting, seen = [function], {function.signature.name}
    while waiting:
        for node in waiting.pop().node_def:
            if node.op.startswith("Conv3D"):
                return "TensorFlow's Conv3D knows no groups, and no channels first on a CPU"
            if node.op.startswith("Conv2D") and not is_nhwc(node):
                return "TensorFlow's Conv2D knows no channels first on every CPU"
            called = functions_of(node)
            if not called and not has_cpu_kernel(node.op):
                return f"no CPU kernel computes {node.op} without XLA"
            for name in called:
                if name in functions and name not in seen:
                    seen.add(name)
                    waiting.append(functions[name])
    return ""


def _nodes(graph_def: Any) -> Iterable[Any]:
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def
