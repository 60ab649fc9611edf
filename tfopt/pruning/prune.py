"""Pruning in one call: `prune` sets the least important weights of a model to zero, in place.

`keep_zeros` makes masks of the zeros of a loaded model, since a file holds zeros but no masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from keras import ops

from tfopt.compat.forks import check_not_forked
from tfopt.compat.kinds import is_tf_keras
from tfopt.compat.replace import forget
from tfopt.errors import ConfigError, warn
from tfopt.pruning.config import PruningConfig
from tfopt.pruning.criteria import needs_data, score_weights
from tfopt.pruning.gradients import LossGradients
from tfopt.pruning.masks import Mask, attach_mask, choose_masks, pruned, writes_averages
from tfopt.pruning.patterns import parse_pattern
from tfopt.pruning.payoff import payoff_of_zeros, warn_of_no_speed
from tfopt.pruning.tfmot import prune_tf_keras
from tfopt.pruning.weights import LayerPattern, Weight, find_weights, layer_sparsities, make_report, select_weights
from tfopt.report import PassReport, Skip
from tfopt.settings.validation import check_type

PASS_A_CONFIG = "Pass for example tfopt.PruningConfig(target_sparsity=0.5)."


def prune(model: Any, config: PruningConfig | None = None, data: Any = None, *, dry_run: bool = False) -> PassReport:
    """Sets the least important weights of a model to zero, in place, and holds them there in later training.

    Exactly `round(target_sparsity * size)` weights of each layer become zero. With `scope="global"` the number is
    counted over all layers together, and a layer with small weights may lose all of them. Layers, config and saved
    files stay ordinary: the model saves to `.keras`, loads without tfopt and exports like any other model. The zeros
    stay zero through `fit` in this process. After loading, call `keep_zeros` before further training: a file holds the
    zeros, but not the masks. `PruningSchedule` prunes gradually during a fit, which costs less accuracy. An error
    leaves the model unchanged.

    Zeros make only a compressed file smaller. They do not make a dense kernel faster. `dry_run=True` says so in
    figures, and changes nothing.

    Args:
        model: A built functional, Sequential or subclassed Keras 3 model, under any dtype policy and strategy. tfmot
            prunes a functional or Sequential `tf_keras` (Keras 2) model, whose zeros do not stay zero in training.
        config: Share and choice of the weights. The settings of the schedule and the fine-tuning are not used.
        data: Batches of (inputs, targets) or (inputs, targets, weights) as a `tf.data.Dataset` or any iterable, for a
            criterion that needs gradients of the loss of `compile`. The first `gradient_batches` are read.
        dry_run: Whether to only report what would change, with more figures: the parameters that are not zero, the
            multiply-adds, the bytes of the weights as they are and under gzip, before and after, and the median
            milliseconds of a call with one example on this machine, which the zeros leave as it is.

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
    check_not_forked()
    config = PruningConfig() if config is None else config
    check_type("config", config, PruningConfig, PASS_A_CONFIG)
    if is_tf_keras(model):
        if dry_run:
            raise ConfigError(
                "dry_run must be False for a tf_keras model, which tfmot prunes. Received: dry_run=True. Bring the "
                "model to Keras 3 first, with tfopt.from_tf_keras."
            )
        report = prune_tf_keras(model, config)
    else:
        weights, skipped = select_weights(model, config)
        masks = _masks(weights, scores_of(model, weights, config, data), config.target_sparsity, config)
        _warn_if_sparser(weights, masks, config)
        if dry_run:
            return _dry_report(model, weights, masks, skipped, config)
        _set(weights, masks)
        forget(model, "train_function")  # which lacks the masks
        _warn_of_averages(model)
        report = make_report(weights, skipped)
    report.warn_if_unchanged()
    return report


def keep_zeros(model: Any, exclude: Sequence[LayerPattern] = ()) -> PassReport:
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
    held = []
    for weight in weights:
        kept = ~pruned(weight)
        if kept.all() or not kept.any():
            what = "no zero" if kept.all() else "nothing but zeros"
            reason = f"there is {what} in {weight.attribute} {tuple(weight.variable.shape)}"
            skipped.append(Skip(name=weight.path, kind=weight.kind, reason=reason))
        else:
            held.append((weight, kept))
    for weight, kept in held:
        attach_mask(weight.variable).assign(kept)
    forget(model, "train_function")  # which lacks the masks
    if held:
        _warn_of_averages(model)
    report = replace(make_report([weight for weight, _ in held], skipped), name="keep zeros")
    report.warn_if_unchanged()
    return report


def _warn_of_averages(model: Any) -> None:
    """Warns if Keras' fit will write averages into the weights that are not zero where the masks are."""
    if writes_averages(model):
        warn(
            "The optimizer averages the weights before the masks are applied (use_ema=True), and Keras' fit ends with "
            "the averages, in which pruned weights are not zero. Train with tfopt.compile or a PruningSchedule, which "
            "set them to zero again, or call tfopt.prune again after the fit."
        )


def _warn_if_sparser(weights: Sequence[Weight], masks: Sequence[Any], config: PruningConfig) -> None:
    """Warns if a pruned model is pruned again to fewer zeros, which cannot be."""
    size = sum(mask.size for mask in masks)
    zeros = [weight.read() == 0 for weight in weights]
    count = sum(int(np.count_nonzero(each)) for each in zeros)
    if count > sum(int(np.count_nonzero(~mask)) for mask in masks):
        free = any((each & _kept(weight)).any() for each, weight in zip(zeros, weights, strict=True))
        what = (
            "asks for. Later training holds only as many of them as it asks for. To hold them all, call "
            "tfopt.keep_zeros(model) in place of this; for fewer, load"
            if free
            else "asks for, and they stay. Load"
        )
        warn(
            f"The weights already have {count / size:.1%} zeros, more than target_sparsity={config.target_sparsity:g} "
            f"{what} the model as it was before its pruning."
        )


def _kept(weight: Weight) -> Any:
    """Returns the weights that no mask holds at zero so far."""
    mask = weight.variable.constraint
    return ops.convert_to_numpy(mask.kept) if isinstance(mask, Mask) else np.ones(weight.variable.shape, dtype=bool)


def scores_of(model: Any, weights: Sequence[Weight], config: PruningConfig, data: Any) -> list[np.ndarray]:
    """Returns the scores of the weights, with gradients of the loss if the criterion needs them."""
    products = None
    if needs_data(config.criterion):
        gradients = LossGradients(model, [weight.variable for weight in weights])
        products = gradients.mean_products(data, config.gradient_batches)
    return score_weights(weights, config.criterion, products)


def _dry_report(
    model: Any, weights: Sequence[Weight], masks: Sequence[Any], skipped: Sequence[Skip], config: PruningConfig
) -> PassReport:
    report = make_report(weights, skipped, masks)
    report.warn_if_unchanged()
    if not report.changed:
        return report
    figures, unknown = payoff_of_zeros(model, weights, masks)
    warn_of_no_speed(figures, config.pattern)
    return replace(report, name="prune (dry run)", skipped=(*report.skipped, *unknown), metrics=figures)


def set_sparsity(
    weights: Sequence[Weight], scores: Sequence[np.ndarray], sparsity: float, config: PruningConfig
) -> None:
    """Sets new masks that make the share `sparsity` of the weights zero. All masks are chosen before one is set."""
    _set(weights, _masks(weights, scores, sparsity, config))


def _masks(
    weights: Sequence[Weight], scores: Sequence[np.ndarray], sparsity: float, config: PruningConfig
) -> list[Any]:
    pattern, each = parse_pattern(config.pattern, config.transposable), layer_sparsities(weights, config, sparsity)
    return choose_masks(weights, scores, sparsity, config.scope, pattern, each)


def _set(weights: Sequence[Weight], masks: Sequence[Any]) -> None:
    for weight, kept in zip(weights, masks, strict=True):
        mask = attach_mask(weight.variable)
        mask.assign(kept & ops.convert_to_numpy(mask.kept))  # a masked weight stays masked
