"""From pixels to the input of a model: resize, scale, normalise.

The steps take the place of the input's placeholder, so nothing behind it changes, and ranges of int8 stay those of the
model's own input. Calibration data is what the model takes. For the checks of an artifact it becomes pixels again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tfopt.errors import ConfigError, unknown_name
from tfopt.exporting.processing.config import PreprocessingConfig
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.edit import FLOAT32, INT32, AttrValue, dtype_attr

Graph = TypeVar("Graph", bound=FrozenGraph)
BYTES = dtype_attr(tf.uint8)
WHITE = 255
RGB = 3


def image_input(graph: FrozenGraph, config: PreprocessingConfig) -> str:
    """Returns the name of the input that becomes pixels.

    Raises:
        ConfigError: There is no such input, there are several, or the settings do not fit its sizes.
    """
    images = [name for name, spec in graph.inputs.items() if _is_image(spec)]
    if config.input is not None and config.input not in graph.inputs:
        raise unknown_name("input", config.input, graph.inputs)
    chosen = images if config.input is None else [config.input] if config.input in images else []
    if len(chosen) != 1:
        found = ", ".join(f"{name} {spec.dtype.name} {spec.shape}" for name, spec in graph.inputs.items())
        raise ConfigError(
            "preprocessing needs one input of images: float32 [batch, height, width, channels] with a known number of "
            f"channels. Received: {graph.name!r} with {found}. Name it with input, or leave preprocessing out."
        )
    _, height, width, channels = graph.inputs[chosen[0]].shape.as_list()
    for name in ("mean", "std"):
        if len(getattr(config, name)) not in (0, 1, channels):
            raise ConfigError(
                f"{name} must have one number, or one for each of the {channels} channels of {chosen[0]!r}. Received: "
                f"{name}={getattr(config, name)}."
            )
    if config.reverse_channels and channels != RGB:
        raise ConfigError(
            f"reverse_channels is for images of {RGB} channels, RGB pixels for a model that takes BGR. Received: "
            f"reverse_channels=True, and {chosen[0]!r} has {channels} channel{'s' if channels > 1 else ''}. Leave it "
            "out."
        )
    wanted = config.size or (height, width)
    if any(mine not in (None, size) for mine, size in zip((height, width), wanted, strict=True)):
        raise ConfigError(
            f"size must be that of the model's input {chosen[0]!r}, {(height, width)}. Received: size={config.size}. "
            "Leave it out."
        )
    if (wanted[0] is None) != (wanted[1] is None):
        raise ConfigError(
            f"size must be given where the model fixes the height or the width alone. Received: size=None, and "
            f"{chosen[0]!r} has {(height, width)}. Pass size=(height, width)."
        )
    return chosen[0]


def _is_image(spec: tf.TensorSpec) -> bool:
    if spec.dtype != tf.float32 or spec.shape.rank != 4 or spec.shape[-1] is None:
        return False
    channels_first = spec.shape[1] in (1, RGB) and spec.shape[-1] > RGB + 1  # else images of 3 rows and many channels
    return not channels_first


def from_pixels(graph: Graph, config: PreprocessingConfig, *, for_tensorflow: bool) -> Graph:
    """Returns the graph with pixels as its input of images.

    TensorFlow's own kernel resizes bytes to floats, which for large photos takes a fraction of the time of making all
    bytes floats before. Other formats have no such op.
    """
    name = image_input(graph, config)
    spec, editor = graph.inputs[name], GraphEditor(graph.graph_def, graph.origins)
    batch, height, width, channels = spec.shape.as_list()
    place, size = spec.name, config.size or (height, width)
    shape = tf.TensorShape([batch, None, None, channels])
    pixels = editor.add("Placeholder", f"{place}/pixels", (), dtype=BYTES, shape=AttrValue(shape=shape.as_proto()))
    values, kind, resizes = pixels, BYTES, None not in size
    if not (resizes and for_tensorflow):
        values, kind = editor.add("Cast", f"{place}/cast", [pixels], SrcT=BYTES, DstT=FLOAT32), FLOAT32
    if resizes:
        target = editor.add_constant(f"{place}/size", np.array(size, np.int32))
        half = AttrValue(b=True)
        values = editor.add("ResizeBilinear", f"{place}/resize", [values, target], T=kind, half_pixel_centers=half)
    if config.reverse_channels:
        order = editor.add_constant(f"{place}/order", np.arange(channels, dtype=np.int32)[::-1].copy())
        axis = editor.add_constant(f"{place}/axis", np.array(3, np.int32))
        types = {"Tparams": FLOAT32, "Tindices": INT32, "Taxis": INT32}
        values = editor.add("GatherV2", f"{place}/reverse", [values, order, axis], **types)
    factor, offset = _affine(config)
    values = editor.add("Mul", f"{place}/scale", [values, editor.add_constant(f"{place}/factor", factor)], T=FLOAT32)
    editor.become(place, "Sub", [values, editor.add_constant(f"{place}/offset", offset)], T=FLOAT32)
    inputs = {**graph.inputs, name: tf.TensorSpec(shape, tf.uint8, name=pixels)}
    return replace(graph, inputs=inputs).edited(editor)  # type: ignore[return-value]


def _affine(config: PreprocessingConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the factor of the pixels, and what is subtracted then."""
    mean, std = (np.array(given or (usual,), np.float64) for given, usual in ((config.mean, 0), (config.std, 1)))
    return (config.scale / std).astype(np.float32), (mean / std).astype(np.float32)


def to_pixels(examples: Mapping[str, np.ndarray], name: str, config: PreprocessingConfig) -> dict[str, np.ndarray]:
    """Returns examples of a model with its input `name` as the nearest pixels.

    Raises:
        ConfigError: The values cannot come from pixels, or only from those of black images.
    """
    values = np.asarray(examples[name], np.float64)
    factor, offset = _affine(config)
    pixels = (values + offset) / factor
    low, high = float(pixels.min(initial=0)), float(pixels.max(initial=0))
    if low < -1 or high > WHITE + 1 or (high <= 1 and low != high):
        raise ConfigError(
            "calibration_data must be what the model takes: pixels after the steps of preprocessing. Received: values "
            f"of {name!r} from {values.min():g} to {values.max():g}, which are pixels from {low:g} to {high:g} and not "
            f"from 0 to {WHITE}. Check scale, mean and std, or pass the data as for the training."
        )
    rounded = np.clip(np.rint(pixels), 0, WHITE).astype(np.uint8)
    return {**examples, name: rounded[..., ::-1] if config.reverse_channels else rounded}
