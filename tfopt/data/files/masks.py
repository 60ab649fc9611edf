"""Masks of images for segmentation: PNG files whose pixels are class numbers.

TensorFlow decodes grey masks of 8 bits. It turns the numbers of a palette, as in the masks of Pascal VOC, into
colours, and scales grey pixels of 16 bits, so Pillow reads these masks. Both scale grey pixels of fewer bits, so such
files are refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.data.files.image_files import first_problems, header_problem
from tfopt.data.files.splits import files_below, not_used
from tfopt.data.records.stored import EncodedMask
from tfopt.errors import ConfigError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GREY, PALETTE = 0, 3


def mask_of(image: Path, images: Path, masks: Path) -> Path:
    """Returns the mask of an image: the same name below the folder of the masks, as .png or .PNG.

    Example:
        >>> mask_of(Path("images/a/b.jpg"), Path("images"), Path("masks")).as_posix()
        'masks/a/b.png'
    """
    mask = (masks / image.relative_to(images)).with_suffix(".png")
    capital = mask.with_suffix(".PNG")
    return capital if capital.is_file() and not mask.is_file() else mask


def masks_without_image(paths: Sequence[Path], images: Path, masks: Path) -> tuple[str, ...]:
    """Returns a note about the files in the folder of the masks that belong to no image, or none."""
    used = {mask_of(image, images, masks) for image in paths}
    return not_used([file for file in files_below(masks) if file not in used], masks, "Masks that belong to no image")


def mask_problems(paths: Sequence[Path], images: Path, masks: Path) -> dict[Path, str]:
    """Returns the images that have no usable mask, with the reason."""
    return first_problems(paths, [partial(_mask_problem, images=images, masks=masks)])


class Masks:
    """The masks of a list of images.

    Args:
        images: Image files, each with a usable mask.
        image_root: Folder of the images.
        mask_root: Folder of the masks.
        size: (height, width) of the targets.
        class_names: Names of the classes. If there are none, all masks are read to count the classes.
        ignored_target: Class number that does not count.
    """

    def __init__(
        self,
        images: Sequence[Path],
        image_root: Path,
        mask_root: Path,
        size: tuple[int, int],
        class_names: tuple[str, ...],
        ignored_target: int | None,
    ) -> None:
        files = [mask_of(image, image_root, mask_root) for image in images]
        self.paths = [os.fsencode(file) for file in files]  # a name may be no UTF-8
        self._size = size
        self._ignored = ignored_target
        self._plain = all(_header(file)[2:] == (8, GREY) for file in files)
        found: set[int] = set()
        for path in () if class_names else self.paths:
            found |= {*np.flatnonzero(np.bincount(_read(path).ravel())).tolist()} - {ignored_target}
        self.outputs = len(class_names) or 1 + max(found, default=0)
        # 255 is white, or the border of Pascal VOC, much oftener than one of 256 classes.
        self.note = (
            f"The masks hold {len(found)} of the class numbers 0 to 255. If 255 marks pixels of no class, set "
            "ignored_target=255; if it is the second of two classes, write it as 1."
            if self.outputs == 256 and len(found) < 128
            else None
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

    @property
    def decoder(self) -> EncodedMask | None:
        """Decoder of what `stored` returns; None if that is the mask itself."""
        return EncodedMask(size=self._size) if self._plain else None

    def stored(self, path: Any) -> Any:
        """Returns what TFRecord files hold of a mask, in TensorFlow: the file, or the mask if only Pillow reads it."""
        import tensorflow as tf

        return tf.io.read_file(path) if self._plain else self.decode(path)


def _mask_problem(image: Path, images: Path, masks: Path) -> str | None:
    from PIL import Image

    mask = mask_of(image, images, masks)
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
    if len(start) < 26 or not start.startswith(SIGNATURE):
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
