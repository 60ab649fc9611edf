"""Traces a model into a graph for a given batch, without running it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import ConfigError, UnsupportedModelError


def forward_graph(model: keras.Model, specs: Any) -> tf.Graph:
    """Returns the graph of a forward pass in inference."""
    return tf.function(lambda inputs: model(inputs, training=False)).get_concrete_function(specs).graph


@contextmanager
def checks_open_size(open_size: int | None) -> Iterator[None]:
    """Raises ConfigError for what Keras or TensorFlow raise in a trace whose open sizes were filled in."""
    try:
        yield
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        if open_size is None:
            raise
        found = re.search(
            r"Exception encountered when calling (\w+).*\s+(?:\x1b\[1m)?(.*?)( for '\{\{|\x1b|\n|$)", str(error)
        )
        reason = f"{found[1]}: {found[2]}" if found else str(error).splitlines()[-1]
        raise ConfigError(
            f"open_size must fit the layers of the model. Received: open_size={open_size}, and {reason}. Pass another "
            "size, for example a multiple of 32."
        ) from error


def input_specs(model: keras.Model, batch_size: int, open_size: int | None = None, inputs: Any = None) -> Any:
    """Returns the shape and the dtype of a batch for each input of a model, in the structure of its inputs.

    Args:
        model: A built Keras model of any kind.
        batch_size: Number of examples. An input with a fixed batch keeps its own.
        open_size: Size of the other open dimensions, such as the length of a sequence.
        inputs: An array or `tf.TensorSpec` for each input, whose first dimension is the batch. By default, a functional
            or Sequential model gives its own inputs, and another model gives the shapes of its first call.
    Raises:
        ConfigError: The model has an open dimension, and open_size is None.
        UnsupportedModelError: The model is not built, or its inputs are unknown.
    Example:
        >>> input_specs(keras.Sequential([keras.Input((None, 8)), keras.layers.ReLU()]), 2, open_size=16).shape
        TensorShape([2, 16, 8])
    """
    if not model.built:
        raise UnsupportedModelError(
            f"The model must be built. Received: {model.name!r}, which is not. Call it once on a batch."
        )

    def spec(value: Any) -> tf.TensorSpec:
        first, *others = value.shape
        if None in others and open_size is None:
            raise ConfigError(
                "open_size must be given for a model with an open dimension. "
                f"Received: open_size=None, an input of shape {tuple(value.shape)}. Pass for example open_size=128."
            )
        sizes = [open_size if size is None else int(size) for size in others]
        return tf.TensorSpec([batch_size if first is None else int(first), *sizes], value.dtype)

    return keras.tree.map_structure(spec, _inputs(model) if inputs is None else _with_open_batch(inputs))


def _with_open_batch(inputs: Any) -> Any:
    return keras.tree.map_structure(lambda value: tf.TensorSpec([None, *value.shape[1:]], value.dtype), inputs)


def _inputs(model: keras.Model) -> Any:
    found = getattr(model, "input", None) if getattr(model, "inputs", None) else None
    if found is not None:
        return found
    # What the model was built with: one shape, or the shape of each argument of its call.
    built = model.get_build_config() or {}
    shapes = built.get("shapes_dict") or {"input_shape": built.get("input_shape")}
    shape = next(iter(shapes.values()))
    if len(shapes) > 1 or shape is None:
        raise UnsupportedModelError(
            f"The model must tell its inputs. Received: {model.name!r}, whose inputs are unknown. "
            "Pass inputs, for example inputs=tf.TensorSpec((None, 28, 28, 1))."
        )
    return keras.tree.map_shape_structure(lambda sizes: tf.TensorSpec([None, *sizes[1:]]), shape)
