"""Records of diabetes patients: a regression on real rows that scikit-learn holds, so that they need no network."""

from __future__ import annotations

import numpy as np

from tfopt.data.arguments import check_arguments
from tfopt.data.examples import Examples
from tfopt.data.files.in_memory import arrays


def diabetes(*, test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Examples:
    """Loads scikit-learn's 442 records of diabetes patients: ten measurements, and the disease a year later.

    The columns are age, sex, body mass index, blood pressure and six blood serum values. The target is a measure of the
    progression of the disease, from 25 to 346. Each column has mean 0 and standard deviation 1 over all records, and so
    has the target: an absolute error of 0.5 is half a standard deviation, 38.5 in the unit of the measure.

    Args:
        test_fraction: Share of the test part.
        validation_fraction: Share of the validation part. With 0 there is none.
        seed: Seed of the split.
    Returns: Rows float32 [n, 10], and values float32 [n, 1].
    Example:
        >>> diabetes().x_train.shape
        (353, 10)

    Reference:
        Efron et al., "Least Angle Regression", Annals of Statistics, 2004.
    """
    from sklearn.datasets import load_diabetes  # takes seconds, and a list of the sources needs it not

    check_arguments(test_fraction=test_fraction, validation_fraction=validation_fraction, seed=seed)
    rows, progression = load_diabetes(return_X_y=True, scaled=False)
    return arrays(
        _standardized(rows),
        _standardized(progression[:, None]),
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        seed=seed,
        name="diabetes",
    )


def _standardized(values: np.ndarray) -> np.ndarray:
    return ((values - values.mean(axis=0)) / values.std(axis=0)).astype(np.float32)
