"""Which layers of a model train otherwise under tfopt's step than under Keras' own on one device, and how.

Two kinds do. The gradient of an embedding is a list of rows, in which a row stands as often as the batch names it.
tfopt sums these for each row, so that the update does not depend on how a batch is divided. Keras' optimizers take them
one by one: they square, or clip, each by itself. For an update that is linear in the gradient both are the same.

The other are layers that keep a state of their own and change it when they are called, such as a counter: they are
called for every micro-batch, on every replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from tfopt.compat.layers import layers_inside, own_non_trainable_variables
from tfopt.compat.optimizers import inner_optimizer
from tfopt.models.structure import layer_path
from tfopt.report import Change, Skip

# Their update is the same for a row's sum as for its parts, unless these are clipped.
SUM_OR_PARTS = (keras.optimizers.SGD, keras.optimizers.Lion)
# Keras' own layers change no state in training, save these (and BatchNormalization, of which the documentation tells).
CHANGING = (keras.layers.SpectralNormalization, keras.layers.RNN)


def summed_embeddings(model: keras.Model) -> Iterator[Change]:
    """Returns the embeddings that a compiled model trains otherwise than Keras would, because their rows are summed.

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
    clips = any(getattr(optimizer, name, None) for name in ("clipnorm", "clipvalue", "global_clipnorm"))
    if isinstance(optimizer, SUM_OR_PARTS) and not clips:
        return
    verb = "clips" if isinstance(optimizer, SUM_OR_PARTS) else "clips and squares" if clips else "squares"
    for layer in layers_inside(model):
        if isinstance(layer, keras.layers.Embedding) and layer.trainable:
            yield Change(
                name=layer_path(model, layer),
                kind=type(layer).__name__,
                detail=(
                    f"its gradient is summed for each row before {type(optimizer).__name__} takes it; Keras {verb} it "
                    "as often as a batch names the row. sparse_embedding_gradients=True trains as Keras does"
                ),
            )


def state_of_parts(model: keras.Model, *, parts: int, replicas: int) -> Iterator[Skip]:
    """Returns the layers with a state of their own that is updated for each part of a batch, not once for each step.

    Args:
        model: Layers that are not built yet have no state, and are left out.
        parts: Micro-batches of a step on one replica.
        replicas: Replicas.
    Example:
        >>> dense = keras.layers.Dense(2)
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.SpectralNormalization(dense, name="normed")])
        >>> print(*(skip.reason for skip in state_of_parts(model, parts=4, replicas=1)))
        what it updates of its state (vector_u) when it is called, it updates 4 times in a step, for each micro-batch
    """
    if parts * replicas == 1:
        return
    how = f"{parts} times in a step, for each micro-batch" if parts > 1 else "for its replica's part of a batch"
    if replicas > 1:
        how += f"; each of the {replicas} replicas by itself, and floats are averaged at the end of an epoch"
    for layer in layers_inside(model):
        names = [variable.name for variable in _own_state(layer)]
        if names:
            yield Skip(
                name=layer_path(model, layer),
                kind=type(layer).__name__,
                reason=f"what it updates of its state ({', '.join(names)}) when it is called, it updates {how}",
            )


def _own_state(layer: keras.Layer) -> list[keras.Variable]:
    """Returns what a layer itself may change in training: no weights, metrics or seeds, nothing of layers inside it."""
    package = type(layer).__module__.split(".")[0]
    if package == "tfopt" or (package == "keras" and not isinstance(layer, CHANGING)):
        return []
    return own_non_trainable_variables(layer)
