"""Pruning in one go: `prune` sets the least important weights of a model to zero, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from tfopt.compat.kinds import is_tf_keras
from tfopt.errors import check_type
from tfopt.pruning.config import PruningConfig
from tfopt.pruning.criteria import CRITERIA
from tfopt.pruning.masks import attach_mask, choose_masks
from tfopt.pruning.tfmot import prune_tf_keras
from tfopt.pruning.weights import Weight, find_weights, make_report
from tfopt.report import PassReport


def prune(model: Any, config: PruningConfig | None = None) -> PassReport:
    """Sets the least important weights of a model to zero, in place, and holds them there in later training.

    Exactly `round(target_sparsity * size)` weights of each layer become zero (with `scope="global"`, of all layers
    together, where a layer of small weights may be emptied). Layers, config and saved files stay ordinary: the model
    saves to `.keras`, loads without tfopt and exports like any other. The zeros hold through `fit` in this process;
    after loading, call `prune` again before training on: it finds the same zeros. To prune gradually during a fit,
    which costs less accuracy, use `PruningSchedule`. When an error is raised, the model is as it was.

    A zero saves bytes only where the file is compressed, and no time in a dense kernel.

    Args:
        model: A built functional, Sequential or subclassed Keras 3 model, under any dtype policy and strategy. A
            `tf_keras` (Keras 2) functional or Sequential model is pruned by tfmot; its zeros are not held in training.
        config: How many weights, and which; the settings of schedule and fine-tuning play no part here.

    Returns:
        A change per pruned weight, a skip with the reason per layer left alone, and in `metrics` the "sparsity": the
        share of zeros in the pruned weights.

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
    check_type("config", config, PruningConfig)
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
    """Masks the weights anew, so that `sparsity` of them are zero. All masks are chosen before the first is set."""
    criterion = CRITERIA[config.criterion] if isinstance(config.criterion, str) else config.criterion
    for weight, kept in zip(weights, choose_masks(weights, sparsity, criterion, config.scope), strict=True):
        mask = attach_mask(weight.variable)
        mask.assign(kept & ops.convert_to_numpy(mask.kept))  # what is masked stays masked


def retrace(model: Any) -> None:
    """Makes the next `fit` trace its step anew: one that was traced before the masks were attached lacks them."""
    model.train_function = None
