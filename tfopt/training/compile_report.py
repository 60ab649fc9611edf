"""The report of `compile`: how a model trains, what it cannot have, and which layers train differently from Keras.

Two kinds of layers train differently from Keras' step on one device. The first kind is embeddings. The gradient of an
embedding is a list of rows. A row occurs as often as the batch names it. tfopt sums the gradients of each row, so that
the update does not depend on how a batch is divided. Keras' optimizers use them one by one: they square or clip each by
itself. If the update is linear in the gradient, both ways give the same result.

The second kind is layers that change a state of their own when they are called, such as a counter. tfopt calls them for
every micro-batch, on every replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfopt.compat.layers import layers_inside, own_non_trainable_variables
from tfopt.compat.optimizers import inner_optimizer
from tfopt.models.structure import layer_path
from tfopt.profiling.tensor_cores import tensor_core_alignment
from tfopt.report import Change, PassReport, Skip
from tfopt.training.pipeline_parallel.step import Stages
from tfopt.training.plan import Plan

# Without clipping, their update for the sum of a row's gradients is the same as for the single gradients.
SUM_OR_PARTS = (keras.optimizers.SGD, keras.optimizers.Lion)
# Keras' own layers change no state in training, except these and BatchNormalization, which the documentation describes.
CHANGING = (keras.layers.SpectralNormalization, keras.layers.RNN)


def report_of(
    model: keras.Model, plan: Plan, stages: Stages | None, outputs: PassReport, blockers: Sequence[Skip]
) -> PassReport:
    """Returns the report of a model that tfopt's step trains."""
    detail = "trains by tfopt's step" + (f" in stages\n{stages}" if stages else "")
    changed = [Change(name=model.name, kind=type(model).__name__, detail=detail), *outputs.changed]
    if not plan.config.sparse_embedding_gradients:
        changed += summed_embeddings(model)
    skipped = [*outputs.skipped, *blockers]
    if plan.hardware.gpus and plan.precision != "float32":
        skipped += [
            Skip(name=row.name, kind=row.kind, reason=f"not a multiple of 8, which slows tensor cores: {row}")
            for row in tensor_core_alignment(model).rows
            if not row.is_output
        ]
    parts = max(plan.config.accumulate, plan.micro_batches)
    skipped += state_of_parts(model, parts=parts, replicas=plan.replicas)
    return PassReport(name="compile", changed=tuple(changed), skipped=skipped)


def own_loss(model: keras.Model, divided: str) -> list[Skip]:
    """Returns what a `compute_loss` of the model's class must keep to where a batch is divided."""
    if type(model).compute_loss is keras.Model.compute_loss:
        return []
    reason = f"its own compute_loss must average over examples: with {divided}, each part is weighted by its examples"
    return [Skip(name=model.name, kind=type(model).__name__, reason=reason)]


def lost_by_own_step(model: keras.Model, plan: Plan, steps: int) -> Skip:
    """Returns what a model with its own `train_step` cannot have."""
    lost = "it has its own train_step: without accumulate, checkpoints, guards and ledger"
    if plan.strategy is not None:
        lost += ", and under a strategy without XLA and with one step per execution"
        if plan.replicas > 1:
            lost += (
                f". compute_loss divides a loss by the {plan.replicas} replicas, since their gradients are summed: a "
                "loss that train_step itself adds to a metric is shown divided. Each replica averages over its own part"
            )
    elif steps > 1:
        lost += f"; Keras only runs executions of {steps} steps, and may run more steps than steps_per_epoch"
    return Skip(name=model.name, kind=type(model).__name__, reason=lost)


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
    detail = (
        f"the gradients of each row are summed before {type(optimizer).__name__} uses them; Keras {verb} them one by "
        "one. sparse_embedding_gradients=True trains as Keras does"
    )
    for layer in layers_inside(model):
        if isinstance(layer, keras.layers.Embedding) and layer.trainable:
            yield Change(name=layer_path(model, layer), kind=type(layer).__name__, detail=detail)


def state_of_parts(model: keras.Model, *, parts: int, replicas: int) -> Iterator[Skip]:
    """Returns the layers whose own state is updated for each part of a batch, instead of once for each step.

    Layers that are not built yet have no state. The parts are the micro-batches of a step on one replica.

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
            reason = f"its state ({', '.join(names)}) is updated {how}"
            yield Skip(name=layer_path(model, layer), kind=type(layer).__name__, reason=reason)


def _own_state(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the variables that a layer itself may change in training: no weights, metrics, seeds or inner layers."""
    package = type(layer).__module__.split(".")[0]
    if package == "tfopt" or (package == "keras" and not isinstance(layer, CHANGING)):
        return []
    return own_non_trainable_variables(layer)
