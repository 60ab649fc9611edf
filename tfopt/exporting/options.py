"""What `tfopt export` takes on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from tfopt.exporting.config import ExportConfig


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ExportConfig):
    """Writes a model as a SavedModel that needs only TensorFlow."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="IN")]
    """A .keras file or the directory of a SavedModel."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Where the artifact goes; an earlier artifact there is replaced."""
    calibration_data: str | None = None
    """A .npy file of inputs, a .npz file with an array x, or the name of a data source."""
    evaluation_data: str | None = None
    """Labelled examples to measure max-accuracy-drop on: a .npz file with x and y, or the name of a data source (its
    test part). By default the labelled calibration data."""
    baseline: str | None = None
    """The float artifact that `tfopt verify` compares with; by default IN, if it is an artifact."""
    json: bool = False
    """Print JSON."""
