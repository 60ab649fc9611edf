"""Writes the SavedModel of an artifact, which needs only TensorFlow and has each of its weights once."""

from __future__ import annotations

from pathlib import Path

from tfopt.exporting.config import ExportConfig
from tfopt.exporting.lowering import Lowered
from tfopt.exporting.signatures import make_signatures, save


def write(lowered: Lowered, directory: Path, config: ExportConfig) -> None:
    """Writes a SavedModel with a signature for each graph."""
    module, signatures = make_signatures(lowered.graphs, config.weights_in, decoded_at_call=lowered.in_variables)
    save(module, str(directory), signatures)
