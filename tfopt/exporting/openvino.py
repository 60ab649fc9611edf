"""Writes an artifact's graph for OpenVINO: model.xml, and its weights in model.bin. It is made from the ONNX model."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.errors import UnsupportedModelError
from tfopt.exporting.config import DEFAULT_SIGNATURE, ExportConfig
from tfopt.exporting.formats import FORMATS, without_telemetry
from tfopt.exporting.lowering import Lowered
from tfopt.exporting.onnx.strides import slice_before_strided_products
from tfopt.exporting.onnx.write import onnx_model

with without_telemetry():
    import openvino
    from openvino import opset13

ALMOST_ZERO = 1e-30
BY_CHANNEL = ("Add", "Subtract", "Multiply", "Divide")
CLIPS = ("Relu", "Clamp")


def write(lowered: Lowered, directory: Path, config: ExportConfig) -> None:
    """Writes model.xml and model.bin."""
    try:
        model = onnx_model(lowered, config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"A model for OpenVINO is made from its ONNX model. {error}") from error
    if lowered.precision == "int8":
        slice_before_strided_products(model)
    try:
        # openvino.convert_model would do the same, and report the use to its maker.
        read = openvino.Core().read_model(model.SerializeToString())
    except RuntimeError as error:
        graph = lowered.graphs[DEFAULT_SIGNATURE]
        raise UnsupportedModelError(
            f"Every op of a model for OpenVINO must have an equivalent there. Received: {graph.name!r} "
            f"({' '.join(str(error).split())}). Write format='saved_model', or replace the layer that uses it."
        ) from error
    for node in read.get_ops():
        if node.get_type_name() == "TopK":
            node.set_attribute("stable", True)  # as ONNX has it: of equal values the first comes first
        elif node.get_type_name() == "FakeQuantize":
            _set_limits_by_channel(node)
        elif node.get_input_size() and _pads_zeros(before := node.input_value(0).get_node()):
            _keep_apart(before, node)
    try:  # the precision of the weights is already that of the config
        openvino.save_model(read, directory / FORMATS["openvino"].file, compress_to_fp16=False)
    except RuntimeError as error:  # as of every file that OpenVINO cannot write; it does not tell why
        raise OSError(errno.ENOSPC, f"OpenVINO could not write its files: {error}") from error


def _pads_zeros(node: Any) -> bool:
    is_constant = node.get_type_name() == "Pad" and node.get_attributes()["pad_mode"] == "constant"
    value = node.input_value(3).get_node() if is_constant and node.get_input_size() > 3 else None
    return value is not None and value.get_type_name() == "Constant" and not value.data.any()


def _keep_apart(pad: Any, reader: Any) -> None:
    """Keeps OpenVINO from joining a Pad with a layer behind it that it joins wrongly (measured with OpenVINO 2026.4).

    With open sizes it forgets the padding of that layer. An average of int8 values then begins with bytes of 0 that are
    no zeros. It joins a Pad of zeros whose amounts are constants, so an average gets almost zeros, and a convolution
    amounts that only the sizes of a call tell: only zeros reach its int8 kernel.
    """
    if reader.get_type_name() == "AvgPool":
        almost = opset13.constant(ALMOST_ZERO, pad.get_output_element_type(0))
        pad.input(3).replace_source_output(almost.output(0))
    elif reader.get_attributes().get("auto_pad", "").startswith("same"):
        sizes = opset13.shape_of(pad.input_value(0))
        amounts = opset13.add(pad.input_value(1), opset13.subtract(sizes, sizes))
        pad.input(1).replace_source_output(amounts.output(0))


def _set_limits_by_channel(rounding: Any) -> None:
    """Gives a rounding behind a bias limits that are not the same in all channels.

    OpenVINO moves the bias into the rounding. With open sizes that may be an op of its own, which adds the bias of the
    first channel to all of them (measured with OpenVINO 2026.4), unless its limits have an axis of channels too.
    """
    shape = rounding.get_output_partial_shape(0)
    if len(shape) < 3 or shape[1].is_dynamic or all(size.is_static for size in list(shape)[2:]):
        return
    before = rounding.input_value(0).get_node()
    while before.get_type_name() in CLIPS:
        before = before.input_value(0).get_node()
    channels = shape[1].get_length()
    given = [each.get_partial_shape() for each in before.input_values()]
    if before.get_type_name() not in BY_CHANNEL or not any(
        each.is_static and math.prod(each.to_shape()) == channels for each in given
    ):
        return
    for place in (1, 2):
        limit = rounding.input_value(place).get_node().data
        limits = np.full((1, channels, *[1] * (len(shape) - 2)), limit)
        limits[0, 0] = np.nextafter(limit, np.float32(0)) if limit else ALMOST_ZERO
        rounding.input(place).replace_source_output(opset13.constant(limits).output(0))
