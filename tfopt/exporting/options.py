"""The options of the command `tfopt export`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from tfopt.exporting.config import ExportConfig


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ExportConfig):
    """Writes a model as a SavedModel that needs only TensorFlow."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="IN")]
    """Model to export: a .keras file or the directory of a SavedModel."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Directory for the artifact. An earlier artifact in it is replaced."""
    calibration_data: str | None = None
    """Examples for the calibration: a .npy file of inputs, a .npz file with an array x, or the training part of a data
    source or of a recipe (name or .toml file)."""
    evaluation_data: str | None = None
    """Labelled examples for max-accuracy-drop: a .npz file with x and y, or the test part of a data source or of a
    recipe. By default the labelled calibration data."""
    baseline: str | None = None
    """Float artifact for the comparison by `tfopt verify`. By default IN, if IN is an artifact."""
    json: bool = False
    """Print JSON."""
