"""Ops that work on the bytes of quantized tensors: they move, pad, pool or join them.

TensorFlow moves quantized types value by value, which takes thirty times as long as the same bytes as integers. So
these ops read the bytes as integers where they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.exporting.int8.activations import MIDDLE, Activations, Quantized
from tfopt.graph import GraphEditor
from tfopt.graph.edit import AttrValue, copy_attributes, dtype_attr
from tfopt.quantization.annotation.range import Range


class MovedBytes:
    """Adds the nodes that work on the bytes of quantized tensors.

    Args:
        editor: The graph.
        activations: It describes the tensors that have another range than the original ones.
    """

    def __init__(self, editor: GraphEditor, activations: Activations) -> None:
        self._editor = editor
        self._activations = activations
        self._signed: dict[str, Quantized] = {}

    def pass_through(self, node: Any, held: Quantized) -> Quantized:
        """Applies a float node that only moves or selects values to a quantized tensor."""
        name = f"{node.name}/int8"
        if node.op == "MaxPool":
            return self._pool("QuantizedMaxPool", name, node, held)
        others = {key: value for key, value in node.attr.items() if key != "T" and not key.startswith("_")}
        if node.op not in ("Pad", "Tile", "Transpose"):
            inputs = [held.values, *node.input[1:]]
            return replace(held, values=self._editor.add(node.op, name, inputs, T=dtype_attr(held.dtype), **others))
        return self._move("PadV2" if node.op == "Pad" else node.op, name, held, node.input[1:], **others)

    def pad(self, name: str, held: Quantized, paddings: np.ndarray) -> Quantized:
        """Pads a tensor with its zero point."""
        sizes = self._editor.add_constant("paddings", paddings)
        return self._move("PadV2", name, held, [sizes], Tpaddings=dtype_attr(tf.int32))

    def join(self, joint: Any, held: Quantized, parts: Sequence[Quantized]) -> Quantized:
        """Concatenates or pools quantized tensors of one range.

        Args:
            joint: The float node, a ConcatV2 or an AvgPool.
            held: Its result, without values yet.
            parts: The tensors that it reads.
        """
        name = f"{joint.name}/int8"
        if joint.op != "ConcatV2":
            return self._pool("QuantizedAvgPool", name, joint, replace(held, values=parts[0].values))
        inputs = [*(part.values for part in parts), joint.input[-1]]
        attributes = copy_attributes(joint, ("N", "Tidx"))
        return replace(held, values=self._editor.add("ConcatV2", name, inputs, T=dtype_attr(held.dtype), **attributes))

    def without_offset(self, held: Quantized) -> Quantized:
        """Returns a tensor as signed bytes if its zero point is 128, else the tensor itself.

        x + 128 as an unsigned byte and x as a signed byte differ in the highest bit alone.
        """
        if held.span.zero_point != MIDDLE:
            return held
        if held.values not in self._signed:
            highest_bit = self._editor.add_constant("highest_bit", np.uint8(MIDDLE))
            unsigned = self._bitcast(held.values, tf.quint8, tf.uint8)
            signed = self._editor.add(
                "BitwiseXor", f"{held.values}/signed", [unsigned, highest_bit], T=dtype_attr(tf.uint8)
            )
            span = Range(limit=held.span.limit, signed=True)
            values = self._bitcast(signed, tf.uint8, tf.qint8)
            self._signed[held.values] = replace(self._activations.of_range(span), values=values)
        return self._signed[held.values]

    def _pool(self, op: str, name: str, node: Any, held: Quantized) -> Quantized:
        inputs = [held.values, held.low, held.high]
        attributes = copy_attributes(node, ("ksize", "strides", "padding"))
        return replace(held, values=self._editor.add(op, name, inputs, T=dtype_attr(held.dtype), **attributes))

    def _move(self, op: str, name: str, held: Quantized, inputs: Sequence[str], **attributes: AttrValue) -> Quantized:
        """Adds an op that moves or pads the bytes of a tensor as integers."""
        plain = tf.int8 if held.span.signed else tf.uint8
        zero = np.asarray(held.span.zero_point, plain.as_numpy_dtype)
        values = [self._bitcast(held.values, held.dtype, plain), *inputs]
        if op == "PadV2":
            values.append(self._editor.add_constant("zero", zero))
        moved = self._editor.add(op, f"{name}/bytes", values, T=dtype_attr(plain), **attributes)
        return replace(held, values=self._bitcast(moved, plain, held.dtype, name))

    def _bitcast(self, tensor: str, source: Any, target: Any, name: str | None = None) -> str:
        return self._editor.add(
            "Bitcast", name or f"{tensor}/{target.name}", [tensor], T=dtype_attr(source), type=dtype_attr(target)
        )
