"""Pruning in one call: `prune` sets the least important weights of a model to zero, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from tfopt.compat.kinds import is_tf_keras
from tfopt.pruning.config import PruningConfig
from tfopt.pruning.criteria.gradients import mean_products
from tfopt.pruning.criteria.scores import needs_data, score_weights
from tfopt.pruning.masks import attach_mask, choose_masks, parse_pattern
from tfopt.pruning.tfmot import prune_tf_keras
from tfopt.pruning.weights import Weight, make_report, select_weights
from tfopt.report import PassReport
from tfopt.settings.validation import check_type

PASS_A_CONFIG = "Pass for example tfopt.PruningConfig(target_sparsity=0.5)."


def prune(model: Any, config: PruningConfig | None = None, data: Any = None) -> PassReport:
    """Sets the least important weights of a model to zero, in place, and holds them there in later training.

    Exactly `round(target_sparsity * size)` weights of each layer become zero. With `scope="global"` the number is
    counted over all layers together, and a layer with small weights may lose all of them. Layers, config and saved
    files stay ordinary: the model saves to `.keras`, loads without tfopt and exports like any other model. The zeros
    stay zero through `fit` in this process. After loading, call `prune` again before further training; it finds the
    same zeros. `PruningSchedule` prunes gradually during a fit, which costs less accuracy. An error leaves the model
    unchanged.

    Zeros make only a compressed file smaller. They do not make a dense kernel faster.

    Args:
        model: A built functional, Sequential or subclassed Keras 3 model, under any dtype policy and strategy. tfmot
            prunes a functional or Sequential `tf_keras` (Keras 2) model, whose zeros do not stay zero in training.
        config: Share and choice of the weights. The settings of the schedule and the fine-tuning are not used.
        data: Batches of (inputs, targets) or (inputs, targets, weights) as a `tf.data.Dataset` or any iterable, for a
            criterion that needs gradients of the loss of `compile`. The first `gradient_batches` are read.

    Returns:
        A change for each pruned weight, a skip with the reason for each layer that is not pruned, and in `metrics` the
        "sparsity": the share of zeros in the pruned weights.

    Raises:
        UnsupportedModelError: The model is not a Keras model or is not built. The criterion needs gradients, and the
            model is not compiled or a gradient is not finite.
        UnsupportedLayerError: A weight is NaN or infinite.
        ConfigError: A pattern in `exclude` names no layer, the criterion did not return a score per weight, or it needs
            data that is missing, empty or without targets.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="head")])
        >>> print(prune(model, PruningConfig(target_sparsity=0.75)))
        prune: 1 changed, 0 skipped, sparsity 0.75
          changed  head (Dense): 75.0% zeros in kernel (8, 4)

    Reference:
        Zhu & Gupta, "To prune, or not to prune", arXiv:1710.01878.
    """
    config = PruningConfig() if config is None else config
    check_type("config", config, PruningConfig, PASS_A_CONFIG)
    if is_tf_keras(model):
        report = prune_tf_keras(model, config)
    else:
        weights, skipped = select_weights(model, config)
        products = None
        if needs_data(config.criterion):
            variables = [weight.variable for weight in weights]
            products = mean_products(model, variables, data, config.gradient_batches)
        scores = score_weights(weights, config.criterion, products)
        set_sparsity(weights, scores, config.target_sparsity, config)
        retrace(model)
        report = make_report(weights, skipped)
    report.warn_if_unchanged()
    return report


def set_sparsity(
    weights: Sequence[Weight], scores: Sequence[np.ndarray], sparsity: float, config: PruningConfig
) -> None:
    """Sets new masks that make the share `sparsity` of the weights zero. All masks are chosen before one is set."""
    masks = choose_masks(weights, scores, sparsity, config.scope, parse_pattern(config.pattern, config.transposable))
    for weight, kept in zip(weights, masks, strict=True):
        mask = attach_mask(weight.variable)
        mask.assign(kept & ops.convert_to_numpy(mask.kept))  # a masked weight stays masked


def retrace(model: Any) -> None:
    """Makes the next `fit` trace its step again, because a step traced before the masks were attached lacks them."""
    model.train_function = None
