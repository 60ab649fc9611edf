"""Keras 2 (`tf_keras`) models, which tensorflow-model-optimization (tfmot) prunes.

The import of tfmot takes seconds and loads tf_keras, so only this module imports it, when it prunes such a model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from tfopt.compat.layers import is_tf_keras_graph
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.pruning.config import PruningConfig
from tfopt.pruning.patterns import Blocks, NOfM, parse_pattern
from tfopt.pruning.weights import Weight, make_report
from tfopt.report import PassReport, Skip


def prune_tf_keras(model: Any, config: PruningConfig) -> PassReport:
    """Prunes a functional or Sequential `tf_keras` model in place, with tfmot's own wrappers and masks.

    tfmot wraps a copy of the model, and the pruned weights of the copy are written back. Zeros stay zero in training
    only inside a wrapper. For further training, wrap the model with `tfmot.sparsity.keras.prune_low_magnitude`.
    """
    import tf_keras

    _check(model, config)
    pruning = import_tfmot().sparsity.keras
    copy = tf_keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    policy = _Exclude([pattern for pattern in config.exclude if isinstance(pattern, str)])
    schedule = pruning.ConstantSparsity(config.target_sparsity, begin_step=0, frequency=1)
    try:
        wrapped = pruning.prune_low_magnitude(
            copy, pruning_schedule=schedule, pruning_policy=policy, **_pattern_arguments(config.pattern)
        )
    except ValueError as error:
        raise UnsupportedModelError(f"tfmot cannot prune {model.name!r}: {error}") from error
    weights = []
    for wrapper in wrapped.submodules:
        if not getattr(wrapper, "pruning_vars", None):
            continue
        # A training step of the wrapped model would do the same with the masks and the weights.
        wrapper.pruning_step.assign(1)  # the only step in which tfmot chooses n:m
        wrapper.pruning_obj.conditional_mask_update()
        wrapper.pruning_obj.weight_mask_op()
        for variable, _, _ in wrapper.pruning_vars:
            attribute = variable.name.rpartition("/")[2].removesuffix(":0")
            kind = type(wrapper.layer).__name__
            weights.append(Weight(path=wrapper.layer.name, kind=kind, attribute=attribute, variable=variable))
    model.set_weights(pruning.strip_pruning(wrapped).get_weights())
    return make_report(weights, policy.skipped)


def _pattern_arguments(pattern: str) -> dict[str, Any]:
    """Returns a pattern as tfmot's arguments; it counts the zeros of n:m, not the kept weights."""
    parsed = parse_pattern(pattern)
    if isinstance(parsed, NOfM):
        return {"sparsity_m_by_n": (parsed.m - parsed.n, parsed.m)}
    if isinstance(parsed, Blocks):
        return {"block_size": (parsed.rows, parsed.columns)}
    return {}


def import_tfmot() -> Any:
    """Imports tfmot and removes TF_USE_LEGACY_KERAS, which tfmot sets and which new processes must not inherit."""
    before = os.environ.get("TF_USE_LEGACY_KERAS")
    import tensorflow_model_optimization as tfmot

    if before is None:
        os.environ.pop("TF_USE_LEGACY_KERAS", None)
    return tfmot


class _Exclude:
    """A pruning policy of tfmot that does not wrap the layers named by `exclude`."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = patterns
        self.skipped: list[Skip] = []

    def allow_pruning(self, layer: Any) -> bool:
        if not any(fnmatchcase(layer.name, pattern) for pattern in self.patterns):
            return True
        self.skipped.append(Skip(name=layer.name, kind=type(layer).__name__, reason="excluded"))
        return False

    def ensure_model_supports_pruning(self, model: Any) -> None:
        """Does nothing: the wrapper of tfmot checks each layer."""


def _check(model: Any, config: PruningConfig) -> None:
    if config.criterion != "magnitude" or config.scope != "layer":
        raise ConfigError(
            "tfmot prunes tf_keras models, and takes criterion='magnitude' and scope='layer' only. "
            f"Received: criterion={config.criterion!r}, scope={config.scope!r}. "
            "Set these values, or use a Keras 3 model."
        )
    unknown = ("transposable", "include", "keep_first", "keep_last", "sparsities")
    if given := {name: getattr(config, name) for name in unknown if getattr(config, name)}:
        raise ConfigError(
            f"tfmot prunes tf_keras models, and has no {', '.join(unknown)}. Received: "
            f"{', '.join(f'{name}={value}' for name, value in given.items())}. Leave these at their defaults, or use "
            "a Keras 3 model."
        )
    if not model.built:
        raise UnsupportedModelError(
            f"model must be built. Received: {model.name!r} without weights. Call it once on a batch."
        )
    if not is_tf_keras_graph(model):
        raise UnsupportedModelError(
            f"tfmot prunes functional and Sequential models only. Received: the subclassed {type(model).__name__}. "
            "Build it with the functional API, or use Keras 3."
        )
    names = [layer.name for layer in model.submodules if hasattr(layer, "get_config")]
    for pattern in config.exclude:
        if not isinstance(pattern, str):
            raise ConfigError(f"exclude must hold names for a tf_keras model. Received: {pattern!r}. Name the layers.")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"exclude must name layers of the model. Received: {pattern!r}, which no layer has.")
