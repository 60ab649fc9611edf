"""Finds where float16 overflows: its largest number is 65,504. And whether values are too small for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import ConfigError, warn
from tfopt.exporting.half.sides import type_attribute
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import attribute, producer
from tfopt.graph.frozen import convert

LARGEST_ERROR = 0.02  # a share of the outputs' scale; by rounding alone, deep networks stay below half of it


def warn_of_lost_digits(error: float) -> None:
    """Warns of an artifact in float16 whose outputs differ from its source's by that share of their scale."""
    if error > LARGEST_ERROR:
        warn(
            f"compute='float16' changes the outputs by {error:.1%} of their scale, which is more than rounding does: "
            "values below 6e-5 lose digits in float16. Use compute='bfloat16', which has the range of float32."
        )


def refuse_overflow(graph: FrozenGraph, inputs: Mapping[str, Any]) -> None:
    """Raises ConfigError with the first node that computes in float16 and gives infinity or NaN on these inputs.

    An overflow is an error even if the outputs are finite, because a sigmoid or a clip behind it hides it here.
    """
    editor = GraphEditor(graph.graph_def)
    half = tf.float16.as_datatype_enum
    tensors = [
        name
        for name in editor.topological()
        if half in (attribute(editor.nodes[name], kind).type for kind in (type_attribute(editor.nodes[name]), "DstT"))
        and editor.nodes[name].op not in ("Shape", "Size", "Rank")
    ]
    compute = graph.as_function(fetch=tensors)

    @tf.function(autograph=False)
    def finite(**fed: tf.Tensor) -> list[tf.Tensor]:
        return [tf.reduce_all(tf.math.is_finite(value)) for value in compute(**fed)]

    fed = {name: convert(name, tf.convert_to_tensor(inputs[name]), spec.dtype) for name, spec in graph.inputs.items()}
    flags = np.array([flag.numpy() for flag in finite(**fed)])
    if flags.all():
        return
    first = editor.nodes[tensors[int(np.argmin(flags))]]
    where = f"{first.name!r} ({first.op})"
    if first.op == "Cast":
        source = editor.nodes[producer(first.input[0])]
        where = f"{source.name!r} ({source.op}), as the input of a product,"
    raise ConfigError(
        "compute must be a type that can hold the model's values. Received: compute='float16', in which the result of "
        f"{where} exceeds 65,504. Use compute='bfloat16', which has the range of float32."
    )
