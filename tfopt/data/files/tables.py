"""Tables in CSV and Parquet files: rows become examples, or windows of rows for forecasting.

The rows of a forecast are in the order of time. Each file is a series of its own, and its first rows are for training,
the next for validation and the last for testing. A window lies in one part as a whole, so no row of the test part is
seen in training, neither as an input nor as a target. Rows that were left out keep their place in time. A window that
would hold one of them is left out, and the other windows are those of the whole series.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tfopt.data.arguments import Names, check_arguments
from tfopt.data.examples import Examples, Split
from tfopt.data.files.table_files import (
    CsvReader,
    ParquetReader,
    Table,
    as_arrays,
    is_mostly_numbers,
    is_number,
    table_paths,
)
from tfopt.data.in_memory import arrays
from tfopt.errors import ConfigError
from tfopt.settings.validation import check_value

Paths = str | Path | Sequence[str | Path]
Inputs = Sequence[str] | Mapping[str, Sequence[str]] | None


def csv(
    *,
    path: Paths,
    target: str | Sequence[str],
    inputs: Inputs = None,
    classes: bool | None = None,
    window: int | None = None,
    horizon: int = 1,
    stride: int = 1,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    missing: Literal["error", "drop"] = "error",
    delimiter: str = ",",
    seed: int = 0,
) -> Examples:
    """Reads the rows of CSV files as examples, or windows of the rows for forecasting. The table is kept in memory.

    It needs the package pyarrow: pip install 'tfopt[tables]'.

    Args:
        path: A file, a folder whose .csv files are read, a pattern such as data/*.csv, or a list of these. The first
            line of a file holds the names of the columns.
        target: Column of the targets, or a list of columns of numbers.
        inputs: Columns of the inputs, which hold numbers; for a model of several inputs a dict of lists of columns.
            None means all columns but the target, and but row names: a column without a name, the index of pandas.
        classes: Whether the target is a class. None means that text is a class, and a number is a value to predict. The
            spelling of a cell is the class: "01" and "1" differ, and "NA" is a class unless the others are numbers.
        window: Number of rows of the inputs of a forecast. The rows of a file are then in the order of time, and the
            parts are split in this order; see `horizon`. None means that each row is an example.
        horizon: Number of rows of the targets, which follow the window directly.
        stride: Number of rows from the start of a window to the start of the next one.
        test_fraction: Share of the test part: at random, the same for every class; of a forecast the last rows.
        validation_fraction: Share of the validation part, the rows before the test part of a forecast.
        missing: "error" refuses empty cells, "drop" leaves out their rows, and the windows that would hold one of them,
            and notes the numbers.
        delimiter: Character between cells.
        seed: Seed of the split and of the order.
    Returns: Inputs float32 [columns], and a class number int32 or values float32 [targets]. Of a forecast: inputs
        float32 [window, columns], targets float32 [horizon, targets].
    Raises:
        ConfigError: A file or a column is missing, a column is there twice, a cell is empty or holds no number, a row
            has another number of cells, or a file is not in UTF-8.
    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     file = Path(directory, "flowers.csv")
        ...     rows = "5.1,3.5,iris\\n4.9,3.0,iris\\n2.0,0.5,rose\\n2.2,0.4,rose\\n" * 5
        ...     _ = file.write_text("length,width,flower\\n" + rows)
        ...     examples = csv(path=file, target="flower")
        ...     arguments = {"inputs": ["length", "width"], "window": 3, "test_fraction": 0.5}
        ...     forecasts = csv(path=file, target="length", **arguments)
        >>> examples.class_names, examples.x_train.shape
        (('iris', 'rose'), (16, 2))
        >>> forecasts.x_train.shape, forecasts.y_train.shape
        ((7, 3, 2), (7, 1, 1))
    """
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise ConfigError(f"delimiter must be one character. Received: delimiter={delimiter!r}. ',' is usual.")
    return _examples(
        CsvReader(delimiter),
        path,
        target,
        inputs,
        classes=classes,
        window=window,
        horizon=horizon,
        stride=stride,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        missing=missing,
        seed=seed,
    )


def parquet(
    *,
    path: Paths,
    target: str | Sequence[str],
    inputs: Inputs = None,
    classes: bool | None = None,
    window: int | None = None,
    horizon: int = 1,
    stride: int = 1,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    missing: Literal["error", "drop"] = "error",
    seed: int = 0,
) -> Examples:
    """Reads the rows of Parquet files as examples, or windows of the rows for forecasting.

    The arguments, the examples and the errors are those of tfopt.data.csv. Only the columns that are used are read, and
    rows are counted from 0.

    Example:
        >>> import tempfile, pyarrow.parquet
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     file = Path(directory, "ramp.parquet")
        ...     pyarrow.parquet.write_table(pyarrow.table({"x": range(10), "y": range(10)}), file)
        ...     parquet(path=file, target="y").x_train.shape
        (8, 1)
    """
    return _examples(
        ParquetReader(),
        path,
        target,
        inputs,
        classes=classes,
        window=window,
        horizon=horizon,
        stride=stride,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        missing=missing,
        seed=seed,
    )


def _examples(
    reader: CsvReader | ParquetReader,
    place: Paths,
    target: str | Sequence[str],
    given: Inputs,
    *,
    classes: bool | None,
    window: int | None,
    horizon: int,
    stride: int,
    test_fraction: float,
    validation_fraction: float,
    missing: str,
    seed: int,
) -> Examples:
    """Reads, checks and splits the rows. The arguments are those of `csv` and `parquet`."""
    check_arguments(locals())  # the rules of `path` and `inputs` are those of other sources
    paths, notes = table_paths(place, f".{reader.name}")
    notes += tuple(note for path in paths for note in reader.notes(path))
    named = check_value("target", target, Names)
    targets = [named] if isinstance(named, str) else list(named)
    check_value("classes", classes, bool | None)
    for names in given.values() if isinstance(given, Mapping) else (given,):
        check_value("inputs", names, tuple[str, ...] if names is not None else None)
    if missing not in ("error", "drop"):
        raise ConfigError(f"missing must be 'error' or 'drop'. Received: missing={missing!r}.")
    if classes and (window is not None or len(targets) != 1):
        raise ConfigError(
            "classes must be False for a forecast and for several targets. "
            f"Received: classes=True, window={window}, {len(targets)} targets. Leave classes out."
        )
    if given is None:
        row_names = [name for name in reader.row_names(paths[0]) if name not in targets]
        inputs = {"": [name for name in reader.names(paths[0]) if name not in (*targets, *row_names)]}
        if row_names:
            found = ", ".join(map(repr, row_names))
            notes += (f"Row names are no inputs: column {found}. To use it, name it in inputs=[...].",)
    else:
        inputs = {name: list(given[name]) for name in given} if isinstance(given, Mapping) else {"": list(given)}
    all_inputs = [name for names in inputs.values() for name in names]
    if not all_inputs or not targets:
        raise ConfigError("A table must have columns for inputs and a target. Received: none. Name the columns.")
    columns = list(dict.fromkeys([*all_inputs, *targets]))
    files = [reader.table(path, columns) for path in paths]
    text = len(targets) == 1 and any(not is_number(file[targets[0]]) for file in files if len(file))
    # A column of numbers with a few words is a column with wrong cells, which are named below.
    text = text and not all(is_mostly_numbers(file[targets[0]]) for file in files if len(file))
    is_class = classes if classes is not None else text and window is None
    if is_class:
        files = [reader.with_classes(path, file, targets[0]) for path, file in zip(paths, files, strict=True)]
    numbers = {*all_inputs} if is_class else {*all_inputs, *targets}
    tables = [
        as_arrays(file, path, columns, numbers, missing, reader.first_row)
        for path, file in zip(paths, files, strict=True)
    ]
    notes += tuple(table.note for table in tables if table.note)
    if window is not None:
        if isinstance(given, Mapping):
            raise ConfigError("inputs must be a list of columns for a forecast. Received: a dict. Join its columns.")
        examples = _windows(
            tables,
            all_inputs,
            targets,
            window=window,
            horizon=horizon,
            stride=stride,
            test_fraction=test_fraction,
            validation_fraction=validation_fraction,
            seed=seed,
        )
        return replace(examples, name=reader.name, notes=notes + examples.notes)
    if not any(table.kept.any() for table in tables):
        found = ", ".join(repr(str(path)) for path in paths)
        raise ConfigError(
            f"A table must have rows without empty cells. Received: {found} with none. {' '.join(notes)}".strip()
        )
    joined = {name: np.concatenate([table.columns[name] for table in tables]) for name in columns}
    x = {name: _matrix(joined, names) for name, names in inputs.items()}
    y, class_names = _classes(joined[targets[0]]) if is_class else (_matrix(joined, targets), ())
    notes += _alike(class_names)
    if (leaks := [name for name in targets if name in all_inputs]) and len(all_inputs) > len(leaks):
        notes += (f"The target is also an input: {', '.join(map(repr, leaks))}. A model only has to copy it.",)
    counts = [name for name in all_inputs if given is None and _counts_rows(joined[name])]
    if counts:
        notes += (
            f"An input only counts the rows: {', '.join(map(repr, counts))}. If it is no property of a row, name "
            "the others with inputs=[...].",
        )
    examples = arrays(
        x if isinstance(given, Mapping) else x[""],
        y,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        class_names=class_names,
        seed=seed,
        name=reader.name,
    )
    return replace(examples, notes=notes)


def _matrix(columns: Mapping[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    return np.stack([columns[name] for name in names], axis=1)


def _windows(
    tables: Sequence[Table],
    inputs: Sequence[str],
    targets: Sequence[str],
    *,
    window: int,
    horizon: int,
    stride: int,
    test_fraction: float,
    validation_fraction: float,
    seed: int,
) -> Examples:
    """Returns windows of `window` rows, each with the `horizon` rows that follow as its targets."""
    import tensorflow as tf

    shares: dict[Split, tuple[float, float]] = {
        "train": (0, 1 - test_fraction - validation_fraction),
        "validation": (1 - test_fraction - validation_fraction, 1 - test_fraction),
        "test": (1 - test_fraction, 1),
    }
    starts: dict[Split, list[np.ndarray]] = {part: [] for part in shares}
    first_row = total = left_out = 0
    for table in tables:
        missing_before = np.concatenate([[0], np.cumsum(~table.kept)])
        for part, (low, high) in shares.items():
            begin, end = round(low * len(table.kept)), round(high * len(table.kept))
            found = np.arange(begin, end - window - horizon + 1, stride, dtype=np.int64)
            whole = found[missing_before[found] == missing_before[found + window + horizon]]
            starts[part].append(whole - missing_before[whole] + first_row)
            total, left_out = total + len(found), left_out + len(found) - len(whole)
        first_row += int(np.count_nonzero(table.kept))
    gaps = f"Windows that hold a row with an empty cell were left out: {left_out} of {total}."
    generator = np.random.default_rng(seed)
    parts = {part: generator.permutation(np.concatenate(found)) for part, found in starts.items()}
    empty = [part for part in parts if not len(parts[part]) and (part != "validation" or validation_fraction)]
    if empty:
        raise ConfigError(
            f"Each part of a series must have at least window + horizon rows. Received: window={window}, "
            f"horizon={horizon}, and {max(len(each.kept) for each in tables)} rows in the longest series, too few "
            f"for the {empty[0]} part. {gaps + ' ' if left_out else ''}Set a smaller window, or another share."
        )
    all_inputs = tf.constant(np.concatenate([_matrix(table.columns, inputs) for table in tables]))
    all_targets = tf.constant(np.concatenate([_matrix(table.columns, targets) for table in tables]))

    def cut(start: Any) -> Any:
        end = start + window
        cut_inputs = tf.ensure_shape(all_inputs[start:end], (window, len(inputs)))
        return cut_inputs, tf.ensure_shape(all_targets[end : end + horizon], (horizon, len(targets)))

    return Examples(
        name="windows",
        train=tf.data.Dataset.from_tensor_slices(parts["train"]),
        test=tf.data.Dataset.from_tensor_slices(parts["test"]),
        validation=tf.data.Dataset.from_tensor_slices(parts["validation"]) if validation_fraction else None,
        outputs=horizon * len(targets),
        decode=cut,
        notes=(gaps,) if left_out else (),
        check_finite=False,
    )


def _classes(cells: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns the class number of each cell, and the names. Numbers are sorted by value, text by letters."""
    values, y = np.unique(cells, return_inverse=True)
    try:
        order = np.argsort(values.astype(np.float64), kind="stable")
    except (TypeError, ValueError):  # text
        order = np.arange(len(values))
    names = (value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values[order])
    return np.argsort(order)[y].astype(np.int32), tuple(names)


def _alike(names: Sequence[str]) -> tuple[str, ...]:
    """Returns a note about classes that may be one: they differ in spaces around them, or in capital letters."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.strip().casefold(), []).append(name)
    pairs = [" and ".join(map(repr, each)) for each in found.values() if len(each) > 1]
    return (f"Classes differ only in spaces or capital letters: {', '.join(pairs)}.",) if pairs else ()


def _counts_rows(column: np.ndarray) -> bool:
    return len(column) > 2 and bool((np.diff(column) == 1).all())
