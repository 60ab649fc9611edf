"""Data sets of the Hugging Face Hub, and those that its package `datasets` has saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.data.arguments import check_arguments, height_and_width, optional_package
from tfopt.data.examples import Examples
from tfopt.data.sources.hub_features import Feature, decoder, named_feature, outputs_of
from tfopt.data.splits import split
from tfopt.errors import ConfigError

ROWS_PER_CALL = 64
USUAL_INPUTS = ("image", "img", "text", "sentence", "content")
USUAL_TARGETS = ("label", "labels", "fine_label", "target")


def huggingface(
    *,
    name: str | Path,
    config: str | None = None,
    data_files: str | Sequence[str] | Mapping[str, Any] | None = None,
    revision: str | None = None,
    inputs: str | None = None,
    targets: str | None = None,
    image_size: int | Sequence[int] | None = None,
    central_crop: float | None = None,
    length: int = 512,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int = 0,
) -> Examples:
    """Reads a data set of the Hugging Face Hub, or one in local files. Its rows stay on disk until they are needed.

    The parts are the data set's own splits train, validation and test. A part without a split is a share of the train
    split. It needs the package datasets: pip install 'tfopt[huggingface]'.

    Args:
        name: Name on the hub; a folder that `save_to_disk` wrote; or a format, such as "parquet", with `data_files`.
        config: Configuration of the data set.
        data_files: Files, or a dict of the files of each split.
        revision: Version on the hub: a tag, a branch or a commit. A commit keeps the data the same.
        inputs: Feature of the inputs: images, text or numbers. None takes a usual name, such as "image" or "text".
        targets: Feature of the targets: classes, strings that name classes, or numbers.
        image_size: Side of the images in pixels, or (height, width).
        central_crop: Share of the largest centred part with the aspect ratio of `image_size`, which alone is resized,
            so that the content keeps its aspect ratio. None resizes the whole image.
        length: Number of bytes of a text. A shorter text is filled with 0.
        test_fraction: Share of the train split for testing, if there is no test split.
        validation_fraction: Share of the train split for validation, if there is no validation split.
        seed: Seed of the order, and of the shares.
    Returns: Images float32 [height, width, 3] in [0, 1], the bytes of a text int32 [length], or numbers; and class
        numbers or numbers.
    Raises:
        ConfigError: The package is missing, the data set is unknown or cannot be downloaded, or a feature is missing or
            of another kind.
    Example:
        >>> import tempfile, datasets
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     rows = {"text": ["good", "bad"] * 10, "label": [1, 0] * 10}
        ...     datasets.Dataset.from_dict(rows).save_to_disk(directory)
        ...     examples = huggingface(name=directory, length=8)
        ...     examples.x_train.shape
        (16, 8)
    """
    check_arguments(locals())
    if image_size is not None:
        height_and_width(image_size)
    package = optional_package("datasets", "huggingface", "The source 'huggingface'")
    splits = _load(package, name, config, data_files, revision)
    train = splits["train"]
    x, y = _features(package, train, inputs, targets)
    decode = decoder(x, y, image_size, length, central_crop)
    by_class = np.asarray(train[y.name][:]) if y.kind == "class" else None
    classes = None if by_class is None else np.unique(by_class, return_inverse=True)[1]
    own_test, own_validation = "test" in splits, "validation" in splits
    chosen = split(
        len(train), classes, 0 if own_test else test_fraction, 0 if own_validation else validation_fraction, seed
    )
    rows = {part: (train, numbers) for part, numbers in chosen.items()}
    for part in ("validation", "test"):
        if part in splits:
            rows[part] = (splits[part], np.random.default_rng(seed).permutation(len(splits[part])))
    if not len(rows["test"][1]):
        raise ConfigError(f"The test part must hold examples. Received: test_fraction={test_fraction}. 0.2 is usual.")
    return Examples(
        name=f"huggingface {name}",
        train=_records(package, *rows["train"], x, y),
        validation=_records(package, *rows["validation"], x, y) if len(rows["validation"][1]) else None,
        test=_records(package, *rows["test"], x, y),
        outputs=outputs_of(y),
        class_names=y.class_names,
        decode=decode,
        decodes_boxes=x.kind == "image",
    )


def _load(package: Any, name: str | Path, config: str | None, data_files: Any, revision: str | None) -> dict[str, Any]:
    folder = Path(name).expanduser()
    try:
        if any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            found = package.load_from_disk(str(folder))
        else:
            found = package.load_dataset(str(name), config, data_files=data_files, revision=revision)
    except Exception as error:  # the package and its file systems raise many kinds
        raise ConfigError(
            f"name must be a data set that the package datasets can read. Received: name={str(name)!r} "
            f"({' '.join(str(error).split())[:300]}). Without a network, save it elsewhere with save_to_disk, and pass "
            "the folder as name."
        ) from error
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    if "train" not in splits:
        raise ConfigError(f"The data set must have a split 'train'. Received: {', '.join(map(repr, splits))}.")
    return splits


def _features(package: Any, data: Any, inputs: str | None, targets: str | None) -> tuple[Feature, Feature]:
    names = list(data.features)
    x = named_feature(names, inputs, USUAL_INPUTS, "inputs")
    y = named_feature(names, targets, USUAL_TARGETS, "targets")

    _check_complete(data, x, y)

    def feature(name: str, *, is_target: bool) -> Feature:
        found = data.features[name]
        if isinstance(found, package.Image):
            return Feature(name, "image")
        if isinstance(found, package.ClassLabel):
            return Feature(name, "class", (), tuple(found.names))
        if isinstance(found, package.Value) and found.dtype in ("string", "large_string"):
            classes = tuple(sorted(map(str, data.unique(name)))) if is_target else ()
            return Feature(name, "class" if is_target else "text", (), classes)
        sample = np.asarray(data.with_format("numpy", columns=[name])[0][name])
        if sample.dtype.kind not in "biuf":
            raise ConfigError(
                f"Features must be images, text, classes or numbers. Received: {name!r}, {found}. Name another feature "
                "with inputs= or targets=."
            )
        if is_target and sample.dtype.kind in "biu" and sample.ndim == 0:
            numbers = data.unique(name)
            if min(numbers) >= 0:
                return Feature(name, "class", (), tuple(map(str, range(max(numbers) + 1))))
        return Feature(name, "values", sample.shape)

    return feature(x, is_target=False), feature(y, is_target=True)


def _check_complete(data: Any, *names: str) -> None:
    for name in names:
        missing = data.data.column(name).null_count
        if missing:
            raise ConfigError(
                f"Every example must have a value. Received: column {name!r} with {missing} rows without one. "
                "Leave them out: dataset.filter(...)."
            )


def _records(package: Any, data: Any, numbers: np.ndarray, x: Feature, y: Feature) -> Any:
    """Returns a data set of (inputs, targets), read many rows at a time."""
    import tensorflow as tf

    if x.kind == "image":
        data = data.cast_column(x.name, package.Image(decode=False))
    _check_complete(data, x.name, y.name)
    data = data.select_columns([x.name, y.name]).with_format("numpy" if x.kind == "values" else None)
    classes = {name: number for number, name in enumerate(y.class_names)}
    text_classes = data.features[y.name].dtype in ("string", "large_string") if y.kind == "class" else False
    sample = np.asarray(data[0][x.name]) if x.kind == "values" else None
    types = (tf.string if sample is None else tf.as_dtype(sample.dtype), tf.int32 if y.kind == "class" else tf.float32)
    shapes = ((None, *(() if sample is None else sample.shape)), (None, *y.shape))

    def read(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = data[chosen.tolist()]
        targets = [classes[str(each)] for each in found[y.name]] if text_classes else found[y.name]
        if x.kind == "values":
            inputs = np.asarray(found[x.name], types[0].as_numpy_dtype)  # a row and rows have different types
        else:
            inputs = np.array([_content(each) for each in found[x.name]], dtype=object)
        return inputs, np.asarray(targets, np.int32 if y.kind == "class" else np.float32)

    def rows(chosen: Any) -> Any:
        inputs, targets = tf.numpy_function(read, [chosen], types)
        return tf.ensure_shape(inputs, shapes[0]), tf.ensure_shape(targets, shapes[1])

    calls = tf.data.Dataset.from_tensor_slices(numbers).batch(ROWS_PER_CALL)
    records = calls.map(rows, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).unbatch()
    return records.apply(tf.data.experimental.assert_cardinality(len(numbers)))


def _content(value: Any) -> bytes:
    """Returns the bytes of a text, or of an image, which may be in a file of its own."""
    if isinstance(value, Mapping):
        return value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()
    return str(value).encode()
