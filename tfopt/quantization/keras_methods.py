"""Keras' weight quantization of Dense, EinsumDense and Embedding for transformers: int8, int4, GPTQ and AWQ.

Keras changes the model itself. Here it changes a copy, and a report lists the changed layers.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from tfopt.compat.layers import direct_layers, layers_inside
from tfopt.errors import ConfigError, UnsupportedModelError, warn
from tfopt.models.copy_check import check_quantized
from tfopt.models.copying import copy_model
from tfopt.report import Change, PassReport, Skip


@dataclass(frozen=True, kw_only=True)
class KerasQuantized:
    """A Keras model that Keras quantized.

    Attributes:
        model: The quantized copy, which exports like any other model. (Keras 3.15 can save a model of GPTQ or AWQ as
            `.keras`, but cannot load it again.)
        report: How each layer with weights was quantized, or why not. The metric "weight_bytes_ratio" is the size of
            the variables, divided by their size in the original model.
    """

    model: keras.Model
    report: PassReport


def quantize_with_keras(model: Any, config: Any, calibration_data: Any = None) -> KerasQuantized:
    """Quantizes a copy of a Keras 3 model by `model.quantize`.

    Keras must be able to rebuild the model from its config. GPTQ and AWQ need the blocks of the model: from
    `config.quantization_layer_structure`, a dict of layers or their names, or from the model's method
    `get_quantization_layer_structure`. If their `config.dataset` is None, the calibration data are texts or tokens.

    Raises:
        UnsupportedModelError: The model is not built or cannot be copied, or Keras cannot quantize it.
        ConfigError: GPTQ or AWQ has no calibration data.
    """
    if not isinstance(model, keras.Model) or not model.built:
        raise UnsupportedModelError(
            f"model must be a built keras.Model for Keras' own quantization. Received: {type(model).__name__}. "
            "Pass a Keras 3 model, and call it once on a batch if it is not built."
        )
    if hasattr(config, "dataset"):
        config = copy.copy(config)
        config.dataset = calibration_data if config.dataset is None else config.dataset
        if config.dataset is None:
            raise ConfigError(
                f"calibration_data must be given for {config.mode}. Received: None. Pass texts, or arrays of tokens."
            )
        config.tokenizer = config.tokenizer or np.asarray  # arrays of tokens need no tokenizer, but Keras demands one
    elif calibration_data is not None:
        raise ConfigError(f"Keras' {config.mode} takes no calibration_data. Received: some. Leave it out.")
    clone = _clone(model)
    structure = config.quantization_layer_structure if hasattr(config, "dataset") else None
    if structure is not None:
        config.quantization_layer_structure = {
            part: [_counterpart(clone, layer) for layer in listed] for part, listed in structure.items()
        }
    for layer in layers_inside(clone):
        if not layer.built and hasattr(layer, "get_vocabulary"):
            layer.build(None)  # the table inside a TextVectorization: Keras quantizes no model with a layer not built
    before = _weight_bytes(clone)
    try:
        with warnings.catch_warnings():
            # Keras warns for each layer without weights. The report lists all other layers.
            warnings.simplefilter("ignore")
            clone.quantize(config.mode, config=config)
    except (ValueError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedModelError(f"Keras cannot quantize {model.name!r} by {config.mode}: {reason}") from error
    check_quantized(model, clone, list(zip(layers_inside(model)[1:], layers_inside(clone)[1:], strict=False)))
    if structure is not None:
        config.quantization_layer_structure = None  # the layers hold the config, and it is saved with them
    changed, skipped = [], []
    for layer in layers_inside(clone):
        named = {"name": layer.path, "kind": type(layer).__name__}
        if layer.variables and not direct_layers(layer):
            if layer.quantization_mode:
                changed.append(Change(**named, detail=layer.dtype_policy.name))
            else:
                skipped.append(Skip(**named, reason="Keras quantizes no such layer"))
    metrics = {"weight_bytes_ratio": _weight_bytes(clone) / before}
    report = PassReport(name=f"keras_{config.mode}", changed=changed, skipped=skipped, metrics=metrics)
    report.warn_if_unchanged()
    return KerasQuantized(model=clone, report=report)


def _clone(model: keras.Model) -> keras.Model:
    """Returns a copy, which is compiled if the model is, as that of keras.models.clone_model."""
    clone = copy_model(model)
    if model.compiled:
        try:
            clone.compile_from_config(model.get_compile_config())
        except (ValueError, TypeError, NotImplementedError) as error:
            warn(
                f"The quantized copy of {model.name!r} is not compiled, because Keras cannot rebuild what compile() "
                f"got: {str(error).splitlines()[0]} Compile it yourself."
            )
    return clone


def _counterpart(clone: keras.Model, layer: keras.Layer | str) -> keras.Layer:
    name = layer if isinstance(layer, str) else layer.name
    found = [own for own in layers_inside(clone) if own.name == name]
    if len(found) != 1:
        raise ConfigError(
            f"quantization_layer_structure must name layers of the model, each once. Received: {name!r}, "
            f"which is the name of {len(found)} layers. Use a name that exactly one layer has."
        )
    return found[0]


def _weight_bytes(model: keras.Model) -> int:
    return sum(variable.numpy().nbytes for variable in model.variables)
