"""Clustering in one call: `cluster` lets the weights of each layer share a few values, in place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfopt.clustering.clusters import attach_clusters
from tfopt.clustering.config import ClusteringConfig
from tfopt.clustering.kmeans import cluster_values
from tfopt.compat.forks import check_not_forked
from tfopt.compat.kinds import is_tf_keras
from tfopt.compat.replace import forget
from tfopt.errors import UnsupportedModelError, warn
from tfopt.pruning.masks import writes_averages
from tfopt.pruning.weights import Weight, find_weights
from tfopt.report import Change, PassReport, Skip
from tfopt.settings.validation import check_type


def cluster(model: Any, config: ClusteringConfig | None = None) -> PassReport:
    """Lets the weights of each layer share a few values, in place, and keeps them shared in later training.

    The values are the centroids of k-means. A later `fit` in this process trains them: after each step the weights of a
    cluster are equal, and a weight stays in its cluster. Zeros are a cluster of their own and stay exactly zero, so
    prune first. Layers, config and saved files stay ordinary: the model saves to `.keras` and loads without tfopt.
    After loading, call `cluster` again before further training; it changes no weight then. An error leaves the model
    unchanged.

    This makes only a file smaller: export with `precision="codebook_weight_only"`, or compress any file that holds the
    weights. Calls are not faster.

    Args:
        model: A built functional, Sequential or subclassed Keras 3 model, under any dtype policy and strategy.
        config: Number of the values, and choice of the layers.

    Returns:
        A change for each clustered weight, a skip with the reason for each layer that is not clustered, and in
        `metrics` the "relative_error" of the clustered weights as a ratio of norms.

    Raises:
        UnsupportedModelError: The model is not a Keras 3 model or is not built.
        UnsupportedLayerError: A weight is NaN or infinite.
        ConfigError: A pattern in `exclude` or `include` names no layer.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, name="hidden")])
        >>> report = cluster(model, ClusteringConfig(clusters=8))
        >>> report.changed[0].detail, len(np.unique(model.layers[0].kernel))
        ('8 values in kernel (64, 32)', 8)

    Reference:
        Han, Mao & Dally, "Deep Compression", ICLR 2016, arXiv:1510.00149.
    """
    check_not_forked()
    config = ClusteringConfig() if config is None else config
    check_type("config", config, ClusteringConfig, "Pass for example tfopt.ClusteringConfig(clusters=32).")
    if is_tf_keras(model):
        raise UnsupportedModelError(
            f"model must be a Keras 3 model. Received: the tf_keras model {model.name!r}. Use "
            "tfmot.clustering.keras.cluster_weights, or make a Keras 3 model of it with tfopt.from_tf_keras(model)."
        )
    weights, skipped = find_weights(model, config.exclude, config.include)
    chosen = []
    for weight in weights:
        values = weight.read()
        reason = _reason_to_keep(weight, values, config)
        if reason is None:
            chosen.append((weight, _shared(weight, values, config)))
        else:
            skipped.append(Skip(name=weight.path, kind=weight.kind, reason=reason))
    for weight, shared in chosen:
        weight.variable.assign(shared.values)
        attach_clusters(weight.variable, shared.index, config.clusters, shared.channel_axes)
    if chosen:
        forget(model, "train_function")  # which lacks the clusters
        _warn_of_averages(model)
    report = _report(chosen, skipped, config)
    report.warn_if_unchanged()
    return report


def _warn_of_averages(model: Any) -> None:
    if writes_averages(model):
        warn(
            "The optimizer averages the weights before those of a cluster are made equal (use_ema=True), and Keras' "
            "fit ends with the averages. Train with tfopt.compile, or call tfopt.cluster again after the fit."
        )


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """A weight whose values are shared: these values, the cluster of each, and what was lost in squares."""

    values: np.ndarray
    index: np.ndarray
    channel_axes: tuple[int, ...]
    error: float
    norm: float


def _reason_to_keep(weight: Weight, values: np.ndarray, config: ClusteringConfig) -> str | None:
    what = f"{weight.attribute} {values.shape}"
    if values.size < config.minimum_size:
        return f"{what} has fewer weights than minimum_size={config.minimum_size}"
    return None if values.any() else f"there is nothing but zeros in {what}"


def _shared(weight: Weight, values: np.ndarray, config: ClusteringConfig) -> _Shared:
    channel_axes = tuple(axis for axis in range(values.ndim) if axis not in weight.reduction)
    axes = channel_axes if config.per == "channel" else ()
    order = (*axes, *(axis for axis in range(values.ndim) if axis not in axes))
    moved = values.transpose(order)
    rows = moved.reshape(math.prod(moved.shape[: len(axes)]), -1)
    found = [_cluster_row(row, config.clusters) for row in rows]
    shared, index = (
        np.stack(parts).reshape(moved.shape).transpose(np.argsort(order)) for parts in zip(*found, strict=True)
    )
    return _Shared(
        values=shared, index=index, channel_axes=axes, error=_squares(shared - values), norm=_squares(values)
    )


def _cluster_row(row: np.ndarray, clusters: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns weights with shared values, and the cluster of each. Zeros are the first cluster, if there are any."""
    kept = row != 0
    zeros = 0 if kept.all() else 1
    shared, index = np.zeros_like(row), np.zeros(row.shape, np.uint8)
    if kept.any():
        centroids, own = cluster_values(row[kept], clusters - zeros)
        shared[kept], index[kept] = centroids[own], own + zeros
    return shared, index


def _squares(values: np.ndarray) -> float:
    return float(np.sum(np.square(values, dtype=np.float64)))


def _report(chosen: list[tuple[Weight, _Shared]], skipped: list[Skip], config: ClusteringConfig) -> PassReport:
    changed = []
    for weight, shared in chosen:
        values = (
            f"{len(np.unique(shared.values))} values"
            if config.per == "layer"
            else f"at most {config.clusters} values per channel"
        )
        detail = f"{values} in {weight.attribute} {shared.values.shape}"
        changed.append(Change(name=weight.path, kind=weight.kind, detail=detail))
    metrics = {}
    if chosen:
        error, norm = (sum(each) for each in zip(*((one.error, one.norm) for _, one in chosen), strict=True))
        metrics = {"relative_error": math.sqrt(error / norm)}
    return PassReport(name="cluster", changed=changed, skipped=skipped, metrics=metrics)
