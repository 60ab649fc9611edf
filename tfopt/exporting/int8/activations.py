"""Quantized activations: how a tensor is stored in bytes, and how it becomes quantized and float again.

A kernel knows no zero point. It takes a symmetric ("SCALED") range, whose scale is max(|min|, |max|) over 255 or 127.
QuantizeV2 and Dequantize take a zero point as the lower end of their range.

TensorFlow moves quantized types value by value, which takes thirty times as long as the same bytes as integers. So
ops that only move bytes read the bytes as integers where they can.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.graph import GraphEditor
from tfopt.graph.edit import FLOAT32, INT32, AttrValue, attribute, copy_attributes, dtype_attr, producer, text
from tfopt.quantization.annotation.fusion import FAKE_QUANT
from tfopt.quantization.annotation.grids import Range

MIDDLE = 128  # the zero point of a symmetric range in unsigned bytes


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A quantized tensor in the graph, and the range that its bytes cover.

    The tensor of bytes, `values`, is empty until a kernel computes it. `low` and `high` are scalar constants: the ends
    of the range that kernels are given, without the zero point.
    """

    values: str
    span: Range
    low: str
    high: str

    @property
    def dtype(self) -> Any:
        return tf.qint8 if self.span.signed else tf.quint8

    @property
    def offset(self) -> float:
        """The difference between the values that kernels read and the true values."""
        return self.span.zero_point * self.span.scale


class Activations:
    """Adds what quantized activations need: constants, conversions, and ops that move, pad, pool or join bytes.

    The tensors of the fake-quantization nodes in `unsigned` are unsigned bytes.
    """

    def __init__(self, editor: GraphEditor, unsigned: Collection[str]) -> None:
        self._editor = editor
        self._unsigned = unsigned
        self._signed: dict[str, Quantized] = {}  # of the tensors whose zero point was removed

    def leaving(self, node: Any, *, never_negative: bool = False) -> Quantized:
        """Returns how the tensor of a fake-quantization node is stored. A kernel computes its values later.

        A signed range of 127 steps above zero becomes an unsigned one of 255 such steps if no value is negative.
        """
        span = range_of(node)
        if span.signed and never_negative:
            span = Range(limit=span.scale * 255, signed=False)
        elif span.signed and node.name in self._unsigned:
            span = Range(limit=span.limit, signed=False, zero_point=MIDDLE)
        return self.of_range(span)

    def of_range(self, span: Range) -> Quantized:
        """Returns a tensor of a range, without values yet."""
        low, high = (-span.limit, span.limit) if span.signed else (0.0, span.scale * 255)
        return Quantized(values="", span=span, low=self._scalar(low), high=self._scalar(high))

    def quantize(self, node: Any) -> Quantized:
        """Quantizes the float tensor that a fake-quantization node reads."""
        held = self.leaving(node)
        span, low, high, mode, rounding = held.span, held.low, held.high, "SCALED", "HALF_TO_EVEN"
        if span.zero_point:
            low, high, mode, rounding = *self._ends(span), "MIN_COMBINED", "HALF_AWAY_FROM_ZERO"
        values = self._editor.add(
            "QuantizeV2",
            f"{node.name}/quantize",
            [node.input[0], low, high],
            T=dtype_attr(held.dtype),
            mode=text(mode),
            round_mode=text(rounding),
            # Otherwise a signed range has 128 steps above zero, but the kernels assume 127.
            narrow_range=AttrValue(b=span.signed),
            axis=AttrValue(i=-1),
            # Otherwise QuantizeV2 widens a range below 0.01, and the kernels are not told.
            ensure_minimum_range=AttrValue(f=0.0),
        )
        return replace(held, values=values)

    def dequantize(self, name: str, tensor: Quantized) -> str:
        """Returns the float values of a quantized tensor. The new node is named after `name`."""
        return self._editor.add(
            "Dequantize",
            f"{name}/dequantize",
            [tensor.values, *self._ends(tensor.span)],
            T=dtype_attr(tensor.dtype),
            dtype=FLOAT32,
            mode=text("MIN_COMBINED"),  # it takes half the time of SCALED
            narrow_range=AttrValue(b=False),
            axis=AttrValue(i=-1),
        )

    def _ends(self, span: Range) -> tuple[str, str]:
        """Returns the constants with the values of the smallest and the largest byte."""
        lowest, highest = (-128, 127) if span.signed else (-span.zero_point, span.steps)
        return self._scalar(lowest * span.scale), self._scalar(highest * span.scale)

    def _scalar(self, value: float) -> str:
        return self._editor.add_constant("range", np.float32(value))

    def pass_through(self, node: Any, held: Quantized) -> Quantized:
        """Applies a float node that only moves or selects values to a quantized tensor."""
        name = f"{node.name}/int8"
        if node.op == "MaxPool":
            return self._pool("QuantizedMaxPool", name, node, held)
        others = {key: value for key, value in node.attr.items() if key != "T" and not key.startswith("_")}
        if node.op not in ("Pad", "Tile", "Transpose", "ResizeNearestNeighbor"):
            inputs = [held.values, *node.input[1:]]
            return replace(held, values=self._editor.add(node.op, name, inputs, T=dtype_attr(held.dtype), **others))
        return self._move("PadV2" if node.op == "Pad" else node.op, name, held, node.input[1:], **others)

    def pad(self, name: str, held: Quantized, paddings: np.ndarray) -> Quantized:
        """Pads a tensor with its zero point."""
        sizes = self._editor.add_constant("paddings", paddings)
        return self._move("PadV2", name, held, [sizes], Tpaddings=INT32)

    def join(self, joint: Any, held: Quantized, parts: Sequence[Quantized]) -> Quantized:
        """Concatenates or pools (ConcatV2, AvgPool) quantized tensors of one range; `held` has no values yet."""
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
            self._signed[held.values] = replace(self.of_range(span), values=values)
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


def range_of(node: Any) -> Range:
    low, high = attribute(node, "min").f, attribute(node, "max").f
    if attribute(node, "narrow_range").b:
        return Range(limit=high, signed=True)
    return Range(limit=high, signed=False, zero_point=round(-low * 255 / (high - low)))


def range_behind(editor: GraphEditor, tensor: str) -> Any | None:
    """Returns the fake-quantization node that reads a tensor, if there is one."""
    readers = (editor.nodes[name] for name in editor.consumers.get(producer(tensor), ()))
    return next((node for node in readers if node.op == FAKE_QUANT), None)
