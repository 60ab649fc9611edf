"""Tries on the untrained model what a run needs at its end, so that no training is lost to an export that fails.

Everything that depends on the kind of model is tried once: freezing, quantizing or the preparation for training with
fake quantization, the graphs of the artifacts, and their outputs on a few examples. What depends on the trained weights
is left out: the measurement of nodes, the search for a loss of accuracy, better ranges and better rounding. Nothing is
written.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tfopt.errors import TfoptWarning
from tfopt.exporting import ExportConfig
from tfopt.exporting.saved_model import check_export
from tfopt.quantization import QuantizationConfig, quantize
from tfopt.runner.stages import Work
from tfopt.training.checkpointing.random_state import read_random, write_random

# Settings that change the quality of the quantization only, which means nothing before training.
CHEAP: dict[str, Any] = {
    "calibration_examples": 2,
    "observer": "minmax",
    "equalization": False,
    "smooth_quant": 0.0,
    "bias_correction": False,
    "rounding": "nearest",
    "max_accuracy_drop": None,
}


def rehearse(work: Work, quantization: QuantizationConfig | None, *, exports: bool) -> None:
    """Raises the error of the export or of the quantization that would end the run.

    Args:
        work: The run, before its first stage. Neither its model nor the global random generators change.
        quantization: The settings of the last stage, if it quantizes.
        exports: Whether the run writes artifacts.
    """
    sample = [next(iter(work.calibration_data()))]
    with _unnoticed():
        if quantization is None or quantization.training:
            if exports:
                check_export(work.model, ExportConfig(), sample)
            if quantization is None:
                return
        model = work.model
        small: QuantizationConfig | None = replace(quantization, **CHEAP)
        if quantization.training:
            with work.plan.scope():
                model = quantize(model, small, calibration_data=sample)
            small = None  # the ranges are in the model
        quantized = quantize(model, small, calibration_data=sample)
        if exports:  # this has the outputs of the float model too
            check_export(quantized, ExportConfig(int8_nodes="all", float_weights="int8"), sample)


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Leaves no trace: no warning, which would come again at the end, and no number drawn from a generator."""
    before = read_random()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TfoptWarning)
            yield
    finally:
        write_random(before)
