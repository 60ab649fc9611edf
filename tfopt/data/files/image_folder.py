"""Images in folders: one folder per class, or masks beside the images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tfopt.data.arguments import check_arguments, height_and_width
from tfopt.data.examples import Examples, Split
from tfopt.data.files.image_files import DECODED, Found, are_plain_jpegs, image_files, unreadable
from tfopt.data.files.masks import Masks, mask_problems, masks_without_image
from tfopt.data.files.splits import (
    check_limit,
    content,
    existing_directory,
    not_used,
    part_folders,
    split_files,
    tolerate,
)
from tfopt.data.records.stored import EncodedImage, Stored
from tfopt.errors import ConfigError
from tfopt.settings.validation import check_value

CHECKS = ("header", "decode")


def image_folder(
    *,
    directory: str | Path,
    image_size: int | Sequence[int] = 224,
    channels: int = 3,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    masks: str | Path | None = None,
    class_names: Sequence[str] = (),
    ignored_target: int | None = None,
    max_unreadable: float = 0,
    check: Literal["header", "decode"] = "header",
    exact: bool = False,
    seed: int = 0,
) -> Examples:
    """Reads images from folders: for classification one folder per class, for segmentation with masks beside them.

    If the directory holds a folder `train` (or `training`), the folders `train`, `validation` (or `valid`, `val`,
    `dev`) and `test` (or `testing`, `eval`) are the parts, in capital letters or small ones, and the shares below only
    make parts that have no folder. Otherwise the parts are split by the shares. Formats are JPEG, PNG, GIF (the first
    frame), BMP and WebP, also under a name with another ending or none. Hidden files and folders, and those that
    systems leave behind, do not count. The notes name other files and folders that are not used. A record is the name
    of a file, so the shuffle costs little memory, and images are read and decoded in parallel afterwards.

    Args:
        directory: Folder with one sub-folder per class. The classes are numbered in the order of their names.
        image_size: Side of the images in pixels, or (height, width). Images are resized to it, without regard to their
            aspect ratio.
        channels: 3 for colour, 1 for grey.
        test_fraction: Share of the test part, the same for every class.
        validation_fraction: Share of the validation part. With 0 there is none.
        masks: Folder with the mask of each image under the same relative name, as PNG: `a/b.jpg` has `a/b.png`. A pixel
            of a mask is a class number (grey, or the number in a palette). Folders are then no classes.
        class_names: Names of the classes of the masks. Without them, all masks are read once to count the classes.
        ignored_target: Class number in masks that counts neither in the loss nor in the score, such as 255.
        max_unreadable: Number of images that may be unreadable; below 1 a share. They are left out and noted.
        check: "header" looks at the first and last bytes of each file when the source is made. "decode" decodes every
            image, which takes as long as one epoch of reading.
        exact: Whether to decode JPEGs exactly as `keras.utils.image_dataset_from_directory` does. It is slower.
        seed: Seed of the split and of the order.
    Returns: Images float32 [height, width, channels] in [0, 1], and class numbers, or masks int32 [height, width].
    Raises:
        ConfigError: A folder is missing or holds no images, or more images are unreadable than allowed.
    Example:
        >>> import tempfile, keras
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     for name in ("cats", "dogs"):
        ...         Path(directory, name).mkdir()
        ...         for i in range(5):
        ...             image = np.random.default_rng(i).random((20, 30, 3))
        ...             keras.utils.save_img(Path(directory, name, f"{i}.jpg"), image)
        ...     examples = image_folder(directory=directory, image_size=16)
        ...     examples.class_names, examples.x_train.shape
        (('cats', 'dogs'), (8, 16, 16, 3))
    """
    check_arguments(
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        ignored_target=ignored_target,
        seed=seed,
    )
    check_value("exact", exact, bool)
    check_value("class_names", class_names, tuple[str, ...])
    height, width = height_and_width(image_size)
    root = existing_directory("directory", directory)
    check_limit(max_unreadable)
    if isinstance(channels, bool) or channels not in (1, 3):
        raise ConfigError(f"channels must be 1 or 3. Received: channels={channels!r}. Colour images have 3.")
    if check not in CHECKS:
        raise ConfigError(f"check must be 'header' or 'decode'. Received: check={check!r}.")
    mask_root = None if masks is None else existing_directory("masks", masks)
    names = tuple(class_names) if mask_root else _class_folders(root)
    if class_names and not mask_root and tuple(class_names) != names:
        raise ConfigError(
            "class_names must be left out without masks: the folders are the classes, numbered in the order of their "
            f"names. Received: class_names={tuple(class_names)!r} for the folders {', '.join(map(repr, names))}."
        )
    listed, notes = _list(root, None if mask_root else names)
    problems = unreadable([file.path for file in listed], check)
    if mask_root:
        problems |= mask_problems([file.path for file in listed if file.path not in problems], root, mask_root)
        notes += masks_without_image([file.path for file in listed], root, mask_root)
    relative = [(path.relative_to(root).as_posix(), reason) for path, reason in problems.items()]
    notes += tolerate(relative, len(listed), max_unreadable, "images")
    files = [file for file in listed if file.path not in problems]
    classes = np.array([file.label for file in files], np.int32)
    if not mask_root:
        _check_classes(root, names, classes)
    chosen = split_files(
        [file.part for file in files],
        None if mask_root else classes,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        seed=seed,
    )
    paths = [os.fsencode(file.path) for file in files]  # a name may be no UTF-8
    only_jpegs = channels == 3 and are_plain_jpegs([file.path for file in files])
    images = _Images(root, EncodedImage(size=(height, width), channels=channels, exact=exact, only_jpegs=only_jpegs))
    if mask_root is None:
        return _examples(root, chosen, (paths, classes), images.with_label, len(names), names, notes, images.stored())
    masks_of = Masks([file.path for file in files], root, mask_root, (height, width), names, ignored_target)
    notes += () if masks_of.note is None else (masks_of.note,)

    def with_mask(path: Any, mask: Any) -> Any:
        return images.read(path), masks_of.decode(mask)

    examples = _examples(
        root, chosen, (paths, masks_of.paths), with_mask, masks_of.outputs, names, notes, images.stored(masks_of)
    )
    return replace(examples, ignored_target=ignored_target)


class _File(NamedTuple):
    path: Path
    label: int
    part: Split | None


class _Images(NamedTuple):
    """Reads image files: a record becomes an example, or what `convert` stores."""

    root: Path
    decoder: EncodedImage

    def read(self, path: Any) -> Any:
        import tensorflow as tf

        return self.decoder(tf.io.read_file(path), path)

    def with_label(self, path: Any, label: Any) -> Any:
        return self.read(path), label

    def stored(self, masks: Masks | None = None) -> Stored:
        import tensorflow as tf

        def content(path: Any, target: Any) -> Any:
            # Without the folder, so that the stored bytes do not depend on its place.
            name = tf.strings.substr(path, len(os.fsencode(self.root / "x")) - 1, tf.int32.max)
            return name, tf.io.read_file(path), target if masks is None else masks.stored(target)

        return Stored(read=content, inputs=self.decoder, targets=None if masks is None else masks.decoder)


def _class_folders(root: Path) -> tuple[str, ...]:
    folder = part_folders(root).get("train", root)
    names = tuple(path.name for path in content(folder)[0])
    if len(names) < 2:
        raise ConfigError(
            "directory must hold a folder of images for each of at least two classes. "
            f"Received: directory={str(root)!r} with {len(names)} folders. Sort the images into folders of {folder}, "
            "or set masks=DIR for segmentation."
        )
    return names


def _list(root: Path, classes: tuple[str, ...] | None) -> tuple[list[_File], tuple[str, ...]]:
    """Lists the images of all parts, and notes what is not used."""
    files: list[_File] = []
    left = Found([], [], [])
    beside: list[Path] = []
    parts: dict[Split, Path] | dict[None, Path] = part_folders(root) or {None: root}
    if None not in parts:
        beside += [path for paths in content(root) for path in paths if path not in parts.values()]
    for part, folder in parts.items():
        folders, others = content(folder)
        found = {path.name for path in folders}
        if classes is not None and found - {*classes}:
            raise ConfigError(
                f"The parts must have the same classes. Received: {folder / min(found - {*classes})}, which is no "
                f"class of the training part. Its classes are {', '.join(map(repr, classes))}."
            )
        beside += others if classes is not None else []
        for number, name in enumerate(classes or ("",)):
            inside = image_files(folder / name) if not name or name in found else Found([], [], [])
            files += [_File(path, number, part) for path in inside.images]
            left.undecoded.extend(inside.undecoded)
            left.others.extend(inside.others)
    if not files:
        raise ConfigError(
            f"directory must hold images ({', '.join(DECODED)}). Received: directory={str(root)!r}, which holds none. "
            "Correct the path."
        )
    endings = ", ".join(sorted({path.suffix.lower() for path in left.undecoded}))
    undecoded = f"Images in formats that TensorFlow does not decode were left out: {len(left.undecoded)} ({endings})."
    return files, (
        *((undecoded,) if left.undecoded else ()),
        *not_used(left.others, root, "Files that are no images"),
        *not_used(beside, root, "Files and folders beside those of the parts or classes"),
    )


def _check_classes(root: Path, names: tuple[str, ...], labels: np.ndarray) -> None:
    empty = [name for name, count in zip(names, np.bincount(labels, minlength=len(names)), strict=True) if not count]
    if empty:
        raise ConfigError(
            f"Every class folder must hold readable images ({', '.join(DECODED)}). Received: directory={str(root)!r} "
            f"without images in {', '.join(map(repr, empty))}. Add images, or remove the folder."
        )


def _examples(
    root: Path,
    chosen: dict[Split, np.ndarray],
    records: tuple[Any, ...],
    decode: Any,
    outputs: int,
    names: tuple[str, ...],
    notes: tuple[str, ...],
    stored: Stored,
) -> Examples:
    import tensorflow as tf

    def part(name: Split) -> Any:
        return tf.data.Dataset.from_tensor_slices(tuple(np.asarray(values)[chosen[name]] for values in records))

    return Examples(
        name=f"image_folder {root.absolute().name}",
        train=part("train"),
        test=part("test"),
        validation=part("validation") if len(chosen["validation"]) else None,
        outputs=outputs,
        class_names=names,
        decode=decode,
        notes=notes,
        stored=stored,
        check_finite=False,
    )
