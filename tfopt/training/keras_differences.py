"""Finds the layers of a model that tfopt's step trains in a different way than Keras' step on one device.

There are two kinds. The first kind is embeddings. The gradient of an embedding is a list of rows. A row occurs as often
as the batch names it. tfopt sums the gradients of each row, so that the update does not depend on how a batch is
divided. Keras' optimizers use them one by one: they square or clip each by itself. If the update is linear in the
gradient, both ways give the same result.

The second kind is layers that change a state of their own when they are called, such as a counter. tfopt calls them for
every micro-batch, on every replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from tfopt.compat.layers import layers_inside, own_non_trainable_variables
from tfopt.compat.optimizers import inner_optimizer
from tfopt.models.structure import layer_path
from tfopt.report import Change, Skip

# Without clipping, their update for the sum of a row's gradients is the same as for the single gradients.
SUM_OR_PARTS = (keras.optimizers.SGD, keras.optimizers.Lion)
# Keras' own layers change no state in training, except these and BatchNormalization, which the documentation describes.
CHANGING = (keras.layers.SpectralNormalization, keras.layers.RNN)


def summed_embeddings(model: keras.Model) -> Iterator[Change]:
    """Returns the embeddings of a compiled model whose training differs from Keras', because their rows are summed.

    Example:
        >>> model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(8, 2, name="words")])
        >>> model.compile("adam", "mse")
        >>> [change.name for change in summed_embeddings(model)]
        ['words']
        >>> model.compile("sgd", "mse")
        >>> list(summed_embeddings(model))
        []
    """
    optimizer: Any = inner_optimizer(model.optimizer)
    clips = optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm
    if isinstance(optimizer, SUM_OR_PARTS) and not clips:
        return
    verb = "clips" if isinstance(optimizer, SUM_OR_PARTS) else "clips and squares" if clips else "squares"
    for layer in layers_inside(model):
        if isinstance(layer, keras.layers.Embedding) and layer.trainable:
            yield Change(
                name=layer_path(model, layer),
                kind=type(layer).__name__,
                detail=(
                    f"the gradients of each row are summed before {type(optimizer).__name__} uses them; Keras {verb} "
                    "them one by one. sparse_embedding_gradients=True trains as Keras does"
                ),
            )


def state_of_parts(model: keras.Model, *, parts: int, replicas: int) -> Iterator[Skip]:
    """Returns the layers whose own state is updated for each part of a batch, instead of once for each step.

    Args:
        model: A model. Layers that are not built yet have no state, and are not returned.
        parts: The micro-batches of a step on one replica.
        replicas: The number of replicas.
    Example:
        >>> dense = keras.layers.Dense(2)
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.SpectralNormalization(dense, name="normed")])
        >>> print(*(skip.reason for skip in state_of_parts(model, parts=4, replicas=1)))
        its state (vector_u) is updated 4 times in a step, once for each micro-batch
    """
    if parts * replicas == 1:
        return
    how = f"{parts} times in a step, once for each micro-batch" if parts > 1 else "once in a step"
    if replicas > 1:
        how += f", separately on each of the {replicas} replicas; floats are averaged at the end of an epoch"
    for layer in layers_inside(model):
        names = [variable.name for variable in _own_state(layer)]
        if names:
            yield Skip(
                name=layer_path(model, layer),
                kind=type(layer).__name__,
                reason=f"its state ({', '.join(names)}) is updated {how}",
            )


def _own_state(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the variables that a layer itself may change in training: no weights, metrics, seeds or inner layers."""
    package = type(layer).__module__.split(".")[0]
    if package == "tfopt" or (package == "keras" and not isinstance(layer, CHANGING)):
        return []
    return own_non_trainable_variables(layer)
