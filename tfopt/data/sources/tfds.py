"""Data sets of TensorFlow Datasets (TFDS)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.data.arguments import check_arguments, height_and_width, optional_package
from tfopt.data.examples import Examples
from tfopt.data.sources.hub_features import Feature, decoder, named_feature, outputs_of
from tfopt.errors import ConfigError


def tfds(
    *,
    name: str | Path,
    data_dir: str | Path | None = None,
    download: bool = True,
    inputs: str | None = None,
    targets: str | None = None,
    image_size: int | Sequence[int] | None = None,
    central_crop: float | None = None,
    length: int = 512,
    test_split: str = "test",
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
) -> Examples:
    """Reads a data set of TensorFlow Datasets. Images stay encoded until after the shuffle.

    The parts are the data set's own splits train, validation and test. A part without a split is a share of the train
    split. It needs the package tensorflow-datasets: pip install 'tfopt[tfds]'.

    Args:
        name: Name in the catalogue of TFDS, with a configuration and a version if wanted, such as "mnist:3.*.*"; or
            the folder of a data set that TFDS has prepared.
        data_dir: Folder of prepared data sets. None means TFDS' own, ~/tensorflow_datasets.
        download: Whether to download and prepare a data set that is not in `data_dir`.
        inputs: Feature of the inputs: images, text or numbers. None takes the one that the data set names.
        targets: Feature of the targets: classes or numbers.
        image_size: Side of the images in pixels, or (height, width). None keeps their size if all have the same.
        central_crop: Share of the largest centred part with the aspect ratio of `image_size`, which alone is resized,
            so that the content keeps its aspect ratio. Published scores on ImageNet use 0.875 (256 pixels, of which
            224 are kept). None resizes the whole image.
        length: Number of bytes of a text. A shorter text is filled with 0.
        test_split: Split for testing. Of imagenet2012 this is "validation": its test split has no classes.
        test_fraction: Share of the train split for testing, if there is no split "test".
        validation_fraction: Share of the train split for validation, if there is no validation split.
    Returns: Images float32 [height, width, channels] in [0, 1], the bytes of a text int32 [length], or numbers; and
        class numbers or numbers.
    Raises:
        ConfigError: The package is missing, the data set is unknown or cannot be downloaded, or a feature is missing or
            of another kind.
    Example:
        >>> tfds(name="digits", inputs="image", image_size=0)
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: image_size must be a whole number of at least 1 or ... Received: image_size=0. ...

    Reference:
        https://www.tensorflow.org/datasets
    """
    check_arguments(locals())
    if image_size is not None:
        height_and_width(image_size)
    package = optional_package("tensorflow_datasets", "tfds", "The source 'tfds'")
    builder = _builder(package, name, data_dir, download)
    x, y = _features(package, builder, inputs, targets)
    decode = decoder(x, y, image_size, length, central_crop)
    decoders = {x.name: package.decode.SkipDecoding()} if x.kind == "image" else None

    def part(split: str) -> Any:
        # TFDS shuffles the records when it prepares the data set, so that the first ones are a fair sample.
        config = package.ReadConfig(try_autocache=False, add_tfds_id=False)
        records = builder.as_dataset(split=split, decoders=decoders, shuffle_files=False, read_config=config)
        return records.map(lambda record: (record[x.name], record[y.name]))

    train, validation, test = _splits(builder.info.splits, test_split, test_fraction, validation_fraction)
    return Examples(
        name=f"tfds {builder.info.full_name}",
        train=part(train),
        validation=None if validation is None else part(validation),
        test=part(test),
        outputs=outputs_of(y),
        class_names=y.class_names,
        decode=decode,
        decodes_boxes=x.kind == "image",
    )


def _builder(package: Any, name: str | Path, data_dir: str | Path | None, download: bool) -> Any:
    try:
        if Path(name).expanduser().is_dir():
            return package.builder_from_directory(str(Path(name).expanduser()))
        builder = package.builder(str(name), data_dir=None if data_dir is None else str(data_dir))
        if not builder.is_prepared():
            if not download:
                raise ConfigError(
                    f"name must be a data set that is prepared, with download=False. Received: name={str(name)!r}, "
                    f"which is not in {builder.data_path}. Set download=True, or correct data_dir."
                )
            builder.download_and_prepare()
    except ConfigError:
        raise
    except Exception as error:  # TFDS and its file systems raise many kinds
        raise ConfigError(
            f"name must be a data set that TFDS can read. Received: name={str(name)!r} "
            f"({' '.join(str(error).split())[:300]}). Without a network, prepare it elsewhere with tfds build, and "
            "pass the folder that holds its dataset_info.json as name."
        ) from error
    return builder


def _features(package: Any, builder: Any, inputs: str | None, targets: str | None) -> tuple[Feature, Feature]:
    features, known = builder.info.features, builder.info.supervised_keys
    usual_x, usual_y = ([known[0]], [known[1]]) if known else (["image", "text"], ["label"])

    def feature(name: str) -> Feature:
        found = features[name]
        if isinstance(found, package.features.Image):
            return Feature(name, "image", tuple(found.shape))
        if isinstance(found, package.features.ClassLabel):
            return Feature(name, "class", (), tuple(found.names or map(str, range(found.num_classes))))
        if isinstance(found, package.features.Text):
            return Feature(name, "text")
        if isinstance(found, package.features.Tensor) and np.dtype(found.np_dtype).kind in "biuf":
            return Feature(name, "values", tuple(found.shape))
        raise ConfigError(
            f"Features must be images, text, classes or numbers. Received: {name!r}, {found}. Name another feature "
            "with inputs= or targets=."
        )

    return (
        feature(named_feature(sorted(features), inputs, usual_x, "inputs")),
        feature(named_feature(sorted(features), targets, usual_y, "targets")),
    )


def _splits(
    splits: Any, test_split: str, test_fraction: float, validation_fraction: float
) -> tuple[str, str | None, str]:
    """Returns the splits of the parts, in the notation of TFDS."""
    known = ", ".join(map(repr, splits))
    if "train" not in splits:
        raise ConfigError(f"The data set must have a split 'train'. Received: {known}.")
    if test_split == "train" or test_split not in (*splits, "test"):
        raise ConfigError(
            f"test_split must be a split of the data set besides 'train'. Received: test_split={test_split!r}, with "
            f"the splits {known}. Name one of them."
        )
    size = splits["train"].num_examples
    has_test, has_validation = test_split in splits, "validation" in splits and test_split != "validation"
    test = 0 if has_test else round(size * test_fraction)
    validation = 0 if has_validation else round(size * validation_fraction)
    if not has_test and not test:
        raise ConfigError(
            f"The test part must hold examples. Received: test_fraction={test_fraction} of {size} examples, and no "
            "split 'test'. Set test_fraction=0.2."
        )
    kept = size - test - validation
    return (
        f"train[:{kept}]",
        "validation" if has_validation else f"train[{kept}:{size - test}]" if validation else None,
        test_split if has_test else f"train[{size - test}:]",
    )
