"""The columns of CSV and Parquet files as arrays, with errors that name the file and the row."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfopt.atomic.files import check_utf8
from tfopt.data.arguments import Names, optional_package
from tfopt.data.files.folders import content, not_used
from tfopt.data.finite import in_float32
from tfopt.errors import ConfigError
from tfopt.settings.validation import check_stored, check_value

LOOKED_AT = 1000  # cells that tell whether a column with words is meant to hold numbers
LARGEST_BLOCK = 2**31 - 1
DELIMITERS = (";", "\t", "|", ",")
# The first bytes of files that are no text in UTF-8, what they are, and what to do.
STARTS = {
    b"\x1f\x8b": ("is compressed by gzip", "Decompress it"),
    b"BZh": ("is compressed by bzip2", "Decompress it"),
    b"\xfd7zXZ": ("is compressed by xz", "Decompress it"),
    b"\x28\xb5\x2f\xfd": ("is compressed by zstd", "Decompress it"),
    b"PK\x03\x04": ("is a zip archive, as Excel writes them too", "Unpack it, or save it as CSV"),
    b"PAR1": ("is a Parquet file", "Use the source 'parquet'"),
    b"\xff\xfe": ("is in UTF-16", "Save it as UTF-8"),
    b"\xfe\xff": ("is in UTF-16", "Save it as UTF-8"),
}
START_BYTES = 4096
# Numbers as people write them, which are no numbers to a reader of CSV files: 1,000 and 0,5 and $3 and 40%.
WRITTEN_NUMBER = re.compile(r"[-+]?[$€£]?\s*\d+(?:[,' ]\d+)*(?:\.\d+)?\s*[%$€£]?")
NO_NAME = re.compile(r"|Unnamed: \d+")  # how pandas and R name a column of row names


class Table(NamedTuple):
    """The rows of one file: the values of those that were kept (float32 for numbers), which ones these are, a note."""

    columns: dict[str, np.ndarray]
    kept: np.ndarray
    note: str


def table_paths(path: str | Path | Sequence[str | Path], ending: str) -> tuple[list[Path], tuple[str, ...]]:
    """Returns the files that a path names: a file, all files of a folder with an ending, or a pattern; and notes.

    Example:
        >>> table_paths("/missing/*.csv", ".csv")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: path must name .csv files. Received: '/missing/*.csv', ... Correct the path.
    """
    check_value("path", path, Names)
    if not isinstance(path, str | Path):
        each = [table_paths(one, ending) for one in path]
        return [file for files, _ in each for file in files], tuple(note for _, notes in each for note in notes)
    given = Path(path).expanduser()
    notes: tuple[str, ...] = ()
    if given.is_dir():
        folders, files = content(given)
        found = [file for file in files if file.suffix.lower() == ending]
        others = [*folders, *(file for file in files if file not in found)]
        notes = not_used(others, given, f"Files and folders that are no {ending} files")
    else:
        found = [given] if given.is_file() else sorted(Path(given.anchor).glob(str(given.relative_to(given.anchor))))
    if not found:
        raise ConfigError(
            f"path must name {ending} files. Received: {str(path)!r}, which names none. Correct the path."
        )
    for file in found:
        check_utf8("path", file)
        check_stored("A table", file)
    return found, notes


class CsvReader:
    """Reads columns of CSV files. Raises ConfigError if pyarrow is missing, or the file is no CSV file in UTF-8."""

    name = "csv"
    first_row = 2  # line 1 holds the names

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter

    def names(self, path: Path) -> list[str]:
        """Returns the names of the columns."""
        _check_text(path)
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            found = next(csv.reader(file, delimiter=self._delimiter), [])
        if not found:
            raise ConfigError(
                f"A CSV file must hold names of columns in line 1. Received: {str(path)!r}, where it is empty."
            )
        if any("\ufffd" in name for name in found):
            raise ConfigError(f"A CSV file must be in UTF-8. Received: {str(path)!r}, whose line 1 is not. Save it so.")
        return found

    def notes(self, path: Path) -> tuple[str, ...]:
        """Returns a note if line 1 seems to be a row: numbers, but not those that count the columns."""
        names = self.names(path)
        if len(names) < 2 or not np.isfinite(numbers := [_float(name) for name in names]).all():
            return ()
        if (np.diff(numbers) == 1).all():
            return ()
        return (
            f"Line 1 of {path.name} was read as the names of the columns, but holds numbers: {', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}. If it is a row, write a line of names above it.",
        )

    def row_names(self, path: Path) -> list[str]:
        """Returns the columns of row names that programs write beside the columns: those without a name."""
        return [name for name in self.names(path) if NO_NAME.fullmatch(name)]

    def table(self, path: Path, columns: Sequence[str]) -> Any:
        """Returns columns as a table of pyarrow."""
        pyarrow = _pyarrow()
        names = self.names(path)
        other = next((each for each in DELIMITERS if each != self._delimiter and each in names[0]), None)
        if other is not None and len(names) == 1 and not {*columns} <= {*names}:
            raise ConfigError(
                f"delimiter must be the character between the cells. Received: delimiter={self._delimiter!r} for "
                f"{str(path)!r}, whose line 1 holds {other!r} and is one cell with it. Set delimiter={other!r}."
            )
        _check_columns(path, columns, names)
        table = self._read(path, columns, strings_can_be_null=True)
        wrong = [name for name in columns if pyarrow.types.is_binary(table[name].type)]
        if wrong:  # bytes that are no UTF-8 make a column of bytes
            values = table[wrong[0]].to_pylist()
            row = next(number for number, value in enumerate(values) if not _is_text(value))
            raise ConfigError(
                f"A CSV file must be in UTF-8. Received: {str(path)!r}, whose column {wrong[0]!r} holds "
                f"{values[row]!r} in line {row + self.first_row}. Save it as UTF-8."
            )
        return table

    def with_classes(self, path: Path, table: Any, column: str) -> Any:
        """Returns a table whose column of classes holds its cells as they are spelled: "01" and "1" are two classes.

        "NA" and "null" are text, and only a cell without any is empty. In a column of numbers they are empty cells.
        """
        pyarrow = _pyarrow()
        from pyarrow import compute

        cells = self._read(path, [column], column_types={column: pyarrow.string()})[column]
        empty = compute.equal(cells, "")
        if is_number(table[column]):
            cells = compute.utf8_trim_whitespace(cells)  # as the reader of numbers does
            empty = compute.or_(empty, compute.is_null(table[column]))
        cells = compute.if_else(empty, pyarrow.scalar(None, pyarrow.string()), cells)
        return table.set_column(table.column_names.index(column), column, cells)

    def _read(self, path: Path, columns: Sequence[str], **options: Any) -> Any:
        pyarrow = _pyarrow()
        from pyarrow import csv as arrow

        # One block and one thread: the type of a column then comes from all of its cells, and errors have a row number.
        block = min(path.stat().st_size + 1, LARGEST_BLOCK)
        # In a file of one column, a line without text is a row with an empty cell.
        several = len(self.names(path)) > 1
        try:
            return arrow.read_csv(
                path,
                read_options=arrow.ReadOptions(use_threads=False, block_size=block),
                parse_options=arrow.ParseOptions(
                    delimiter=self._delimiter, newlines_in_values=True, ignore_empty_lines=several
                ),
                convert_options=arrow.ConvertOptions(include_columns=list(columns), **options),
            )
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise ConfigError(
                "A CSV file must have as many cells in each row as names of columns. "
                f"Received: {str(path)!r} ({' '.join(str(error).split())}). Correct the file."
            ) from error


class ParquetReader:
    """Reads columns of Parquet files. Raises ConfigError if pyarrow is missing, or the file is damaged."""

    name = "parquet"
    first_row = 0

    def names(self, path: Path) -> list[str]:
        """Returns the names of the columns."""
        return list(self._read(path, "read_schema").names)

    def notes(self, path: Path) -> tuple[str, ...]:
        """Returns no notes: a Parquet file always has names of columns."""
        return ()

    def row_names(self, path: Path) -> list[str]:
        """Returns the columns that hold the index of a table of pandas."""
        stored = self._read(path, "read_schema").metadata or {}
        index = json.loads(stored.get(b"pandas", b"{}")).get("index_columns", [])
        return [name for name in index if isinstance(name, str)]

    def table(self, path: Path, columns: Sequence[str]) -> Any:
        """Returns columns as a table of pyarrow."""
        _check_columns(path, columns, self.names(path))
        # Checksums find changed bytes in the pages of files that hold them.
        return self._read(path, "read_table", columns=list(columns), page_checksum_verification=True)

    def with_classes(self, path: Path, table: Any, column: str) -> Any:
        """Returns the table as it is: a Parquet file says of which type a column is."""
        return table

    def _read(self, path: Path, function: str, **options: Any) -> Any:
        pyarrow = _pyarrow()
        from pyarrow import parquet

        try:
            return getattr(parquet, function)(path, **options)
        except (OSError, pyarrow.ArrowException) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"A Parquet file must be whole. Received: {str(path)!r} ({reason}). Write it again."
            ) from error


def is_number(column: Any) -> bool:
    """Returns whether a column of a pyarrow table holds numbers."""
    types = _pyarrow().types
    return bool(types.is_integer(column.type) or types.is_floating(column.type) or types.is_decimal(column.type))


def is_mostly_numbers(column: Any) -> bool:
    """Returns whether most of the first cells of a column are numbers, also if some are words."""
    if is_number(column):
        return True
    cells = [cell for cell in column.slice(0, LOOKED_AT).to_pylist() if cell not in (None, "")]
    numbers = [
        cell
        for cell in cells
        if isinstance(cell, str) and (WRITTEN_NUMBER.fullmatch(cell.strip()) or not np.isnan(_float(cell)))
    ]
    return 2 * len(numbers) > len(cells)


def as_arrays(
    table: Any, path: Path, columns: Sequence[str], numbers: Collection[str], missing: str, first_row: int
) -> Table:
    """Returns the columns of a pyarrow table as arrays.

    Args:
        numbers: Names of the columns that must hold numbers.
        missing: "error" or "drop": what to do with rows that have an empty cell.
        first_row: Number of the first row, for messages.
    Raises:
        ConfigError: A cell is empty and `missing` is "error", or a cell of `numbers` holds no number.
    """
    empty = {name: table[name].is_null().to_numpy() for name in columns}
    incomplete = np.any(list(empty.values()), axis=0)
    rows = np.flatnonzero(incomplete)
    notes = []
    if len(rows):
        name = next(each for each in columns if empty[each][rows[0]])
        if missing == "error":
            raise ConfigError(
                f"Every cell must hold a value. Received: {str(path)!r} with {len(rows)} rows that have empty cells, "
                f"the first in column {name!r}, row {rows[0] + first_row}. Fill them, or set missing='drop'."
            )
        table = table.filter(_pyarrow().array(~incomplete))
        notes.append(f"Rows with empty cells were left out: {len(rows)} of {len(incomplete)} in {path.name}.")
    kept = np.flatnonzero(~incomplete) + first_row

    def values(name: str) -> np.ndarray:
        if name not in numbers:
            if _pyarrow().types.is_floating(table[name].type):  # numbers as classes
                _numbers(table[name], name, path, kept)
            return np.asarray(table[name].to_numpy())
        found = _numbers(table[name], name, path, kept)
        whole = _pyarrow().types.is_integer(table[name].type)
        notes.append(_rounding(found, name, path) if whole else _merging(found, name, path))
        return in_float32(found)

    return Table({name: values(name) for name in columns}, ~incomplete, " ".join(filter(None, notes)))


def _numbers(column: Any, name: str, path: Path, row_numbers: np.ndarray) -> np.ndarray:
    """Returns a column as float64. Raises ConfigError unless all cells are finite in float32."""
    pyarrow = _pyarrow()
    if is_number(column) or pyarrow.types.is_boolean(column.type):
        # Not safe: whole numbers above 2**53 are rounded.
        found = column.cast(pyarrow.float64(), safe=False).to_numpy() if len(column) else np.empty(0)
    else:
        found = np.array([_float(value) for value in column.to_pylist()], np.float64)
    wrong = np.flatnonzero(~np.isfinite(in_float32(found)))
    if len(wrong):
        too_large = " below 3.4e38, the largest of float32" if np.isfinite(found[wrong[0]]) else ""
        others = f", and {len(wrong) - 1} more such cells" if len(wrong) > 1 else ""
        raise ConfigError(
            f"Column {name!r} must hold numbers{too_large}. Received: {column[int(wrong[0])].as_py()!r} in row "
            f"{row_numbers[wrong[0]]} of {str(path)!r}{others}. Correct the cells, or leave the column out. "
            "With classes=True, every spelling of a target is a class."
        )
    return found


def _rounding(numbers: np.ndarray, name: str, path: Path) -> str:
    rounded = np.count_nonzero((in_float32(numbers) != numbers) | (np.abs(numbers) >= 2**53))
    return (
        f"Column {name!r} of {path.name} holds whole numbers above {2**24:,}, which float32 rounds: {rounded} of "
        f"{len(numbers)}."
        if rounded
        else ""
    )


def _merging(numbers: np.ndarray, name: str, path: Path) -> str:
    """Returns a note about numbers of which most become equal in float32, or nothing."""
    before, after = len(np.unique(numbers)), len(np.unique(in_float32(numbers)))
    return (
        f"Column {name!r} of {path.name} holds numbers that float32 rounds to each other: {before} different ones "
        f"become {after}. Subtract their smallest one before."
        if 2 * after < before
        else ""
    )


def _float(value: Any) -> float:
    """Returns a cell of a mixed column as a number, or NaN if it holds none."""
    try:
        return float("nan") if isinstance(value, str) and "_" in value else float(value)
    except (TypeError, ValueError):
        return float("nan")


def _is_text(value: bytes | None) -> bool:
    try:
        return value is None or bool(value.decode() or True)
    except UnicodeDecodeError:
        return False


def _check_text(path: Path) -> None:
    """Raises ConfigError if the first bytes of a file are of no text in UTF-8."""
    with path.open("rb") as file:
        start = file.read(START_BYTES)
    found = next((words for first, words in STARTS.items() if start.startswith(first)), None)
    if found is None and b"\0" in start:  # without a byte order mark
        found = ("holds zero bytes, so it is in UTF-16 or no text", "Save it as UTF-8")
    if found is not None:
        raise ConfigError(f"A CSV file must be text in UTF-8. Received: {str(path)!r}, which {found[0]}. {found[1]}.")


def _check_columns(path: Path, columns: Sequence[str], present: list[str]) -> None:
    absent = [name for name in columns if name not in present]
    if absent:
        raise ConfigError(
            f"{str(path)!r} must have the columns {', '.join(map(repr, columns))}. Received: a file without "
            f"{', '.join(map(repr, absent))}; its columns are {', '.join(map(repr, present))}. Correct the names."
        )
    repeated = [name for name in columns if present.count(name) > 1]
    if repeated:
        raise ConfigError(
            f"Every column that is used must have a name of its own. Received: {str(path)!r} with "
            f"{present.count(repeated[0])} columns {repeated[0]!r}. Rename them."
        )


def _pyarrow() -> Any:
    return optional_package("pyarrow", "tables", "A table")
