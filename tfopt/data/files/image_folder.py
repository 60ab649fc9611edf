"""Images in folders: one folder per class, or masks beside the images.

A mask is a PNG file whose pixels are class numbers. TensorFlow decodes grey masks of 8 bits. It turns the numbers of a
palette, as in the masks of Pascal VOC, into colours, and scales grey pixels of 16 bits, so Pillow reads these masks.
Both scale grey pixels of fewer bits, so such files are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tfopt.data.arguments import check_arguments, height_and_width
from tfopt.data.examples import Examples, Split
from tfopt.data.files.folders import (
    check_limit,
    content,
    existing_directory,
    files_below,
    not_used,
    part_folders,
    tolerate,
)
from tfopt.data.files.image_files import (
    DECODED,
    PNG,
    Found,
    are_plain_jpegs,
    decoding_problem,
    first_problems,
    header_problem,
    image_files,
)
from tfopt.data.splits import split_files
from tfopt.data.stored import EncodedImage, EncodedMask, Stored
from tfopt.errors import ConfigError
from tfopt.settings.validation import check_value

CHECKS = ("header", "decode")
GREY, PALETTE = 0, 3


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
    central_crop: float | None = None,
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
        image_size: Side of the images in pixels, or (height, width). Images are resized to it; see `central_crop`
            for their aspect ratio.
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
        central_crop: Share of the largest centred part with the aspect ratio of `image_size`, which alone is resized,
            so that the content keeps its aspect ratio. Published scores on ImageNet use 0.875 (256 pixels, of which
            224 are kept). None resizes the whole image.
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
    check_arguments(locals())
    import tensorflow as tf

    check_value("exact", exact, bool)
    check_value("class_names", class_names, tuple[str, ...])
    height, width = height_and_width(image_size)
    root = existing_directory("directory", directory)
    check_limit(max_unreadable)
    if isinstance(channels, bool) or channels not in (1, 3):
        raise ConfigError(f"channels must be 1 or 3. Received: channels={channels!r}. Colour images have 3.")
    if check not in CHECKS:
        raise ConfigError(f"check must be 'header' or 'decode'. Received: check={check!r}.")
    if masks is not None and central_crop is not None:
        raise ConfigError(
            "central_crop must be None with masks, which are resized as a whole. Received: "
            f"central_crop={central_crop}. Leave it out."
        )
    mask_root = None if masks is None else existing_directory("masks", masks)
    names = tuple(class_names) if mask_root else _class_folders(root)
    if class_names and not mask_root and tuple(class_names) != names:
        raise ConfigError(
            "class_names must be left out without masks: the folders are the classes, numbered in the order of their "
            f"names. Received: class_names={tuple(class_names)!r} for the folders {', '.join(map(repr, names))}."
        )
    listed, notes = _list(root, None if mask_root else names)
    paths = [file.path for file in listed]
    checks: list[Callable[[Path], str | None]] = [header_problem, *([decoding_problem] if check == "decode" else [])]
    if mask_root:
        checks.append(partial(_mask_problem, images=root, masks=mask_root))
        used = {_mask_of(path, root, mask_root) for path in paths}
        unused = [file for file in files_below(mask_root) if file not in used]
        notes += not_used(unused, mask_root, "Masks that belong to no image")
    problems = first_problems(paths, checks)
    relative = [(path.relative_to(root).as_posix(), reason) for path, reason in problems.items()]
    notes += tolerate(relative, len(listed), max_unreadable, "images")
    files = [file for file in listed if file.path not in problems]
    paths = [file.path for file in files]
    classes = np.array([file.label for file in files], np.int32)
    empty = [] if mask_root else [name for number, name in enumerate(names) if number not in classes]
    if empty:
        raise ConfigError(
            f"Every class folder must hold readable images ({', '.join(DECODED)}). Received: directory={str(root)!r} "
            f"without images in {', '.join(map(repr, empty))}. Add images, or remove the folder."
        )
    chosen = split_files(
        [file.part for file in files], None if mask_root else classes, test_fraction, validation_fraction, seed
    )
    only_jpegs = channels == 3 and are_plain_jpegs(paths)
    image = EncodedImage(
        size=(height, width), channels=channels, exact=exact, only_jpegs=only_jpegs, central_crop=central_crop
    )
    mask = None
    if mask_root:
        mask = _Masks([_mask_of(path, root, mask_root) for path in paths], (height, width), names, ignored_target)
        notes += mask.notes
    records = [os.fsencode(path) for path in paths], classes if mask is None else mask.paths  # a name may be no UTF-8

    def decode(path: Any, target: Any, *, box: Any = None) -> Any:
        return image(tf.io.read_file(path), path, box), target if mask is None else mask.decode(target)

    folder_bytes = len(os.fsencode(root / "x")) - 1

    def stored(path: Any, target: Any) -> Any:
        # Without the folder, so that the stored bytes do not depend on its place.
        name = tf.strings.substr(path, folder_bytes, tf.int32.max)
        return name, tf.io.read_file(path), target if mask is None else mask.stored(target)

    def part(name: Split) -> Any:
        return tf.data.Dataset.from_tensor_slices(tuple(np.asarray(values)[chosen[name]] for values in records))

    return Examples(
        name=f"image_folder {root.absolute().name}",
        train=part("train"),
        test=part("test"),
        validation=part("validation") if len(chosen["validation"]) else None,
        outputs=len(names) if mask is None else mask.outputs,
        class_names=names,
        decode=decode,
        decodes_boxes=mask is None,
        ignored_target=None if mask is None else ignored_target,
        notes=notes,
        stored=Stored(read=stored, inputs=image, targets=None if mask is None else mask.decoder),
        check_finite=False,
    )


class _File(NamedTuple):
    path: Path
    label: int
    part: Split | None


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


def _mask_of(image: Path, images: Path, masks: Path) -> Path:
    """Returns the mask of an image: the same name below the folder of the masks, as .png or .PNG."""
    mask = (masks / image.relative_to(images)).with_suffix(".png")
    capital = mask.with_suffix(".PNG")
    return capital if capital.is_file() and not mask.is_file() else mask


class _Masks:
    """The masks of images: files, each of which is usable. All are read if there are no names, to count the classes."""

    def __init__(
        self, files: Sequence[Path], size: tuple[int, int], class_names: tuple[str, ...], ignored_target: int | None
    ) -> None:
        self.paths = [os.fsencode(file) for file in files]  # a name may be no UTF-8
        self._size = size
        self._ignored = ignored_target
        self._plain = all(_header(file)[2:] == (8, GREY) for file in files)
        # Decoder of what `stored` returns; None if that is the mask itself.
        self.decoder = EncodedMask(size=size) if self._plain else None
        found: set[int] = set()
        for path in () if class_names else self.paths:
            found |= {*np.flatnonzero(np.bincount(_read(path).ravel())).tolist()} - {ignored_target}
        self.outputs = len(class_names) or 1 + max(found, default=0)
        # 255 is white, or the border of Pascal VOC, much oftener than one of 256 classes.
        self.notes: tuple[str, ...] = ()
        if self.outputs == 256 and len(found) < 128:
            self.notes = (
                f"The masks hold {len(found)} of the class numbers 0 to 255. If 255 marks pixels of no class, set "
                "ignored_target=255; if it is the second of two classes, write it as 1.",
            )

    def decode(self, path: Any) -> Any:
        """Returns a mask as class numbers, int32 [height, width], in TensorFlow."""
        import tensorflow as tf

        if self._plain:
            mask = tf.cast(tf.io.decode_png(tf.io.read_file(path), channels=1), tf.int32)
        else:
            mask = tf.ensure_shape(tf.numpy_function(_read, [path], tf.int32), (None, None))[..., None]
        mask = tf.image.resize(mask, self._size, method="nearest")[..., 0]
        known = mask < self.outputs
        if self._ignored is not None:
            known |= mask == self._ignored
        words = f"A mask must hold class numbers below {self.outputs}. Received, with a higher one:"
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(known), [words, path])]):
            return tf.identity(mask)

    def stored(self, path: Any) -> Any:
        """Returns what TFRecord files hold of a mask, in TensorFlow: the file, or the mask if only Pillow reads it."""
        import tensorflow as tf

        return tf.io.read_file(path) if self._plain else self.decode(path)


def _mask_problem(image: Path, images: Path, masks: Path) -> str | None:
    from PIL import Image

    mask = _mask_of(image, images, masks)
    if not mask.is_file():
        return f"its mask {mask.relative_to(masks).as_posix()} is missing"
    width, height, bits, kind = _header(mask)
    if not width:
        return "its mask is no PNG"
    problem = header_problem(mask)
    if problem:
        return f"of its mask: {problem}"
    if kind not in (GREY, PALETTE) or (kind == GREY and bits < 8):
        return "its mask must be grey with 8 or 16 bits, or have a palette"
    try:
        with Image.open(image) as opened:
            size = opened.size
    except OSError as error:
        return f"it cannot be read: {error}"
    return None if size == (width, height) else f"it has {size[0]}x{size[1]} pixels, its mask {width}x{height}"


def _header(path: Path) -> tuple[int, int, int, int]:
    """Returns width, height, bits and kind of colour of a PNG; zeros if it is none."""
    with path.open("rb") as file:
        start = file.read(26)
    if len(start) < 26 or not start.startswith(PNG):
        return 0, 0, 0, 0
    return int.from_bytes(start[16:20], "big"), int.from_bytes(start[20:24], "big"), start[24], start[25]


def _read(path: bytes) -> np.ndarray:
    from PIL import Image

    name = os.fsdecode(path)
    try:
        with Image.open(name) as opened:
            return np.asarray(opened).astype(np.int32)
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"A mask must be a whole PNG file. Received: {name!r} ({error}). Write it again.") from error
