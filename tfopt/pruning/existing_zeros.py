"""Masks from the zeros that are there: for a pruned model that was loaded, since a file holds zeros but no masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tfopt.pruning.masks import attach_mask
from tfopt.pruning.masks.choice import pruned
from tfopt.pruning.prune import retrace
from tfopt.pruning.weights import Pattern, find_weights, make_report
from tfopt.report import PassReport, Skip


def keep_zeros(model: Any, exclude: Sequence[Pattern] = ()) -> PassReport:
    """Holds the zeros that a model has in all later training, in place, as those of `prune` are held.

    Call it after loading a pruned model and before further training. A `.keras` file or a file of weights holds the
    zeros, but not the masks: a file with masks could not be loaded without tfopt. The call changes no weight. Kernels
    without a zero, and those of zeros only, which were initialised so, get no mask.

    Args:
        model: A built functional, Sequential or subclassed Keras 3 model.
        exclude: Names, paths or classes of layers whose zeros may change, as in `PruningConfig`: for example a layer
            that begins as the identity.

    Returns:
        A change for each weight with its share of zeros, and a skip with the reason for each other layer.

    Raises:
        UnsupportedModelError: The model is not a Keras 3 model or is not built.
        UnsupportedLayerError: A weight is NaN or infinite.
        ConfigError: A pattern in `exclude` names no layer.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="head")])
        >>> model.layers[0].set_weights([np.eye(8, 4), np.zeros(4)])  # as it would be loaded
        >>> print(keep_zeros(model))
        keep zeros: 1 changed, 0 skipped, sparsity 0.875
          changed  head (Dense): 87.5% zeros in kernel (8, 4)
    """
    weights, skipped = find_weights(model, exclude, include=("*",))  # the kernels too that are pruned only if named
    masks = [~pruned(weight) for weight in weights]
    held = []
    for weight, kept in zip(weights, masks, strict=True):
        if kept.all() or not kept.any():
            what = "no zero" if kept.all() else "nothing but zeros"
            reason = f"there is {what} in {weight.attribute} {tuple(weight.variable.shape)}"
            skipped.append(Skip(name=weight.path, kind=weight.kind, reason=reason))
        else:
            held.append((weight, kept))
    for weight, kept in held:
        attach_mask(weight.variable).assign(kept)
    retrace(model)
    report = replace(make_report([weight for weight, _ in held], skipped), name="keep zeros")
    report.warn_if_unchanged()
    return report
