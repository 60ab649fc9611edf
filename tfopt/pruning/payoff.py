"""What pruning will buy, known before anything is changed: parameters, multiply-adds, bytes and the time of a call."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfopt.errors import TfoptError, warn
from tfopt.profiling.cost import count_flops
from tfopt.pruning.call_times import compare_latency, timed_function
from tfopt.pruning.weights import Weight
from tfopt.report import Change, Skip

Payoff = tuple[dict[str, float], list[Skip]]
"""The figures, and what could not be measured, with the reasons."""


def payoff_of_zeros(model: keras.Model, weights: Sequence[Weight], masks: Sequence[Any]) -> Payoff:
    """Returns the figures of a model before and after its weights outside the masks become zero.

    Zeros leave the kernels dense, so the multiply-adds and the latency stay what they are.
    """
    masked = {id(weight.variable): mask for weight, mask in zip(weights, masks, strict=True)}
    before = [variable.numpy() for variable in model.variables]
    after = [
        np.where(masked[id(variable)], value, value.dtype.type(0)) if id(variable) in masked else value
        for variable, value in zip(model.variables, before, strict=True)
    ]
    figures = {
        "sparsity": sum(int((~mask).sum()) for mask in masks) / sum(mask.size for mask in masks),
        "nonzero_parameters_before": float(sum(np.count_nonzero(value) for value in before)),
        "nonzero_parameters": float(sum(np.count_nonzero(value) for value in after)),
        **_bytes(before, after),
    }
    try:
        figures["multiply_adds"] = float(count_flops(model).multiply_adds)
        function = timed_function(model, 1)
    except TfoptError as error:  # for example an open size
        return figures, [_unknown(model, error)]
    return {**figures, "latency_ms": compare_latency(function, function).before_ms}, []


def payoff_of_channels(
    model: keras.Model, smaller: keras.Model, batch_size: int, open_size: int | None = None
) -> tuple[*Payoff, list[Change]]:
    """Returns the bytes and the latency of a model and of the smaller one, and what the latency says, in words."""
    figures = _bytes([each.numpy() for each in model.variables], [each.numpy() for each in smaller.variables])
    try:
        latency = compare_latency(*(timed_function(each, batch_size, open_size) for each in (model, smaller)))
    except TfoptError as error:
        return figures, [_unknown(model, error)], []
    speed = Change(name=model.name, kind=f"latency at batch size {batch_size}", detail=latency.speed)
    return {**figures, "latency_ms_before": latency.before_ms, "latency_ms": latency.after_ms}, [], [speed]


def warn_of_no_speed(figures: Mapping[str, float], pattern: str) -> None:
    """Warns that zeros make no export of tfopt faster, and says what they buy."""
    smaller = figures["gzip_bytes_before"] / max(1.0, figures["gzip_bytes"])
    hardware = " Only sparse tensor cores, for example under TensorRT, use 2:4." if pattern == "2:4" else ""
    warn(
        "The zeros will buy no speed: exported kernels are dense, in float32 and in int8. They make the compressed "
        f"weights {smaller:.1f}x smaller.{hardware} For speed, use tfopt.shrink."
    )


def _bytes(before: Sequence[Any], after: Sequence[Any]) -> dict[str, float]:
    return {
        "bytes_before": float(sum(value.nbytes for value in before)),
        "bytes": float(sum(value.nbytes for value in after)),
        "gzip_bytes_before": float(_compressed(before)),
        "gzip_bytes": float(_compressed(after)),
    }


def _compressed(values: Iterable[Any]) -> int:
    """Returns the size of arrays under gzip, at its default level of 6."""
    return len(gzip.compress(b"".join(np.ascontiguousarray(value).tobytes() for value in values), compresslevel=6))


def _unknown(model: keras.Model, error: TfoptError) -> Skip:
    return Skip(name=model.name, kind="latency", reason=f"not measured. {error}")
