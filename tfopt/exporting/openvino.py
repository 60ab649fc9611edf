"""Writes an artifact's graph for OpenVINO: model.xml, and its weights in model.bin. It is made from the ONNX model."""

from __future__ import annotations

import errno
from pathlib import Path

from tfopt.errors import UnsupportedModelError
from tfopt.exporting.config import DEFAULT_SIGNATURE, ExportConfig
from tfopt.exporting.formats import FORMATS, without_telemetry
from tfopt.exporting.lowering import Lowered
from tfopt.exporting.onnx.strides import slice_before_strided_products
from tfopt.exporting.onnx.write import onnx_model

with without_telemetry():
    import openvino


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
    try:  # the precision of the weights is already that of the config
        openvino.save_model(read, directory / FORMATS["openvino"].file, compress_to_fp16=False)
    except RuntimeError as error:  # as of every file that OpenVINO cannot write; it does not tell why
        raise OSError(errno.ENOSPC, f"OpenVINO could not write its files: {error}") from error
