"""Windows of time series: the inputs are some rows of a table, and the targets are columns of the rows that follow.

The rows are in the order of time. Each file is a series of its own, and its first rows are for training, the next for
validation and the last for testing. A window lies in one part as a whole, so no row of the test part is seen in
training, neither as an input nor as a target.

Rows that were left out keep their place in time. A window that would hold one of them is left out, and the other
windows are those of the whole series.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfopt.data.arguments import check_arguments
from tfopt.data.examples import Examples, Split
from tfopt.errors import ConfigError


class Series(NamedTuple):
    """A time series.

    Attributes:
        inputs: [kept rows, features], in the order of time.
        targets: [kept rows, targets].
        kept: Which rows of the series were kept, bool [rows].
    """

    inputs: np.ndarray
    targets: np.ndarray
    kept: np.ndarray


def window_examples(
    series: Sequence[Series],
    *,
    window: int,
    horizon: int,
    stride: int,
    test_fraction: float,
    validation_fraction: float,
    seed: int,
    name: str,
    notes: tuple[str, ...],
) -> Examples:
    """Returns the windows of time series as examples.

    Args:
        series: Time series.
        window: Number of rows of the inputs.
        horizon: Number of rows of the targets, which follow directly.
        stride: Number of rows from the start of a window to the start of the next one.
        test_fraction: Share of the rows of each series in the test part.
        validation_fraction: Share of the rows in the validation part.
        seed: Seed of the order of the windows.
        name: Name of the data.
        notes: Remarks for the user. The number of windows that were left out is added.
    Raises:
        ConfigError: No series has enough rows for a window in each part.
    Example:
        >>> rows = np.arange(20, dtype=np.float32)[:, None]
        >>> ramp = Series(rows, rows, np.full(20, True))
        >>> options = dict(stride=1, test_fraction=0.5, validation_fraction=0, seed=0, name="ramp", notes=())
        >>> examples = window_examples([ramp], window=3, horizon=2, **options)
        >>> inputs, targets = next(examples.decoded("train").as_numpy_iterator())
        >>> inputs.ravel().tolist(), targets.ravel().tolist()
        ([3.0, 4.0, 5.0], [6.0, 7.0])
    """
    import tensorflow as tf

    check_arguments(window=window, horizon=horizon, stride=stride)
    shares: dict[Split, tuple[float, float]] = {
        "train": (0, 1 - test_fraction - validation_fraction),
        "validation": (1 - test_fraction - validation_fraction, 1 - test_fraction),
        "test": (1 - test_fraction, 1),
    }
    starts: dict[Split, list[np.ndarray]] = {part: [] for part in shares}
    first_row = total = left_out = 0
    for inputs, _, kept in series:
        missing_before = np.concatenate([[0], np.cumsum(~kept)])
        for part, (low, high) in shares.items():
            begin, end = round(low * len(kept)), round(high * len(kept))
            found = np.arange(begin, end - window - horizon + 1, stride, dtype=np.int64)
            whole = found[missing_before[found] == missing_before[found + window + horizon]]
            starts[part].append(whole - missing_before[whole] + first_row)
            total, left_out = total + len(found), left_out + len(found) - len(whole)
        first_row += len(inputs)
    gaps = f"Windows that hold a row with an empty cell were left out: {left_out} of {total}."
    generator = np.random.default_rng(seed)
    parts = {part: generator.permutation(np.concatenate(found)) for part, found in starts.items()}
    empty = [part for part in parts if not len(parts[part]) and (part != "validation" or validation_fraction)]
    if empty:
        raise ConfigError(
            f"Each part of a series must have at least window + horizon rows. Received: window={window}, "
            f"horizon={horizon}, and {max(len(each.kept) for each in series)} rows in the longest series, too few "
            f"for the {empty[0]} part. {gaps + ' ' if left_out else ''}Set a smaller window, or another share."
        )
    all_inputs = tf.constant(np.concatenate([each.inputs for each in series]))
    all_targets = tf.constant(np.concatenate([each.targets for each in series]))

    def cut(start: Any) -> Any:
        inputs = tf.ensure_shape(all_inputs[start : start + window], (window, all_inputs.shape[1]))
        end = start + window
        return inputs, tf.ensure_shape(all_targets[end : end + horizon], (horizon, all_targets.shape[1]))

    return Examples(
        name=name,
        train=tf.data.Dataset.from_tensor_slices(parts["train"]),
        test=tf.data.Dataset.from_tensor_slices(parts["test"]),
        validation=tf.data.Dataset.from_tensor_slices(parts["validation"]) if validation_fraction else None,
        outputs=horizon * int(all_targets.shape[1]),
        decode=cut,
        notes=(*notes, gaps) if left_out else notes,
        check_finite=False,
    )
