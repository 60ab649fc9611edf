"""The model that a shrunk model must equal: its parent, in which all weights of the removed channels are zero."""

import keras
import numpy as np

from tfopt.pruning.structured.groups import ChannelGroups
from tfopt.pruning.structured.shrink import ShrinkResult


def examples(model: keras.Model, count: int = 3) -> list[np.ndarray]:
    """Returns random inputs; open sizes become 12."""
    random = np.random.default_rng(0)
    shapes = [(count, *(size or 12 for size in tensor.shape[1:])) for tensor in model.inputs]
    return [
        random.integers(1, 20, shape).astype("int32")
        if "int" in tensor.dtype
        else random.normal(size=shape).astype("f4")
        for shape, tensor in zip(shapes, model.inputs, strict=True)
    ]


def give_statistics(model: keras.Model) -> None:
    """Gives biases and normalizations random values. At their initial zeros and ones, errors would stay hidden."""
    random = np.random.default_rng(1)
    for variable in model.variables:
        if len(variable.shape) == 1 and "float" in str(variable.dtype):
            variable.assign(0.2 + random.random(variable.shape) / 2)


def outputs(model: keras.Model, inputs: list[np.ndarray]) -> list[np.ndarray]:
    return [each.numpy() for each in keras.tree.flatten(model(inputs if len(inputs) > 1 else inputs[0]))]


def kept_units(channels: ChannelGroups, result: ShrinkResult) -> np.ndarray:
    """Returns a boolean for each unit of the parent, True where the shrunk model has it."""
    kept = channels.all_kept
    for group in channels.groups:
        kept[group.units] = False
        kept[group.units[list(result.channels[group.name])]] = True
    return kept


def masked_parent(model: keras.Model, result: ShrinkResult, channels: ChannelGroups | None = None) -> keras.Model:
    """Sets the weights of the removed channels to zero, in place, and returns the model."""
    channels = ChannelGroups(model) if channels is None else channels
    kept = kept_units(channels, result)
    for weight in channels.trace.weights.values():
        weight.variable.assign(np.where(channels.mask(weight, kept), weight.variable.numpy(), 0))
    return model


def assert_equals_masked_parent(
    model: keras.Model, result: ShrinkResult, channels: ChannelGroups | None = None, mattered: bool = True
) -> None:
    """Compares outputs on random inputs, after setting the weights of the removed channels in the parent to zero.

    With `mattered` it also asserts that this changed the outputs of the parent.
    """
    inputs = examples(model)
    whole = outputs(model, inputs)
    masked_parent(model, result, channels)
    expected, got = outputs(model, inputs), outputs(result.model, inputs)
    for before, masked, shrunk in zip(whole, expected, got, strict=True):
        assert np.abs(shrunk - masked).max() <= 1e-5 * max(np.abs(masked).max(), 1)
        assert not (mattered and np.allclose(before, masked))
