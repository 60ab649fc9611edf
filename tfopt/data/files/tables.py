"""Tables in CSV and Parquet files: columns become inputs and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from tfopt.data.arguments import Names, check_arguments
from tfopt.data.examples import Examples
from tfopt.data.files.in_memory import arrays
from tfopt.data.files.table_files import (
    MISSING,
    CsvReader,
    ParquetReader,
    Table,
    as_arrays,
    is_mostly_numbers,
    is_number,
    table_paths,
)
from tfopt.data.files.windows import Series, window_examples
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
    paths, notes = table_paths(path, ".csv")
    request = _Request(
        name="csv",
        paths=paths,
        notes=notes,
        read=CsvReader(delimiter),
        inputs=inputs,
        targets=_targets(target),
        classes=classes,
        window=window,
        horizon=horizon,
        stride=stride,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        missing=missing,
        seed=seed,
    )
    return request.examples()


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
    paths, notes = table_paths(path, ".parquet")
    request = _Request(
        name="parquet",
        paths=paths,
        notes=notes,
        read=ParquetReader(),
        inputs=inputs,
        targets=_targets(target),
        classes=classes,
        window=window,
        horizon=horizon,
        stride=stride,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        missing=missing,
        seed=seed,
    )
    return request.examples()


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The arguments of a source of tables."""

    name: str
    paths: list[Path]
    notes: tuple[str, ...]
    read: CsvReader | ParquetReader
    inputs: Inputs
    targets: tuple[str, ...]
    classes: bool | None
    window: int | None
    horizon: int
    stride: int
    test_fraction: float
    validation_fraction: float
    missing: str
    seed: int

    def __post_init__(self) -> None:
        check_arguments(
            window=self.window,
            horizon=self.horizon,
            stride=self.stride,
            test_fraction=self.test_fraction,
            validation_fraction=self.validation_fraction,
            seed=self.seed,
        )
        check_value("classes", self.classes, bool | None)
        for columns in self.inputs.values() if isinstance(self.inputs, Mapping) else (self.inputs,):
            check_value("inputs", columns, tuple[str, ...] if columns is not None else None)
        if self.missing not in MISSING:
            raise ConfigError(f"missing must be 'error' or 'drop'. Received: missing={self.missing!r}.")
        if self.classes and (self.window is not None or len(self.targets) != 1):
            raise ConfigError(
                "classes must be False for a forecast and for several targets. "
                f"Received: classes=True, window={self.window}, {len(self.targets)} targets. Leave classes out."
            )

    def examples(self) -> Examples:
        groups = self._groups()
        inputs = [column for columns in groups.values() for column in columns]
        if not inputs or not self.targets:
            raise ConfigError("A table must have columns for inputs and a target. Received: none. Name the columns.")
        columns = list(dict.fromkeys([*inputs, *self.targets]))
        files = [self.read.table(path, columns) for path in self.paths]
        text = len(self.targets) == 1 and any(not is_number(file[self.targets[0]]) for file in files if len(file))
        # A column of numbers with a few words is a column with wrong cells, which are named below.
        text = text and not all(is_mostly_numbers(file[self.targets[0]]) for file in files if len(file))
        is_class = self.classes if self.classes is not None else text and self.window is None
        if is_class:
            files = [
                self.read.with_classes(path, file, self.targets[0])
                for path, file in zip(self.paths, files, strict=True)
            ]
        numbers = {*inputs} if is_class else {*inputs, *self.targets}
        tables = [
            as_arrays(file, path, columns, numbers, self.missing, self.read.first_row)
            for path, file in zip(self.paths, files, strict=True)
        ]
        of_names = (note for path in self.paths for note in self.read.notes(path))
        notes = (*self.notes, *of_names, *self._row_names_note(), *(table.note for table in tables if table.note))
        if self.window is not None:
            return self._windows(tables, groups, notes)
        if not any(table.kept.any() for table in tables):
            found = ", ".join(repr(str(path)) for path in self.paths)
            raise ConfigError(
                f"A table must have rows without empty cells. Received: {found} with none. {' '.join(notes)}".strip()
            )
        joined = {name: np.concatenate([table.columns[name] for table in tables]) for name in columns}
        x = {name: np.stack([joined[each] for each in group], axis=1) for name, group in groups.items()}
        names: tuple[str, ...] = ()
        if is_class:
            y, names = _classes(joined[self.targets[0]])
            notes += _alike(names)
        else:
            y = np.stack([joined[each] for each in self.targets], axis=1)
        if (leaks := [name for name in self.targets if name in inputs]) and len(inputs) > len(leaks):
            notes += (f"The target is also an input: {', '.join(map(repr, leaks))}. A model only has to copy it.",)
        counts = [name for name in inputs if self.inputs is None and _counts_rows(joined[name])]
        if counts:
            notes += (
                f"An input only counts the rows: {', '.join(map(repr, counts))}. If it is no property of a row, name "
                "the others with inputs=[...].",
            )
        examples = arrays(
            x if isinstance(self.inputs, Mapping) else x[""],
            y,
            test_fraction=self.test_fraction,
            validation_fraction=self.validation_fraction,
            class_names=names,
            seed=self.seed,
            name=self.name,
        )
        return replace(examples, notes=notes)

    def _groups(self) -> dict[str, list[str]]:
        """Returns the columns of each input; the name of a single input is empty."""
        if isinstance(self.inputs, Mapping):
            return {name: list(columns) for name, columns in self.inputs.items()}
        if self.inputs is not None:
            return {"": list(self.inputs)}
        left_out = {*self.targets, *self.read.row_names(self.paths[0])}
        return {"": [name for name in self.read.names(self.paths[0]) if name not in left_out]}

    def _row_names_note(self) -> tuple[str, ...]:
        names = [] if self.inputs is not None else self.read.row_names(self.paths[0])
        found = ", ".join(repr(name) for name in names if name not in self.targets)
        return (f"Row names are no inputs: column {found}. To use it, name it in inputs=[...].",) if found else ()

    def _windows(self, tables: list[Table], groups: dict[str, list[str]], notes: tuple[str, ...]) -> Examples:
        if self.window is None or isinstance(self.inputs, Mapping):
            raise ConfigError("inputs must be a list of columns for a forecast. Received: a dict. Join its columns.")

        def matrix(table: Table, columns: Sequence[str]) -> np.ndarray:
            return np.stack([table.columns[each] for each in columns], axis=1)

        return window_examples(
            [Series(matrix(table, groups[""]), matrix(table, self.targets), table.kept) for table in tables],
            window=self.window,
            horizon=self.horizon,
            stride=self.stride,
            test_fraction=self.test_fraction,
            validation_fraction=self.validation_fraction,
            seed=self.seed,
            name=self.name,
            notes=notes,
        )


def _targets(target: str | Sequence[str]) -> tuple[str, ...]:
    columns = check_value("target", target, Names)
    return (columns,) if isinstance(columns, str) else tuple(columns)


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
