"""Lowers an annotated graph to TensorFlow's own int8 kernels (oneDNN, x86-64).

Each fusion (see tfopt.quantization.annotation.fusion) becomes one node:

    _FusedQuantizedConv2D   device inputs [x, W, bias(, summand)]     (_FusedQuantizedDepthwiseConv2D likewise)
                            host inputs   [min_x, max_x, min_W[], max_W[](, min_s, max_s), min_y, max_y]
    _QuantizedMatMul        device inputs [x, W, bias]; host inputs likewise, without min_y and max_y where the result
                            is float32 ("Dequantize" fused in place of "Requantize")

x and y are quint8 or qint8, W is qint8 with one range per output channel, bias is float32. The kernels know no zero
points: they take symmetric ("SCALED") ranges, whose scale is max(|min|, |max|) over 255 or 127. A convolution's Relu6
needs no kernel of its own: the range of its result ends at 6 or below, and requantization saturates there.

So to the kernels a tensor with a zero point z (see tfopt.quantization.annotation.range) is a tensor of unsigned bytes,
whose values stand z steps above what they mean:

- the bias of the kernel that computes it is larger by z steps;
- the bias of a kernel that reads it is smaller by z steps times the sum of its weights;
- a convolution that pads must not pad with the byte 0, so a PadV2 with the byte z comes before it;
- Dequantize and QuantizeV2 take the offset as the lower end of their range.

A fused sum accepts only a Relu behind it, and reads its summand as quint8 whatever type it is given (oneDNN's sum is
not told the type). So a symmetric summand, and the result of a symmetric sum, get the zero point 128. Where a
convolution pads such a tensor, a change of its highest bit takes the zero point away, since x + 128 as an unsigned byte
and x as a signed byte differ in that bit alone. This needs no known size.

Between fusions, max pooling, padding, transposes and reshapes work on the quantized tensor itself, and so do
concatenation and average pooling where what goes in and out shares one range. Whatever else reads a quantized tensor
gets it through Dequantize, so the graph computes what the annotated graph computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import UnsupportedLayerError
from tfopt.exporting.int8.layer_norm import fuse_layer_norms
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import AttrValue, attribute, copy_attributes, dtype_attr, producer, strings, text, types
from tfopt.graph.fold import CONVOLUTIONS
from tfopt.graph.paddings import paddings_of
from tfopt.quantization.annotation.activations import NON_NEGATIVE
from tfopt.quantization.annotation.fusion import (
    FAKE_QUANT,
    PASS_THROUGH,
    Fusion,
    find_fusions,
    int8_weights,
    pass_through_origin,
    weights_quantizer,
)
from tfopt.quantization.annotation.range import Range, steps_above_zero
from tfopt.quantization.annotation.ranged_tensors import JOINTS, values_of
from tfopt.quantization.annotation.weight_grid import REDUCED_BITS

MIDDLE = 128  # the zero point of a symmetric range in unsigned bytes
LARGEST_REDUCED = steps_above_zero(REDUCED_BITS)


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A quantized tensor in the graph.

    Attributes:
        values: The tensor with its bytes.
        span: How these are to be read.
        low: The scalar constant with the smallest value, as the kernels are told it: without the zero point.
        high: Likewise the largest.
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
        """What the kernels take for zero, in units of the float tensor."""
        return self.span.zero_point * self.span.scale


def lower_to_int8(graph: FrozenGraph) -> FrozenGraph:
    """Returns the annotated graph with every fusion as an int8 kernel and no fake-quantization left.

    Args:
        graph: A graph as tfopt.quantization.annotation.annotate leaves it.
    Returns: A graph that computes the same up to one step of each quantized tensor, in int8.
    """
    lowering = _Lowering(fuse_layer_norms(graph))
    for fusion in lowering.fusions:
        lowering.lower(fusion)
    return lowering.finish()


def kernel_name(op: str) -> str:
    """Returns the name of the kernel that computes a convolution or product."""
    return f"{op}/int8"


def lowered_names(op: str) -> tuple[str, str]:
    """Returns the names of the nodes that take the time of a convolution or product in int8: a kernel, its padding."""
    return kernel_name(op), f"{kernel_name(op)}/padded/bytes"


class _Lowering:
    def __init__(self, graph: FrozenGraph) -> None:
        self.graph = graph
        self.editor = GraphEditor(graph.graph_def)
        self.fusions, _ = find_fusions(graph, self.editor, annotated=True)
        self.quantized: dict[str, Quantized] = {}
        self.replaced: dict[str, str] = {}
        self.signed: dict[str, Quantized] = {}
        self.shapes = self.graph.shapes()
        self.unsigned = self._unsigned()

    def _unsigned(self) -> set[str]:
        """Returns the annotated tensors that must be unsigned bytes: summands, and sums without a Relu."""
        tensors = {pass_through_origin(self.editor, fusion.summand) for fusion in self.fusions if fusion.summand}
        for fusion in self.fusions:
            behind = self._range_behind(fusion.output)
            if fusion.summand and behind is not None:
                tensors.add(behind.name)
        return tensors

    def lower(self, fusion: Fusion) -> None:
        """Adds the kernel that computes a fusion."""
        if self.editor.nodes[fusion.op].op in CONVOLUTIONS:
            self._convolution(fusion)
        else:
            self._product(fusion)

    def finish(self) -> FrozenGraph:
        """Gives the float readers of each annotated tensor a float tensor, and drops what nothing reads."""
        for tensor, held in self.quantized.items():
            for reader in [self.editor.nodes[name] for name in self.editor.consumers[tensor]]:
                if reader.op == "Shape":  # takes any type; a Dequantize for the shape's sake would be a waste
                    reader.attr["T"].CopyFrom(dtype_attr(held.dtype))
                    self.editor.set_inputs(reader.name, [held.values])
        for name in self.editor.topological():
            node = self.editor.nodes[name]
            if node.op == FAKE_QUANT:
                done = self.quantized.get(name)
                self.editor.redirect(name, self._dequantize(name, done) if done else node.input[0])
        self.editor.share_constants()
        outputs = {key: (self.replaced.get(tensor, tensor), spec) for key, (tensor, spec) in self.graph.outputs.items()}
        lowered = replace(self.graph, outputs=outputs)
        return lowered.edited(self.editor)

    def _convolution(self, fusion: Fusion) -> None:
        node = self.editor.nodes[fusion.op]
        entering, padding = self._padded(fusion)
        behind = self._range_behind(fusion.output)
        if behind is None:
            raise UnsupportedLayerError(
                "Every quantized convolution must have a range on its result. Received: "
                f"{fusion.output!r} without one. Annotate it, or leave the convolution float."
            )
        summand = None if fusion.summand is None else self._quantized(fusion.summand)
        summands = [summand] if summand else []
        leaving = self._leaving(behind, never_negative=fusion.activation is not None)
        bias = self._bias(fusion, entering, leaving.offset - sum(added.offset for added in summands))
        weights, *weight_range = self._weights(fusion, entering)
        host = [entering.low, entering.high, *weight_range]
        host += [limit for added in summands for limit in (added.low, added.high)]
        host += [leaving.low, leaving.high]
        rectified = ["Relu"] if fusion.activation or summand else []
        fused = ["BiasAdd", *(["Sum"] if summand else []), *rectified, "Requantize"]
        kernel = self.editor.add(
            "_FusedQuantizedConv2D" if node.op == "Conv2D" else "_FusedQuantizedDepthwiseConv2D",
            kernel_name(fusion.op),
            [entering.values, weights, bias, *(added.values for added in summands), *host],
            Tinput=dtype_attr(entering.dtype),
            Tfilter=dtype_attr(tf.qint8),
            Tbias=dtype_attr(tf.float32),
            Tsummand=dtype_attr(summand.dtype if summand else leaving.dtype),
            out_type=dtype_attr(leaving.dtype),
            Tdevice_inputs=types(entering.dtype, tf.qint8, tf.float32, *(added.dtype for added in summands)),
            Thost_inputs=types(*[tf.float32] * len(host)),
            Tdevice_outputs=types(leaving.dtype),
            Thost_outputs=types(tf.float32, tf.float32),
            fused_ops=strings(fused),
            **copy_attributes(node, ("strides", "dilations", "data_format")),
            **padding,
        )
        for added in summands:
            # The kernel writes into the summand's buffer, so TensorFlow must not merge its node with an equal one that
            # others read. Nodes whose attributes differ are never merged.
            self.editor.nodes[producer(added.values)].attr["_added_by"].CopyFrom(text(kernel))
        self.quantized[behind.name] = replace(leaving, values=kernel)

    def _product(self, fusion: Fusion) -> None:
        entering = self._quantized(fusion.input)
        behind = self._range_behind(fusion.output)
        activation = fusion.activation
        never_negative = activation is not None and activation.name in NON_NEGATIVE
        leaving = None if behind is None else self._leaving(behind, never_negative=never_negative)
        if leaving is not None and leaving.offset and activation is not None:
            raise UnsupportedLayerError(
                "The result of a fused activation must have a range without a zero point. Received: "
                f"{fusion.output!r} with {leaving.span}. Annotate it with a symmetric range."
            )
        weights, *weight_range = self._weights(fusion, entering)
        host = [entering.low, entering.high, *weight_range, *([leaving.low, leaving.high] if leaving else [])]
        result = leaving.dtype if leaving else tf.float32
        kernel = self.editor.add(
            "_QuantizedMatMul",
            kernel_name(fusion.op),
            [entering.values, weights, self._bias(fusion, entering, leaving.offset if leaving else 0.0), *host],
            T1=dtype_attr(entering.dtype),
            T2=dtype_attr(tf.qint8),
            Tbias=dtype_attr(tf.float32),
            U=dtype_attr(tf.float32),
            Tout=dtype_attr(result),
            Tdevice_inputs=types(entering.dtype, tf.qint8, tf.float32),
            Thost_inputs=types(*[tf.float32] * len(host)),
            Tdevice_outputs=types(result),
            Thost_outputs=types(*[tf.float32] * (2 if leaving else 0)),
            fused_ops=strings(
                ["BiasAdd", *([activation.name] if activation else []), "Requantize" if leaving else "Dequantize"]
            ),
            leakyrelu_alpha=AttrValue(f=activation.alpha if activation else 0.0),
            input_quant_mode=text("SCALED"),
            output_quant_mode=text("SCALED"),
        )
        if leaving is not None and behind is not None:
            self.quantized[behind.name] = replace(leaving, values=kernel)
        else:
            self.editor.redirect(fusion.output, kernel)
            self.replaced[fusion.output] = kernel

    def _padded(self, fusion: Fusion) -> tuple[Quantized, Mapping[str, AttrValue]]:
        """Returns what a convolution's kernel reads, and the attributes of its padding."""
        held, node = self._quantized(fusion.input), self.editor.nodes[fusion.op]
        attributes = copy_attributes(node, ("padding", "explicit_paddings"))
        paddings = paddings_of(node, self.shapes[fusion.input], self._steps(fusion)[0].shape[:2])
        if not held.span.zero_point or (paddings is not None and not paddings.any()):
            return held, attributes
        if held.span.zero_point == MIDDLE:
            return self._without_offset(held), attributes
        if paddings is None:
            raise UnsupportedLayerError(
                "The input of a convolution that pads it by an unknown number of zeros must have a range without a "
                f"zero point. Received: {fusion.input!r} with {held.span}. Annotate it with a symmetric range."
            )
        sizes = self.editor.add_constant("paddings", paddings)
        padded = self._move_bytes(
            "PadV2", f"{kernel_name(fusion.op)}/padded", held, [sizes], Tpaddings=dtype_attr(tf.int32)
        )
        return replace(held, values=padded), {"padding": text("VALID")}

    def _without_offset(self, held: Quantized) -> Quantized:
        """Returns the signed form of a tensor whose zero point is in the middle, adding what computes it once."""
        if held.span.zero_point != MIDDLE:
            return held
        if held.values not in self.signed:
            highest_bit = self.editor.add_constant("highest_bit", np.uint8(MIDDLE))
            unsigned = self._bitcast(held.values, tf.quint8, tf.uint8)
            signed = self.editor.add(
                "BitwiseXor", f"{held.values}/signed", [unsigned, highest_bit], T=dtype_attr(tf.uint8)
            )
            span = Range(limit=held.span.limit, signed=True)
            values = self._bitcast(signed, tf.uint8, tf.qint8)
            self.signed[held.values] = replace(self._as_read(span), values=values)
        return self.signed[held.values]

    def _quantized(self, tensor: str) -> Quantized:
        """Returns the quantized form of an annotated tensor, adding what computes it."""
        if tensor in self.quantized:
            return self.quantized[tensor]
        node = self.editor.nodes[producer(tensor)]
        if node.op == FAKE_QUANT:
            result = self._joined(node) or self._quantize(node)
        elif node.op in PASS_THROUGH and ":" not in tensor:
            inner = self._quantized(node.input[0])
            result = replace(inner, values=self._pass_through(node, inner))
        else:
            raise UnsupportedLayerError(
                f"Every input of a quantized op must have a range. Received: {tensor!r} ({node.op}) without one. "
                "Annotate it, or leave the op float."
            )
        self.quantized[tensor] = result
        return result

    def _quantize(self, node: Any) -> Quantized:
        """Quantizes the float tensor that a fake-quantization node reads."""
        held = self._leaving(node)
        span, low, high, mode, rounding = held.span, held.low, held.high, "SCALED", "HALF_TO_EVEN"
        if span.zero_point:
            low, high, mode, rounding = *self._ends(span), "MIN_COMBINED", "HALF_AWAY_FROM_ZERO"
        values = self.editor.add(
            "QuantizeV2",
            f"{node.name}/quantize",
            [node.input[0], low, high],
            T=dtype_attr(held.dtype),
            mode=text(mode),
            round_mode=text(rounding),
            # Without it a signed range is divided into 128 steps, and the kernels take it for 127.
            narrow_range=AttrValue(b=span.signed),
            axis=AttrValue(i=-1),
            ensure_minimum_range=AttrValue(f=0.0),  # else a range below 0.01 is widened, unknown to the kernels
        )
        return replace(held, values=values)

    def _joined(self, node: Any) -> Quantized | None:
        """Computes the joint that a fake-quantization node reads, if all that goes into it has the node's range."""
        joint = self.editor.nodes[producer(node.input[0])]
        if joint.op not in JOINTS or not all(self._has_range(source, node) for source in values_of(joint)):
            return None
        held = self._as_read(self._range(node))
        parts = [self._without_offset(self._quantized(source)) for source in values_of(joint)]
        if any((part.dtype, part.span.zero_point) != (held.dtype, held.span.zero_point) for part in parts):
            return None
        inputs = [part.values for part in parts]
        if joint.op == "ConcatV2":
            op, attributes = "ConcatV2", copy_attributes(joint, ("N", "Tidx"))
            inputs.append(joint.input[-1])
        else:
            op, attributes = "QuantizedAvgPool", copy_attributes(joint, ("ksize", "strides", "padding"))
            inputs += [held.low, held.high]
        values = self.editor.add(op, f"{joint.name}/int8", inputs, T=dtype_attr(held.dtype), **attributes)
        return replace(held, values=values)

    def _has_range(self, tensor: str, node: Any) -> bool:
        """Whether a tensor comes from a fake-quantization node of the same range as `node`."""
        origin = self.editor.nodes[producer(pass_through_origin(self.editor, tensor))]
        return origin.op == FAKE_QUANT and self._range(origin) == self._range(node)

    def _leaving(self, node: Any, *, never_negative: bool = False) -> Quantized:
        """Returns how the tensor of a fake-quantization node is stored, its values still to come.

        Args:
            node: The node.
            never_negative: Whether the tensor is known not to be negative. A signed range of 127 steps above zero then
                becomes an unsigned one of 255 steps of the same size.
        """
        span = self._range(node)
        if span.signed and never_negative:
            span = Range(limit=span.scale * 255, signed=False)
        elif span.signed and node.name in self.unsigned:
            span = Range(limit=span.limit, signed=False, zero_point=MIDDLE)
        return self._as_read(span)

    def _as_read(self, span: Range) -> Quantized:
        """Returns a tensor of a range, its values still to come."""
        low, high = (-span.limit, span.limit) if span.signed else (0.0, span.scale * 255)
        return Quantized(values="", span=span, low=self._scalar(low), high=self._scalar(high))

    def _ends(self, span: Range) -> tuple[str, str]:
        """Returns the constants of what the smallest and the largest byte mean."""
        lowest, highest = (-128, 127) if span.signed else (-span.zero_point, span.steps)
        return self._scalar(lowest * span.scale), self._scalar(highest * span.scale)

    @staticmethod
    def _range(node: Any) -> Range:
        low, high = attribute(node, "min").f, attribute(node, "max").f
        if attribute(node, "narrow_range").b:
            return Range(limit=high, signed=True)
        return Range(limit=high, signed=False, zero_point=round(-low * 255 / (high - low)))

    def _pass_through(self, node: Any, inner: Quantized) -> str:
        name = f"{node.name}/int8"
        if node.op == "MaxPool":
            return self.editor.add(
                "QuantizedMaxPool",
                name,
                [inner.values, inner.low, inner.high],
                T=dtype_attr(inner.dtype),
                **copy_attributes(node, ("ksize", "strides", "padding")),
            )
        others = {key: value for key, value in node.attr.items() if key != "T" and not key.startswith("_")}
        if node.op not in ("Pad", "Tile", "Transpose"):
            return self.editor.add(node.op, name, [inner.values, *node.input[1:]], T=dtype_attr(inner.dtype), **others)
        return self._move_bytes("PadV2" if node.op == "Pad" else node.op, name, inner, node.input[1:], **others)

    def _move_bytes(self, op: str, name: str, held: Quantized, inputs: Sequence[str], **attributes: AttrValue) -> str:
        """Adds an op that moves or pads quantized values.

        TensorFlow moves quantized types value by value, thirty times as slowly as the same bytes as integers.
        """
        plain = tf.int8 if held.span.signed else tf.uint8
        zero = np.asarray(held.span.zero_point, plain.as_numpy_dtype)
        moved = self.editor.add(
            op,
            f"{name}/bytes",
            [
                self._bitcast(held.values, held.dtype, plain),
                *inputs,
                *([self.editor.add_constant("zero", zero)] if op == "PadV2" else []),
            ],
            T=dtype_attr(plain),
            **attributes,
        )
        return self._bitcast(moved, plain, held.dtype, name)

    def _bitcast(self, tensor: str, source: Any, target: Any, name: str | None = None) -> str:
        return self.editor.add(
            "Bitcast", name or f"{tensor}/{target.name}", [tensor], T=dtype_attr(source), type=dtype_attr(target)
        )

    def _dequantize(self, name: str, tensor: Quantized) -> str:
        return self.editor.add(
            "Dequantize",
            f"{name}/dequantize",
            [tensor.values, *self._ends(tensor.span)],
            T=dtype_attr(tensor.dtype),
            dtype=dtype_attr(tf.float32),
            mode=text("MIN_COMBINED"),  # takes half of the time of SCALED
            narrow_range=AttrValue(b=False),
            axis=AttrValue(i=-1),
        )

    def _range_behind(self, tensor: str) -> Any | None:
        """Returns the fake-quantization node that reads a tensor, if any."""
        readers = (self.editor.nodes[name] for name in self.editor.consumers.get(producer(tensor), ()))
        return next((node for node in readers if node.op == FAKE_QUANT), None)

    def _weights(self, fusion: Fusion, entering: Quantized) -> tuple[str, str, str]:
        """Adds the int8 weights and their per-channel ranges."""
        steps, high = self._steps(fusion)
        convolution = self.editor.nodes[fusion.op].op in CONVOLUTIONS
        if convolution and entering.dtype == tf.qint8 and np.abs(steps).max() <= LARGEST_REDUCED:
            # Without VNNI such a kernel halves its weights, and odd ones lose half a step.
            steps, high = 2 * steps, high / 2
        if self.editor.nodes[fusion.op].op == "DepthwiseConv2dNative":
            steps = steps[..., None]
        return (
            self.editor.add_constant(f"{fusion.op}/int8_weights", steps, tf.qint8),
            self.editor.add_constant(f"{fusion.op}/int8_weights_min", -high),
            self.editor.add_constant(f"{fusion.op}/int8_weights_max", high),
        )

    def _weights_quantizer(self, fusion: Fusion) -> Any:
        node = weights_quantizer(self.editor, fusion.weights)
        assert node is not None, fusion.op  # or it would be no fusion
        return node

    def _steps(self, fusion: Fusion) -> tuple[np.ndarray, np.ndarray]:
        return int8_weights(self.editor, self._weights_quantizer(fusion))

    def _bias(self, fusion: Fusion, entering: Quantized, offset: float = 0.0) -> str:
        """Returns the fusion's bias as a constant of one value per output channel.

        Args:
            fusion: The fusion.
            entering: What its kernel reads, whose offset is taken away.
            offset: What its result is to stand above what it means.
        """
        steps, high = self._steps(fusion)
        bias = np.zeros_like(high) if fusion.bias is None else self.editor.value(fusion.bias)
        if entering.span.zero_point:
            sums = steps.reshape(-1, len(high)).sum(axis=0, dtype=np.int64)
            bias = bias - entering.offset * sums * (high / 127)
        return self.editor.add_constant(f"{fusion.op}/bias", (bias + offset).astype(np.float32))

    def _scalar(self, value: float) -> str:
        return self.editor.add_constant("range", np.float32(value))
