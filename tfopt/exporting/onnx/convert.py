"""Converts a frozen graph to ONNX with tf2onnx. Beside missing_ops.py no other module uses that package.

tf2onnx moves images from NHWC to NCHW. It moves the transposition of a weight into the constant, and that of an
activation past the pair of quantize and dequantize that stands for fake quantization. So neither is left before a
convolution.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import onnx
import tensorflow as tf

from tfopt.errors import UnsupportedModelError
from tfopt.exporting.onnx.missing_ops import HANDLERS
from tfopt.exporting.onnx.resizes import known_resizes, set_resizes
from tfopt.exporting.paired import rounded_weights
from tfopt.exporting.sign_bits import read_signs
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import attribute, dtype_attr, integers, is_nhwc, producer, text
from tfopt.quantization.annotation.fusion import FAKE_QUANT, FAKE_QUANT_WEIGHTS

OPSET = 18  # the newest that tf2onnx writes
PRODUCER = "tfopt"
NEVER_NEGATIVE = ("Relu", "Relu6", "Sigmoid", "Softplus", "Softmax", "Abs", "Square", "Exp")
# What tf2onnx raises where it cannot convert a node.
FAILURES = (ValueError, TypeError, LookupError, RuntimeError, AttributeError, AssertionError)


def convert(graph: FrozenGraph, *, signed: bool = False) -> onnx.ModelProto:
    """Returns a graph as an ONNX model, with the names of its inputs and outputs.

    Activations are quantized where the graph has fake quantization: all to unsigned bytes, because ONNX Runtime has no
    kernel from signed to unsigned ones, or with `signed` all to signed bytes. Its weights are rounded, and are still
    float.

    Raises:
        UnsupportedModelError: The graph has look-up tables, or an op that ONNX does not have. The message names it.
    """
    from tf2onnx import optimizer, tfonnx  # its import takes long

    if graph.tables:
        raise UnsupportedModelError(
            f"A model in ONNX must have no look-up table. Received: {graph.name!r} with {len(graph.tables)} of them. "
            "Export the part that takes numbers, or write format='saved_model'."
        )
    if both := graph.inputs.keys() & graph.outputs.keys():
        raise UnsupportedModelError(
            f"An output of a model in ONNX must have another name than each input. Received: {sorted(both)} in "
            f"{graph.name!r}. Rename it, as in keras.Model(inputs, {{'result': output}})."
        )
    prepared, outputs = _prepared(graph)
    resizes = known_resizes(prepared)
    inputs = [f"{spec.name}:0" for spec in graph.inputs.values()]
    named = dict(zip(inputs, graph.inputs, strict=True)) | dict(zip(outputs, graph.outputs, strict=True))
    handlers: dict[str, tuple[Any, list[str]]] = {
        FAKE_QUANT: (partial(_quantize_activation, signed=signed), []),
        **HANDLERS,
    }
    with tf.Graph().as_default() as imported, _quiet() as complaints:
        tf.graph_util.import_graph_def(prepared, name="")
        try:
            converted = tfonnx.process_tf_graph(
                imported,
                opset=OPSET,
                custom_op_handlers=handlers,
                input_names=inputs,
                output_names=outputs,
                tensors_to_rename=named,
            )
            set_resizes(converted, resizes)
            _pool_globally(converted)
            model = optimizer.optimize_graph(converted, catch_errors=False, optimizers=_optimizers()).make_model(
                graph.name
            )
        except (*FAILURES, onnx.checker.ValidationError) as error:
            raise _not_convertible(graph, " ".join([*complaints, str(error)])) from error
    for node in all_nodes(model.graph):
        if not onnx.defs.has(node.op_type, OPSET, node.domain):
            raise _not_convertible(graph, f"{node.name!r} is a {node.op_type}, which ONNX does not have")
    model.producer_name, model.producer_version = PRODUCER, version(PRODUCER)
    _name_sizes(model)
    return model


def _not_convertible(graph: FrozenGraph, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Every op of a model in ONNX must have an equivalent there. Received: {graph.name!r} ({reason}). Write "
        "format='saved_model', or replace the layer that uses it."
    )


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for value in node.attribute:
            for body in [value.g] if value.HasField("g") else value.graphs:
                yield from all_nodes(body)


def _prepared(graph: FrozenGraph) -> tuple[Any, list[str]]:
    """Returns the graph for tf2onnx, and the tensors of its outputs, each with a node of its own.

    Fake quantization of weights becomes the constant that it computes.
    """
    editor = GraphEditor(graph.graph_def)
    for name in [name for name, node in editor.nodes.items() if node.op == FAKE_QUANT_WEIGHTS]:
        editor.redirect(name, editor.add_constant(f"{name}/rounded", rounded_weights(editor, name)[0]))
    _keep_out_of_range_off(editor)
    _pad_in_pools(editor)
    read_signs(editor)
    outputs = []
    for tensor, spec in graph.outputs.values():
        name = editor.add("Identity", "onnx_output", [tensor], T=dtype_attr(spec.dtype))
        outputs.append(f"{name}:0")
    placeholders = [spec.name for spec in graph.inputs.values()]
    return editor.graph_def([each.removesuffix(":0") for each in outputs], keep=placeholders), outputs


def _keep_out_of_range_off(editor: GraphEditor) -> None:
    """Makes a negative index of one-hot too large: ONNX counts it from the end, and TensorFlow leaves its row off."""
    for name in [name for name, node in editor.nodes.items() if node.op == "OneHot"]:
        node = editor.nodes[name]
        index, depth = node.input[:2]
        kind = node.attr["TI"]
        zero = editor.add("ZerosLike", f"{name}/zero", [index], T=kind)
        negative = editor.add("Less", f"{name}/negative", [index, zero], T=kind)
        filled = editor.add("OnesLike", f"{name}/one", [index], T=kind)
        if kind.type != tf.int32.as_datatype_enum:
            depth = editor.add("Cast", f"{name}/depth", [depth], SrcT=dtype_attr(tf.int32), DstT=kind)
        beyond = editor.add("Mul", f"{name}/beyond", [filled, depth], T=kind)
        chosen = editor.add("SelectV2", f"{name}/index", [negative, beyond, index], T=kind)
        editor.set_inputs(name, [chosen, *node.input[1:]])


def _pad_in_pools(editor: GraphEditor) -> None:
    """Makes zeros before a maximum of windows its padding, where no value is below zero: it is then one int8 kernel."""
    for name in [name for name, node in editor.nodes.items() if node.op == "MaxPool" and is_nhwc(node)]:
        node = editor.nodes[name]
        pad = editor.nodes[producer(node.input[0])]
        amounts = editor.constant(pad.input[1]) if pad.op == "Pad" else None
        if amounts is None or attribute(node, "padding").s != b"VALID" or not _is_never_negative(editor, pad.input[0]):
            continue
        # Padding counts as the least number, so each window must reach a value.
        if (amounts < np.reshape(attribute(node, "ksize").list.i, (4, 1))).all():
            node.attr["padding"].CopyFrom(text("EXPLICIT"))
            node.attr["explicit_paddings"].CopyFrom(integers(amounts.reshape(-1).tolist()))
            editor.set_inputs(name, [pad.input[0]])


def _is_never_negative(editor: GraphEditor, tensor: str) -> bool:
    node = editor.nodes[producer(tensor)]
    return node.op in NEVER_NEGATIVE or (node.op == FAKE_QUANT and _is_never_negative(editor, node.input[0]))


def _quantize_activation(context: Any, node: Any, name: str, arguments: Sequence[Any], *, signed: bool) -> None:
    """Puts the pair of quantize and dequantize in place of fake quantization. tf2onnx refuses signed ranges itself."""
    low, high = (node.get_attr(each).f for each in ("min", "max"))
    if node.get_attr("narrow_range").i:
        scale, zero = high / 127, np.array(0, np.int8) if signed else np.array(128, np.uint8)
    else:
        scale = (high - low) / 255
        zero = np.array(np.clip(np.rint(-low / scale), 0, 255), np.uint8)
    shape, dtype = context.get_shape(node.input[0]), context.get_dtype(node.input[0])
    source, result = node.input[0], node.output[0]
    context.remove_node(node.name)
    grid = [
        context.make_const(f"{node.name}/{kind}", value).output[0]
        for kind, value in (("scale", np.array(scale, np.float32)), ("zero_point", zero))
    ]
    quantized = context.make_node(
        "QuantizeLinear",
        [source, *grid],
        name=f"{node.name}/quantize",
        shapes=[shape],
        dtypes=[onnx.helper.np_dtype_to_tensor_dtype(zero.dtype)],
    )
    context.make_node(
        "DequantizeLinear",
        [quantized.output[0], *grid],
        name=node.name,
        outputs=[result],
        shapes=[shape],
        dtypes=[dtype],
    )


def _optimizers() -> dict[str, Any]:
    """Returns what tf2onnx simplifies graphs with.

    It fails on pairs in front of a loop that reads them inside. What it makes of an einsum has an Unsqueeze without
    axes, of which OpenVINO makes one with an axis; the op itself has a kernel in each runtime.
    """
    from tf2onnx import optimizer
    from tf2onnx.optimizer.q_dq_optimizer import QDQOptimizer

    class WithinOneGraph(QDQOptimizer):
        def _optimize_dequantize_and_node(self, dequant_node: Any, node: Any, graph: Any) -> bool:
            return node.graph is graph and super()._optimize_dequantize_and_node(dequant_node, node, graph)

    kept = {name: kind for name, kind in optimizer._get_optimizers().items() if name != "einsum_optimizer"}
    return {**kept, "q_dq_optimizer": WithinOneGraph}


def _pool_globally(context: Any) -> None:
    """Writes the mean of each image as a pooling. ONNX Runtime computes that in int8, and a ReduceMean in float."""
    for node in [each for each in context.get_nodes() if each.type == "ReduceMean"]:
        source, result, axes = node.input[0], node.output[0], node.inputs[-1]
        while axes.type == "Cast":
            axes = axes.inputs[0]
        shape, dtype = context.get_shape(result), context.get_dtype(source)
        is_of_places = axes.is_const() and sorted(np.ravel(axes.get_tensor_value())) == [1, 2]
        is_image = len(context.get_shape(source) or ()) == 4 and dtype == onnx.TensorProto.FLOAT
        if not is_of_places or not is_image:
            continue
        keeps = bool(node.get_attr_value("keepdims", 1))
        context.remove_node(node.name)
        channels_first = context.make_node("Transpose", [source], attr={"perm": [0, 3, 1, 2]}, dtypes=[dtype])
        pooled = context.make_node("GlobalAveragePool", channels_first.output, name=f"{node.name}/pool", dtypes=[dtype])
        made: dict[str, Any] = {"name": node.name, "outputs": [result], "shapes": [shape], "dtypes": [dtype]}
        if keeps:
            context.make_node("Transpose", pooled.output, attr={"perm": [0, 2, 3, 1]}, **made)
        else:
            axes = context.make_const(f"{node.name}/places", np.array([2, 3], np.int64))
            context.make_node("Squeeze", [*pooled.output, *axes.output], **made)


def _name_sizes(model: onnx.ModelProto) -> None:
    """Names the open sizes of inputs: "batch" for the first axis, else the input's name and the axis."""
    for value in model.graph.input:
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if not size.HasField("dim_value"):
                size.dim_param = "batch" if axis == 0 else f"{value.name}_{axis}"
    del model.graph.value_info[:]


@contextlib.contextmanager
def _quiet() -> Iterator[list[str]]:
    """Keeps what tf2onnx logs from the terminal, and gives its errors."""
    complaints: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:
                complaints.append(record.getMessage().splitlines()[0])

    logger, handler = logging.getLogger("tf2onnx"), Kept()
    before = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield complaints
    finally:
        logger.removeHandler(handler)
        logger.propagate = before[0]
        logger.setLevel(before[1])
