"""What the loss says about channels: the products of their weights with the gradients of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfopt.pruning.criteria.gradients import LossGradients
from tfopt.pruning.structured.groups import Group


def channel_products(model: keras.Model, groups: Sequence[Group], data: Any, batches: int) -> list[Any]:
    """Returns an array [units, batches] for each group: the sums of weight * gradient over the weights of each unit.

    Raises:
        UnsupportedModelError: The model is not compiled.
        ConfigError: There is no data, or the loss cannot be computed on it.
    """
    held = {id(member.weight.variable): member.weight.variable for group in groups for member in group.members}
    variables = [variable for variable in held.values() if variable.trainable]
    sums: list[list[Any]] = [[] for _ in groups]
    for gradients in LossGradients(model, variables).of_batches(data, batches):
        products = {
            id(variable): variable.numpy().astype(np.float32) * gradient
            for variable, gradient in zip(variables, gradients, strict=True)
        }
        for group, of_group in zip(groups, sums, strict=True):
            of_group.append(sum(_sums(member, products) for member in group.members))
    return [np.stack(of_group, axis=1) for of_group in sums]


def _sums(member: Any, products: dict[int, Any]) -> Any:
    """Returns the sum over the values of each unit in one weight; zero for a weight that is not trained."""
    values = products.get(id(member.weight.variable))
    if values is None:
        return 0.0
    others = tuple(axis for axis in range(values.ndim) if axis != member.dimension)
    return values.sum(axis=others)[member.indices].sum(axis=1)
