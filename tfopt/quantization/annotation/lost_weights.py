"""Weights that become 0 in fewer bits: too small for the dtype, or for the step that a few large weights ask for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tfopt.report import Change

MUCH = 0.5
LOST = "lost weights"


def share_lost(weights: np.ndarray, rounded: np.ndarray) -> float:
    """Returns the share of the weights other than 0 that are 0 after rounding.

    Example:
        >>> share_lost(np.array([0.0, 1e-9, 1.0]), np.array([0.0, 1e-9, 1.0]).astype("float16"))
        0.5
    """
    nonzero = int(np.count_nonzero(weights))
    return 1 - int(np.count_nonzero(rounded)) / nonzero if nonzero else 0.0


def lost_weights(shares: Mapping[str, float]) -> list[Change]:
    """Returns a note for each tensor that loses most of its weights.

    Example:
        >>> [note.detail for note in lost_weights({"conv": 0.2, "head": 1.0})]
        ['100.0% of its weights other than 0 are rounded to 0']
    """
    return [
        Change(name=name, kind=LOST, detail=f"{share:.1%} of its weights other than 0 are rounded to 0")
        for name, share in shares.items()
        if share > MUCH
    ]
