"""Arrays in .npy files that are not loaded: their rows are read from the file in a random order.

The rows are read with `os.preadv`, many in one call of a function, and not through a memory map. A map is as fast, but
it ends the process without an error if the file becomes shorter or the disk fails, and its pages count as memory of the
process.
"""

from __future__ import annotations

import os
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.data.arguments import check_arguments
from tfopt.data.examples import Examples
from tfopt.data.finite import CHECK_OFF, CHUNK_BYTES, narrowed, not_finite
from tfopt.data.in_memory import check_classes, holds_classes, is_known
from tfopt.data.splits import split
from tfopt.errors import ConfigError
from tfopt.settings.validation import check_stored, check_value

# The rows that one call reads. The calls share Python's lock, so a call must be worth its cost.
ROWS_PER_CALL = 64
# Above this the rows of one call take too much memory.
LARGEST_CALL_BYTES = 2**23
# Above this, reading all rows before the training takes too long.
LARGEST_CHECK_BYTES = 2**32


def numpy_files(
    *,
    x: str | Path | Mapping[str, str | Path],
    y: str | Path,
    x_test: str | Path | Mapping[str, str | Path] | None = None,
    y_test: str | Path | None = None,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    outputs: int | None = None,
    check_finite: bool = True,
    seed: int = 0,
) -> Examples:
    """Reads examples from .npy files, which may be larger than the memory. A row of the arrays is an example.

    The rows of the training part come in a random order, which depends on the seed alone. On a slow disk, sequential
    reading is faster: convert the examples to TFRecord files.

    Args:
        x: Inputs, [n, ...], in a file that `numpy.save` wrote; for a model of several inputs a dict of files by name.
        y: Targets, [n, ...]: class numbers from 0, or other numbers.
        x_test: Inputs of the test part. Without them the test part is a share of the rows of x.
        y_test: Targets of the test part.
        test_fraction: Share of the test part, the same for every class.
        validation_fraction: Share of the validation part. With 0 there is none.
        outputs: Number of outputs of a model. None means the number of classes if y holds integers, [n], [n, 1] or
            masks [n, height, width]; otherwise the length of the last axis of y.
        check_finite: Whether values that are NaN or infinite, also once they are float32, are an error. Files of up to
            4 GiB are read once for that. The rows of larger ones are looked at when they are read.
        seed: Seed of the split and of the order.
    Returns: Rows with the types of the files; float64 becomes float32.
    Raises:
        ConfigError: A file is missing, cut off, too long, no .npy file, of a type that is no number, in Fortran order,
            or holds values that are not finite or class numbers that are not below `outputs`; or the files differ in
            length.
    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     np.save(Path(directory, "x.npy"), np.zeros((100, 8), "float32"))
        ...     np.save(Path(directory, "y.npy"), np.arange(100) % 4)
        ...     examples = numpy_files(x=Path(directory, "x.npy"), y=Path(directory, "y.npy"))
        ...     examples.x_train.shape, examples.outputs
        ((80, 8), 4)
    """
    import tensorflow as tf

    if (x_test is None) != (y_test is None):
        raise ConfigError("x_test and y_test must be given together. Received: one of them. Give both, or none.")
    own_test = x_test is not None
    check_arguments(locals())
    for name, given in {"x": x, "y": y, "x_test": x_test, "y_test": y_test}.items():
        for path in given.values() if isinstance(given, Mapping) else (given,):
            check_value(name, path, str | None if name.endswith("_test") else str)
    if not own_test and not test_fraction:
        raise ConfigError("test_fraction must be above 0 without x_test. Received: test_fraction=0. 0.2 is usual.")
    rows = _Rows(x, y, check_finite)
    targets = rows.targets()
    if holds_classes(targets) and targets.min() < 0:
        raise ConfigError(f"Class numbers must be at least 0. Received: {targets.min()} in {str(y)!r}. Count from 0.")
    count = _outputs(targets, rows.y) if outputs is None else outputs
    check_classes(repr(str(y)), targets, count)
    classes = targets if holds_classes(targets) else None
    numbers = split(len(targets), classes, 0 if own_test else test_fraction, validation_fraction, seed)
    if x_test is not None and y_test is not None:
        test_rows = _Rows(x_test, y_test, check_finite)
        rows.check_same(test_rows)
        check_classes(repr(str(y_test)), test_rows.targets(), count)
        test = test_rows.dataset(np.random.default_rng(seed).permutation(len(test_rows)))
    else:
        test = rows.dataset(numbers["test"])

    def narrow(*row: Any) -> Any:
        return tf.nest.map_structure(narrowed, row)

    return Examples(
        name="numpy",
        train=rows.dataset(numbers["train"]),
        test=test,
        validation=rows.dataset(numbers["validation"]) if validation_fraction else None,
        outputs=count,
        decode=narrow if rows.holds_float64 else None,
        check_finite=False,  # the rows are looked at here
    )


class ArrayFile:
    """An array in a .npy file, of which rows are read.

    Raises:
        ConfigError: The file is missing, cut off, too long, no .npy file, or holds no rows of numbers in C order.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(Path(path).expanduser())
        check_stored("A .npy file", self.path)
        try:
            # Only the header is read here. Objects are refused: reading them could run code from the file.
            array = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as error:
            raise ConfigError(f"A .npy file must exist. Received: {self.path!r}. Correct the path.") from error
        except (OSError, ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:  # a damaged header: all five
            raise ConfigError(
                f"Examples must be whole .npy files of numbers. Received: {self.path!r} ({error}). Write the file "
                "again with numpy.save(file, array)."
            ) from error
        if not isinstance(array, np.memmap):
            raise ConfigError(
                f"Examples must be .npy files. Received: {self.path!r}, a .npz file. Save each array with numpy.save."
            )
        self.shape: tuple[int, ...] = array.shape
        self.dtype: np.dtype[Any] = array.dtype
        holds_numbers = array.dtype.kind in "biufc" and is_known(array.dtype) and array.dtype.isnative
        if not (array.size and array.ndim and holds_numbers and array.flags.c_contiguous):
            order = "" if array.flags.c_contiguous else ", Fortran order"
            raise ConfigError(
                f"A .npy file of examples must hold rows of numbers in native byte order and C order. Received: "
                f"{self.path!r} of dtype {array.dtype.str}, shape {array.shape}{order}. Write it again: "
                "numpy.save(file, numpy.ascontiguousarray(array, 'float32'))."
            )
        self._offset = int(array.offset)
        size, needed = Path(self.path).stat().st_size, self._offset + array.nbytes
        if size != needed:
            raise ConfigError(
                f"A .npy file of examples must end with its array. Received: {self.path!r} with {size - needed:,} more "
                "bytes: its header is damaged, or it holds further arrays. Save each array in a file of its own."
            )
        self.row_bytes = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
        self._file = Path(self.path).open("rb", buffering=0)  # noqa: SIM115 it closes when nothing reads rows any more

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Reads rows. Raises OSError if the file has become shorter, or cannot be read."""
        out = np.empty((len(numbers), self.row_bytes), np.uint8)
        descriptor = self._file.fileno()
        for place, number in enumerate(numbers.tolist()):
            read = os.preadv(descriptor, [out[place]], self._offset + number * self.row_bytes)
            if read != self.row_bytes:
                raise OSError(f"{self.path!r} ends within row {number}: the file has become shorter. Write it again.")
        return out.view(self.dtype).reshape(len(numbers), *self.shape[1:])

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Reads the rows in their order, in parts of a few MB, each with the number of its first row."""
        rows = max(1, CHUNK_BYTES // max(1, self.row_bytes))
        for start in range(0, len(self), rows):
            shape = (min(rows, len(self) - start), *self.shape[1:])
            offset = self._offset + start * self.row_bytes
            yield start, np.fromfile(self.path, self.dtype, int(np.prod(shape)), offset=offset).reshape(shape)


class _Rows:
    """The rows of the files of inputs and targets."""

    def __init__(self, x: Any, y: str | Path, check_finite: bool) -> None:
        self.names = tuple(x) if isinstance(x, Mapping) else None
        inputs = [ArrayFile(path) for path in (x.values() if isinstance(x, Mapping) else (x,))]
        self.y = ArrayFile(y)
        self.files = (*inputs, self.y)
        self.holds_float64 = any(file.dtype == np.float64 for file in self.files)
        lengths = {file.path: len(file) for file in self.files}
        if len({*lengths.values()}) != 1 or not len(self.y):
            found = ", ".join(f"{length} in {path!r}" for path, length in lengths.items())
            raise ConfigError(f"The files must hold as many rows, at least one. Received: {found}. Check the files.")
        floats = [file for file in self.files if file.dtype.kind in "fc"] if check_finite else []
        small = sum(len(file) * file.row_bytes for file in floats) <= LARGEST_CHECK_BYTES
        self._checked_later = [] if small else floats
        for file in floats if small else ():
            if problem := not_finite(file.chunks(), len(file)):
                raise ConfigError(_not_finite_words(file.path, problem))

    def __len__(self) -> int:
        return len(self.y)

    def check_same(self, other: _Rows) -> None:
        """Raises ConfigError unless the rows of other files have the same shapes and types."""
        for mine, theirs in zip(self.files, other.files, strict=False):
            if (mine.shape[1:], mine.dtype) != (theirs.shape[1:], theirs.dtype) or self.names != other.names:
                raise ConfigError(
                    f"The files of both parts must hold rows of one shape and type. Received: {mine.path!r} of shape "
                    f"{mine.shape}, {mine.dtype}, and {theirs.path!r} of shape {theirs.shape}, {theirs.dtype}."
                )

    def targets(self) -> np.ndarray:
        """Returns the targets [n] if they are class numbers or numbers, which are small; otherwise an empty array."""
        if self.y.shape[1:] not in ((), (1,)):
            return np.empty((len(self.y), 0), self.y.dtype)
        return np.concatenate([rows for _, rows in self.y.chunks()]).reshape(-1)

    def dataset(self, numbers: np.ndarray) -> Any:
        """Returns a data set of rows."""
        import tensorflow as tf

        files = self.files
        per_call = max(1, min(ROWS_PER_CALL, LARGEST_CALL_BYTES // max(1, sum(file.row_bytes for file in files))))

        def read(numbers: np.ndarray) -> tuple[np.ndarray, ...]:
            found = tuple(file.rows(numbers) for file in files)
            for file, values in zip(files, found, strict=True):
                if file in self._checked_later and not_finite(iter([(0, values)]), len(values)):
                    pairs = ((number, values[i : i + 1]) for i, number in enumerate(numbers.tolist()))
                    raise ValueError(_not_finite_words(file.path, not_finite(pairs, len(values))))
            return found

        def rows(numbers: Any) -> Any:
            found = tf.numpy_function(read, [numbers], [file.dtype for file in files])
            *inputs, targets = (
                tf.ensure_shape(each, (None, *file.shape[1:])) for each, file in zip(found, files, strict=True)
            )
            return (inputs[0] if self.names is None else dict(zip(self.names, inputs, strict=True))), targets

        calls = tf.data.Dataset.from_tensor_slices(numbers).batch(per_call)
        read_rows = calls.map(rows, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).unbatch()
        return read_rows.apply(tf.data.experimental.assert_cardinality(len(numbers)))


def _not_finite_words(path: str, problem: str | None) -> str:
    return (
        f"{path!r} must hold finite float32 numbers. Received: {problem}. Write the file again without these rows, or "
        f"{CHECK_OFF}."
    )


def _outputs(targets: np.ndarray, y: ArrayFile) -> int:
    if holds_classes(targets):
        return int(targets.max()) + 1
    if len(y.shape) > 2 and y.dtype.kind in "iu":  # masks
        return max(int(rows.max()) for _, rows in y.chunks()) + 1
    return y.shape[-1] if len(y.shape) > 1 else 1
