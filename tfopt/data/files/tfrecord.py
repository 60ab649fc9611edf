"""TFRecord files: those that `tfopt.data.convert` wrote, and those of other programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any, Literal

from tfopt.atomic.files import check_utf8
from tfopt.data.arguments import Size, check_arguments, height_and_width
from tfopt.data.examples import Examples
from tfopt.data.files.folders import shortened
from tfopt.data.stored import STORED, EncodedImage, Scaled, Stored, decoder_of_json
from tfopt.errors import ConfigError, unknown_name
from tfopt.settings.validation import LONGEST_VALUE, check_value

CHECKS = ("size", "checksum", "off")
COMPRESSIONS = ("", "GZIP", "ZLIB")


def tfrecord(
    *,
    directory: str | Path,
    image_size: int | Sequence[int] | None = None,
    exact: bool | None = None,
    dtype: Literal["float32", "uint8"] | None = None,
    check: Literal["size", "checksum", "off"] = "size",
    skip_damaged: int = 0,
    files_at_a_time: int = 4,
    check_finite: bool = True,
) -> Examples:
    """Reads the TFRecord files that `tfopt.data.convert` or `tfopt data convert` wrote. The source is not needed.

    Several files are read at the same time. The order of the records is always the same. Records are
    decoded in parallel after the shuffle.

    Args:
        directory: Directory with the files and their schema.json.
        image_size: For encoded images another size than they were converted with: the side in pixels, or (height,
            width). The files hold the whole images.
        exact: For encoded images whether to decode JPEGs exactly as Keras does. None: as they were converted.
        dtype: For images "float32" in [0, 1] or "uint8" in 0 to 255. uint8 takes a quarter of the memory and is
            faster; the model then begins with keras.layers.Rescaling(1 / 255). None: as they were converted.
        check: "size" compares the size and the first 64 KiB of each file with the schema. "checksum" reads all files
            once and compares all bytes. "off" looks at none. TensorFlow checks every record while it is read, in any
            case.
        skip_damaged: Largest number of damaged records that may be left out. Above 0, all bytes are checked. The notes
            of the examples say what was left out. The whole records of a damaged file are copied to a temporary file of
            this machine.
        files_at_a_time: Number of files that are read at the same time. It decides the order of the records.
        check_finite: Whether the pipeline ends with an error at a value that is NaN or infinite.
    Raises:
        ConfigError: The directory holds no finished conversion, or one of another version; a file is missing, damaged
            or of another conversion; a setting for images is given and there are none.
    Example:
        >>> import tempfile
        >>> from tfopt.data import convert
        >>> from tfopt.data.sources.scikit_learn import digits
        >>> directory = tempfile.mkdtemp()
        >>> report = convert(digits(image_size=8).limit(50), directory)
        >>> tfrecord(directory=directory).x_test.shape
        (50, 8, 8, 1)
    """
    if check not in CHECKS:
        raise unknown_name("check", check, CHECKS)
    check_arguments(locals())
    check_value("directory", directory, str)
    check_value("dtype", dtype, Literal["float32", "uint8"] | None)
    size = None if image_size is None else height_and_width(image_size)
    import tensorflow as tf

    from tfopt.data.records.encoding import parser, spec_of
    from tfopt.data.records.reading import records_of, usable_files
    from tfopt.data.records.schema import SCHEMA, UNFINISHED, read_schema

    root = Path(directory)
    check_utf8("directory", root)
    if not (root / SCHEMA).is_file():
        unfinished = (root / UNFINISHED).is_file()
        remedy = "Run the conversion again; it goes on where it stopped." if unfinished else "Correct the path."
        missing = f"which has no {SCHEMA}" if root.is_dir() else "which does not exist"
        why = "which is not finished" if unfinished else missing
        raise ConfigError(
            f"directory must hold a conversion by tfopt.data.convert. Received: directory={str(root)!r}, {why}. "
            f"{remedy} tfopt.data.tfrecord_files reads the files of other programs."
        )
    schema = read_schema(root / SCHEMA)
    parts, notes = usable_files(
        root, schema.parts, check=check, skip_damaged=skip_damaged, compression=schema.compression
    )
    try:
        parse = parser(spec_of(schema.structure))
        tf.data.Dataset.from_tensors("").map(parse)  # traces it
    except Exception as error:  # TensorFlow raises many kinds, from TypeError to errors of its tracing
        raise ConfigError(
            f"A schema must have a structure that tfopt.data.convert wrote. Received: {root / SCHEMA} with "
            f"{str(schema.structure)[:LONGEST_VALUE]} ({type(error).__name__}). Convert the examples again, or restore "
            "the file."
        ) from error
    decoders = {role: decoder_of_json(settings) for role, settings in (schema.decoders or {}).items()}
    changes = {"size": size, "exact": exact, "dtype": dtype}
    decoders = _changed(decoders, {name: value for name, value in changes.items() if value is not None})

    def ordered(serialized: Any) -> tuple[Any, ...]:
        parsed = parse(serialized)
        return tuple(parsed[name] for name in STORED if name in parsed)

    # A conversion of these examples stores the same again.
    stored = None if schema.decoders is None else Stored(read=ordered, **decoders)

    def decode(serialized: Any, *, box: Any = None) -> Any:
        parsed = parse(serialized)
        return parsed if stored is None else stored.decode(**parsed, box=box)

    datasets = {
        part: records_of(files.files, files.counts, schema.compression, files_at_a_time)
        for part, files in parts.items()
    }
    return Examples(
        name=schema.name,
        train=datasets["train"],
        test=datasets["test"],
        validation=datasets.get("validation"),
        outputs=schema.outputs,
        class_names=schema.class_names,
        decode=decode,
        decodes_boxes=isinstance(decoders.get("inputs"), EncodedImage) and decoders.get("targets") is None,
        padding=None if schema.padding is None else tuple(schema.padding),
        ignored_target=schema.ignored_target,
        bytes_per_target=schema.bytes_per_target,
        notes=(*schema.notes, *notes),
        stored=stored,
        # Pixels of images are whole numbers.
        check_finite=check_finite and (schema.decoders or {}).get("inputs") is None,
    )


def _changed(decoders: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the decoders with other settings for images. Masks get the size of their images."""
    if not changes:
        return decoders
    if changes == {"dtype": "uint8"} and decoders.get("inputs") == Scaled(divisor=255):  # the pixels of images
        return decoders | {"inputs": None}
    if not isinstance(decoders.get("inputs"), EncodedImage):
        given = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        raise ConfigError(
            f"Settings for images need examples that hold encoded images. Received: {given}, but the examples are "
            "stored as arrays. Leave the settings out."
        )
    changed = {"inputs": replace(decoders["inputs"], **changes), "targets": decoders.get("targets")}
    if "size" in changes and changed["targets"] is not None:
        changed["targets"] = replace(changed["targets"], size=changes["size"])
    return changed


def tfrecord_files(
    *,
    train: str | Path | Sequence[str | Path],
    test: str | Path | Sequence[str | Path],
    validation: str | Path | Sequence[str | Path] | None = None,
    decode: Callable[..., Any],
    outputs: int,
    class_names: Sequence[str] = (),
    compression: Literal["", "GZIP", "ZLIB"] = "",
    files_at_a_time: int = 4,
    check_finite: bool = True,
    name: str = "tfrecord_files",
) -> Examples:
    """Reads TFRecord files that another program wrote. You give the function that decodes a record.

    The records of each file are counted once: by the lengths that the file states, and in a compressed file by reading
    it to its end. Nothing shows that a file without compression was cut off exactly between two records.

    Args:
        train: Files of the training part: a list, or a pattern such as "data/train-*".
        test: Files of the test part.
        validation: Files of the validation part, if there are any.
        decode: Function in TensorFlow from a record, a string scalar, to (inputs, targets[, weight]).
        outputs: Number of outputs of a model.
        class_names: Names of the classes.
        compression: Compression of the files: "", "GZIP" or "ZLIB".
        files_at_a_time: Number of files that are read at the same time. It decides the order of the records.
        check_finite: Whether the pipeline ends with an error at a value that is NaN or infinite.
        name: Name of the data.
    Raises:
        ConfigError: A pattern matches no file; a file is cut off or damaged, is no TFRecord file or has another
            compression; or a part holds no records.
    Example:
        >>> import tempfile
        >>> import tensorflow as tf
        >>> path = Path(tempfile.mkdtemp(), "squares.tfrecord")
        >>> with tf.io.TFRecordWriter(str(path)) as writer:
        ...     for number in range(4):
        ...         writer.write(tf.io.serialize_tensor([number, number**2]).numpy())
        >>> def decode(record):
        ...     pair = tf.ensure_shape(tf.io.parse_tensor(record, tf.int32), 2)
        ...     return pair[:1], pair[1:]
        >>> tfrecord_files(train=path, test=path, decode=decode, outputs=1).y_test.tolist()
        [[0], [1], [4], [9]]
    """
    check_arguments(locals())
    check_value("outputs", outputs, Size)
    check_value("class_names", class_names, tuple[str, ...])
    if compression not in COMPRESSIONS:
        raise unknown_name("compression", str(compression), COMPRESSIONS)
    from tfopt.data.records.reading import records_of

    notes: list[str] = []

    def part(argument: str, given: Any) -> Any:
        files = _listed(argument, given)
        counts = [_count(file, compression) for file in files]
        empty = [str(file) for file, count in zip(files, counts, strict=True) if not count]
        if len(empty) == len(files):
            raise ConfigError(
                f"The {argument} part must hold records. Received: {argument}={given!r}, which holds none."
            )
        if empty:
            notes.append(
                f"Files without records in the {argument} part: {len(empty)} of {len(files)}: {shortened(empty)}."
            )
        return records_of(files, counts, compression, files_at_a_time)

    return Examples(
        name=name,
        train=part("train", train),
        test=part("test", test),
        validation=None if validation is None else part("validation", validation),
        outputs=outputs,
        class_names=tuple(class_names),
        decode=decode,
        notes=tuple(notes),
        check_finite=check_finite,
    )


def _listed(argument: str, given: Any) -> list[Path]:
    patterns = [given] if isinstance(given, str | Path) else list(given)
    files = [Path(name) for pattern in patterns for name in sorted(glob(str(pattern)))]  # noqa: PTH207 (absolute too)
    for file in files:
        check_utf8(argument, file)
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"{argument} must name files. Received: {argument}={given!r}, which matches none.")
    return files


def _count(path: Path, compression: str) -> int:
    from tfopt.data.records.frames import whole_records

    try:
        count, problem = whole_records(path, compression)
    except OSError as error:
        count, problem = 0, f"it cannot be read: {error.strerror or error}"
    # An empty file without compression is whole: some programs write a file for each worker.
    if problem is not None:
        raise ConfigError(
            f"A TFRecord file must be whole, with compression={compression!r} as given. Received: {path}: {problem} "
            "(records are counted from 0). Restore it, or set the compression of the files."
        )
    return count
