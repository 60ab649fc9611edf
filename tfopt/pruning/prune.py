"""Pruning in one call: `prune` sets the least important weights of a model to zero, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from tfopt.compat.kinds import is_tf_keras
from tfopt.pruning.config import PruningConfig
from tfopt.pruning.criteria import CRITERIA
from tfopt.pruning.masks import attach_mask, choose_masks
from tfopt.pruning.tfmot import prune_tf_keras
from tfopt.pruning.weights import Weight, find_weights, make_report
from tfopt.report import PassReport
from tfopt.settings.validation import check_type

PASS_A_CONFIG = "Pass for example tfopt.PruningConfig(target_sparsity=0.5)."


def prune(model: Any, config: PruningConfig | None = None) -> PassReport:
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

    Returns:
        A change for each pruned weight, a skip with the reason for each layer that is not pruned, and in `metrics` the
        "sparsity": the share of zeros in the pruned weights.

    Raises:
        UnsupportedModelError: The model is not a Keras model or is not built.
        UnsupportedLayerError: A weight is NaN or infinite.
        ConfigError: A pattern in `exclude` names no layer, or the criterion did not return a score per weight.

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
        weights, skipped = find_weights(model, config.exclude)
        set_sparsity(weights, config.target_sparsity, config)
        retrace(model)
        report = make_report(weights, skipped)
    report.warn_if_unchanged()
    return report


def set_sparsity(weights: Sequence[Weight], sparsity: float, config: PruningConfig) -> None:
    """Sets new masks that make the share `sparsity` of the weights zero. All masks are chosen before one is set."""
    criterion = CRITERIA[config.criterion] if isinstance(config.criterion, str) else config.criterion
    for weight, kept in zip(weights, choose_masks(weights, sparsity, criterion, config.scope), strict=True):
        mask = attach_mask(weight.variable)
        mask.assign(kept & ops.convert_to_numpy(mask.kept))  # a masked weight stays masked


def retrace(model: Any) -> None:
    """Makes the next `fit` trace its step again, because a step traced before the masks were attached lacks them."""
    model.train_function = None
