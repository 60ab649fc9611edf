"""Convolutions of one place with a stride, written as a slice and a convolution without stride, for OpenVINO."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper, numpy_helper

FIRST_AXIS, LAST = 2, 2**62  # of the places, behind examples and channels; the end of each


def slice_before_strided_products(model: Any) -> None:
    """Takes the places that strided 1x1 convolutions read out of their inputs beforehand, in an ONNX model.

    OpenVINO does this itself where several convolutions read a tensor, as in the first block of a residual stage, but
    with an op between the rounding and the convolutions that keeps these in float32.
    """
    graph = model.graph
    sliced: dict[tuple[str, tuple[int, ...]], str] = {}
    nodes = []
    for node in graph.node:
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        strides = tuple(attributes.get("strides", ()))
        of_one_place = node.op_type == "Conv" and {*attributes.get("kernel_shape", (0,))} == {1}
        if of_one_place and {*strides} - {1} and not any(attributes.get("pads", ())):
            source = node.input[0]
            if (source, strides) not in sliced:
                name = f"{source}/strided_{'_'.join(map(str, strides))}"
                axes = range(FIRST_AXIS, FIRST_AXIS + len(strides))
                parts = {"starts": [0] * len(strides), "ends": [LAST] * len(strides), "axes": axes, "steps": strides}
                for part, values in parts.items():
                    graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), f"{name}/{part}"))
                nodes.append(
                    helper.make_node("Slice", [source, *(f"{name}/{part}" for part in parts)], [name], name=name)
                )
                sliced[source, strides] = name
            node.input[0] = sliced[source, strides]
            (own,) = (each for each in node.attribute if each.name == "strides")
            own.ints[:] = [1] * len(strides)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
