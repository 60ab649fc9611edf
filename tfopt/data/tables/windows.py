"""Windows of time series: the inputs are some rows of a table, and the targets are columns of the rows that follow.

The rows are in the order of time. Each file is a series of its own, and its first rows are for training, the next for
validation and the last for testing. A window lies in one part as a whole, so no row of the test part is seen in
training, neither as an input nor as a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfopt.data.examples import Examples, Split
from tfopt.data.files.splits import check_at_least_one
from tfopt.errors import ConfigError


def window_examples(
    series: Sequence[tuple[np.ndarray, np.ndarray]],
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
        series: Inputs [rows, features] and targets [rows, targets] of each series, in the order of time.
        window: Number of rows of the inputs.
        horizon: Number of rows of the targets, which follow directly.
        stride: Number of rows from the start of a window to the start of the next one.
        test_fraction: Share of the rows of each series in the test part.
        validation_fraction: Share of the rows in the validation part.
        seed: Seed of the order of the windows.
        name: Name of the data.
        notes: Remarks for the user.
    Raises:
        ConfigError: No series has enough rows for a window in each part.
    Example:
        >>> rows = np.arange(20, dtype=np.float32)[:, None]
        >>> options = dict(stride=1, test_fraction=0.5, validation_fraction=0, seed=0, name="ramp", notes=())
        >>> examples = window_examples([(rows, rows)], window=3, horizon=2, **options)
        >>> inputs, targets = next(examples.decoded("train").as_numpy_iterator())
        >>> inputs.ravel().tolist(), targets.ravel().tolist()
        ([3.0, 4.0, 5.0], [6.0, 7.0])
    """
    import tensorflow as tf

    check_at_least_one(window=window, horizon=horizon, stride=stride)
    shares: dict[Split, tuple[float, float]] = {
        "train": (0, 1 - test_fraction - validation_fraction),
        "validation": (1 - test_fraction - validation_fraction, 1 - test_fraction),
        "test": (1 - test_fraction, 1),
    }
    starts: dict[Split, list[np.ndarray]] = {part: [] for part in shares}
    first_row = 0
    for inputs, _ in series:
        for part, (low, high) in shares.items():
            begin, end = round(low * len(inputs)), round(high * len(inputs))
            starts[part].append(np.arange(begin, end - window - horizon + 1, stride, dtype=np.int64) + first_row)
        first_row += len(inputs)
    generator = np.random.default_rng(seed)
    parts = {part: generator.permutation(np.concatenate(found)) for part, found in starts.items()}
    empty = [part for part in parts if not len(parts[part]) and (part != "validation" or validation_fraction)]
    if empty:
        raise ConfigError(
            f"Each part of a series must have at least window + horizon rows. Received: window={window}, "
            f"horizon={horizon}, and {max(len(inputs) for inputs, _ in series)} rows in the longest series, too few "
            f"for the {empty[0]} part. Set a smaller window, or another share."
        )
    all_inputs = tf.constant(np.concatenate([inputs for inputs, _ in series]))
    all_targets = tf.constant(np.concatenate([targets for _, targets in series]))

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
        notes=notes,
    )
