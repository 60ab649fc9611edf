"""Lowers an annotated graph to TensorFlow's own int8 kernels (oneDNN, x86-64).

Each fusion (see tfopt.quantization.annotation.fusion) becomes one node:

    _FusedQuantizedConv2D   device inputs [x, W, bias(, summand)]     (_FusedQuantizedDepthwiseConv2D likewise)
                            host inputs   [min_x, max_x, min_W[], max_W[](, min_s, max_s), min_y, max_y]
    _QuantizedMatMul        device inputs [x, W, bias]; host inputs likewise, without min_y and max_y where the result
                            is float32 ("Dequantize" fused in place of "Requantize")

x and y are quint8 or qint8. W is qint8 with one range for each output channel. The bias is float32. A Relu6 behind a
convolution needs no kernel of its own: its range ends at 6 or below, and the kernel saturates there.

The kernels know no zero points. To them, a tensor with a zero point z (see tfopt.quantization.annotation.grids) is a
tensor of unsigned bytes whose values are z steps larger than the true ones. This is made up for:

- The kernel that computes the tensor has a bias that is z steps larger.
- A kernel that reads the tensor has a bias that is smaller, by z steps times the sum of its weights.
- A convolution that pads must not pad with the byte 0. A PadV2 with the byte z comes before it.
- Dequantize and QuantizeV2 take z as the lower end of their range.

A fused sum accepts only a Relu behind it. It reads its summand as quint8, whatever type the summand has, because
oneDNN's sum is not told the type. So a symmetric summand, and the result of a symmetric sum, get the zero point 128.
Where a convolution pads such a tensor, it is changed to signed bytes. That needs no known sizes.

Max pooling, padding, transposes and reshapes between fusions read the quantized tensor itself. So do concatenation and
average pooling, where all their tensors have one range. Any other reader gets the tensor through Dequantize. So the
graph computes what the annotated graph computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tfopt.errors import UnsupportedLayerError
from tfopt.exporting.int8.activations import MIDDLE, Activations, Quantized, range_behind, range_of
from tfopt.exporting.int8.layer_norm import fuse_layer_norms
from tfopt.exporting.int8.weights import KernelWeights, kernel_name
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import FLOAT32, AttrValue, copy_attributes, dtype_attr, producer, strings, text, types
from tfopt.graph.fold import CONVOLUTIONS, paddings_of
from tfopt.quantization.annotation.activations import NON_NEGATIVE
from tfopt.quantization.annotation.annotate import AnnotatedGraph
from tfopt.quantization.annotation.fusion import DATA_MOVEMENT_OPS, FAKE_QUANT, Fusion, before_data_movement
from tfopt.quantization.annotation.ranged_tensors import SHARED_RANGE_OPS, values_of


def lower_to_int8(graph: AnnotatedGraph, left_norms: Collection[str] = ()) -> FrozenGraph:
    """Returns the annotated graph with every fusion as an int8 kernel, and without fake quantization.

    It computes the same, up to one step of each quantized tensor. The layer normalisations whose last nodes are in
    `left_norms` do not get oneDNN's kernel.
    """
    fused = fuse_layer_norms(graph, left_norms)
    kernels = _Kernels(fused, GraphEditor(fused.graph_def), graph.fusions)
    for fusion in graph.fusions:
        kernels.add(fusion)
    return kernels.finish()


class _Kernels:
    """Adds a kernel for each fusion. A fusion must come after those that compute its input and its summand."""

    def __init__(self, graph: FrozenGraph, editor: GraphEditor, fusions: Sequence[Fusion]) -> None:
        self._graph = graph
        self._editor = editor
        self._shapes = graph.shapes()
        self._activations = Activations(editor, _unsigned_tensors(editor, fusions))
        self._quantized: dict[str, Quantized] = {}  # by the annotated tensor
        self._float_results: dict[str, str] = {}  # by the fusion's output

    def add(self, fusion: Fusion) -> None:
        if self._editor.nodes[fusion.op].op in CONVOLUTIONS:
            self._convolution(fusion)
        else:
            self._product(fusion)

    def finish(self) -> FrozenGraph:
        """Gives the float readers of each annotated tensor a float tensor, and removes the nodes that nothing reads."""
        editor = self._editor
        for tensor, held in self._quantized.items():
            for reader in [editor.nodes[name] for name in editor.consumers[tensor]]:
                if reader.op == "Shape":  # it takes any type, so it needs no Dequantize
                    reader.attr["T"].CopyFrom(dtype_attr(held.dtype))
                    editor.set_inputs(reader.name, [held.values])
        for name in editor.topological():
            node = editor.nodes[name]
            if node.op == FAKE_QUANT:
                held_here = self._quantized.get(name)
                source = self._activations.dequantize(name, held_here) if held_here else node.input[0]
                editor.redirect(name, source)
        editor.share_constants()
        return self._graph.edited(editor, self._float_results)

    def _convolution(self, fusion: Fusion) -> None:
        node, weights = self._editor.nodes[fusion.op], KernelWeights(self._editor, fusion)
        entering, padding = self._padded(fusion, weights)
        behind = range_behind(self._editor, fusion.output)
        if behind is None:
            raise UnsupportedLayerError(
                "Every quantized convolution must have a range on its result. Received: "
                f"{fusion.output!r} without one. Annotate it, or leave the convolution float."
            )
        summands = [self._read(fusion.summand)] if fusion.summand else []
        leaving = self._activations.leaving(behind, never_negative=fusion.activation is not None)
        bias = weights.add_bias(self._editor, entering, leaving.offset - sum(added.offset for added in summands))
        stored, *weight_range = weights.add(self._editor, entering)
        host = [entering.low, entering.high, *weight_range]
        host += [limit for added in (*summands, leaving) for limit in (added.low, added.high)]
        rectified = ["Relu"] if fusion.activation or summands else []
        kernel = self._editor.add(
            "_FusedQuantizedConv2D" if node.op == "Conv2D" else "_FusedQuantizedDepthwiseConv2D",
            kernel_name(fusion.op),
            [entering.values, stored, bias, *(added.values for added in summands), *host],
            Tinput=dtype_attr(entering.dtype),
            Tfilter=dtype_attr(tf.qint8),
            Tbias=FLOAT32,
            Tsummand=dtype_attr((*summands, leaving)[0].dtype),
            out_type=dtype_attr(leaving.dtype),
            Tdevice_inputs=types(entering.dtype, tf.qint8, tf.float32, *(added.dtype for added in summands)),
            Thost_inputs=types(*[tf.float32] * len(host)),
            Tdevice_outputs=types(leaving.dtype),
            Thost_outputs=types(tf.float32, tf.float32),
            fused_ops=strings(["BiasAdd", *(["Sum"] if summands else []), *rectified, "Requantize"]),
            **copy_attributes(node, ("strides", "dilations", "data_format")),
            **padding,
        )
        for added in summands:
            # The kernel writes into the summand's buffer. So TensorFlow must not merge the summand's node with an equal
            # node that has other readers. It never merges nodes with different attributes.
            self._editor.nodes[producer(added.values)].attr["_added_by"].CopyFrom(text(kernel))
        self._quantized[behind.name] = replace(leaving, values=kernel)

    def _product(self, fusion: Fusion) -> None:
        weights, entering = KernelWeights(self._editor, fusion), self._read(fusion.input)
        behind, activation = range_behind(self._editor, fusion.output), fusion.activation
        never_negative = activation is not None and activation.name in NON_NEGATIVE
        leaving = None if behind is None else self._activations.leaving(behind, never_negative=never_negative)
        if leaving is not None and leaving.offset and activation is not None:
            raise UnsupportedLayerError(
                "The result of a fused activation must have a range without a zero point. Received: "
                f"{fusion.output!r} with {leaving.span}. Annotate it with a symmetric range."
            )
        stored, *weight_range = weights.add(self._editor, entering)
        bias = weights.add_bias(self._editor, entering, leaving.offset if leaving else 0.0)
        host = [entering.low, entering.high, *weight_range, *([leaving.low, leaving.high] if leaving else [])]
        result = leaving.dtype if leaving else tf.float32
        kernel = self._editor.add(
            "_QuantizedMatMul",
            kernel_name(fusion.op),
            [entering.values, stored, bias, *host],
            T1=dtype_attr(entering.dtype),
            T2=dtype_attr(tf.qint8),
            Tbias=FLOAT32,
            U=FLOAT32,
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
            self._quantized[behind.name] = replace(leaving, values=kernel)
        else:
            self._editor.redirect(fusion.output, kernel)
            self._float_results[fusion.output] = kernel

    def _padded(self, fusion: Fusion, weights: KernelWeights) -> tuple[Quantized, Mapping[str, AttrValue]]:
        """Returns the tensor that a convolution's kernel reads, and the attributes of its padding."""
        held, node = self._read(fusion.input), self._editor.nodes[fusion.op]
        attributes = copy_attributes(node, ("padding", "explicit_paddings"))
        paddings = paddings_of(node, self._shapes[fusion.input], weights.steps.shape[:2])
        if not held.span.zero_point or (paddings is not None and not paddings.any()):
            return held, attributes
        if held.span.zero_point == MIDDLE:
            return self._activations.without_offset(held), attributes
        if paddings is None:
            raise UnsupportedLayerError(
                "The input of a convolution that pads it by an unknown number of zeros must have a range without a "
                f"zero point. Received: {fusion.input!r} with {held.span}. Annotate it with a symmetric range."
            )
        return self._activations.pad(f"{kernel_name(fusion.op)}/padded", held, paddings), {"padding": text("VALID")}

    def _read(self, tensor: str) -> Quantized:
        """Returns the quantized form of an annotated tensor, and adds the nodes that compute it."""
        if tensor in self._quantized:
            return self._quantized[tensor]
        node = self._editor.nodes[producer(tensor)]
        if node.op == FAKE_QUANT:
            result = self._joined(node) or self._activations.quantize(node)
        elif node.op in DATA_MOVEMENT_OPS and ":" not in tensor:
            result = self._activations.pass_through(node, self._read(node.input[0]))
        else:
            raise UnsupportedLayerError(
                f"Every input of a quantized op must have a range. Received: {tensor!r} ({node.op}) without one. "
                "Annotate it, or leave the op float."
            )
        self._quantized[tensor] = result
        return result

    def _joined(self, node: Any) -> Quantized | None:
        """Computes the joint that a fake-quantization node reads, if all of its inputs have the node's range."""
        joint = self._editor.nodes[producer(node.input[0])]
        if joint.op not in SHARED_RANGE_OPS or not all(self._has_range(source, node) for source in values_of(joint)):
            return None
        held = self._activations.of_range(range_of(node))
        parts = [self._activations.without_offset(self._read(source)) for source in values_of(joint)]
        if any((part.dtype, part.span.zero_point) != (held.dtype, held.span.zero_point) for part in parts):
            return None
        return self._activations.join(joint, held, parts)

    def _has_range(self, tensor: str, node: Any) -> bool:
        """Whether a tensor comes from a fake-quantization node of the same range as `node`."""
        origin = self._editor.nodes[producer(before_data_movement(self._editor, tensor))]
        return origin.op == FAKE_QUANT and range_of(origin) == range_of(node)


def _unsigned_tensors(editor: GraphEditor, fusions: Sequence[Fusion]) -> set[str]:
    """Returns the annotated tensors that must be unsigned bytes: summands, and sums without a Relu."""
    added = [fusion for fusion in fusions if fusion.summand]
    summands = {before_data_movement(editor, fusion.summand) for fusion in added if fusion.summand}
    results = (range_behind(editor, fusion.output) for fusion in added)
    return summands | {node.name for node in results if node is not None}
