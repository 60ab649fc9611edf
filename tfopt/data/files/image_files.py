"""The image files of a folder: their list, and the ones that no decoder can read.

The ending of a name says that a file is meant as an image. Other files are images if their first bytes say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from tfopt.data.files.folders import files_below

JPEG_ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".jif")
DECODED = (*JPEG_ENDINGS, ".png", ".gif", ".bmp", ".dib", ".webp")
"""File name endings of the formats that TensorFlow decodes."""
OTHER_IMAGES = (".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl", ".jp2", ".svg", ".psd", ".raw", ".ico")
JPEG, PNG, GIFS = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", (b"GIF87a", b"GIF89a")
END_OF_JPEG, END_OF_PNG, END_OF_GIF = b"\xff\xd9", b"IEND", b";"
MOST_PIXELS = 2**29  # of a GIF; TensorFlow has such a limit for JPEG and PNG, and would take minutes over a large GIF
STARTS = (JPEG, PNG, *GIFS)
ENDS = (
    (JPEG, END_OF_JPEG, "the JPEG is cut off: it has no end marker"),
    (PNG, END_OF_PNG, "the PNG is cut off: it has no IEND chunk"),
)
# Cameras and editors write other data behind the end of an image.
TAIL_BYTES = 64 * 1024
# Reading waits for the disk or the network, so more threads than cores help.
THREADS = 16


class Found(NamedTuple):
    """The files of a folder and its sub-folders, each list sorted.

    Attributes:
        images: Images, also those that may turn out to be unreadable.
        undecoded: Images in formats that TensorFlow does not decode.
        others: Files that are no images.
    """

    images: list[Path]
    undecoded: list[Path]
    others: list[Path]


def image_files(folder: Path) -> Found:
    """Returns the files in a folder and its sub-folders."""
    found = Found([], [], [])
    unknown = []
    for path in sorted(files_below(folder)):
        ending = path.suffix.lower()
        if ending in DECODED:
            found.images.append(path)
        elif ending in OTHER_IMAGES:
            found.undecoded.append(path)
        else:
            unknown.append(path)
    with ThreadPoolExecutor(THREADS) as pool:
        for path, is_image in zip(unknown, pool.map(_starts_like_an_image, unknown), strict=True):
            (found.images if is_image else found.others).append(path)
    found.images.sort()
    return found


def _starts_like_an_image(path: Path) -> bool:
    if not path.is_file():  # a pipe would wait for a writer
        return False
    try:
        with path.open("rb") as file:
            start = file.read(32)
    except OSError:
        return False
    is_bmp = start.startswith(b"BM") and int.from_bytes(start[2:6], "little") == path.stat().st_size
    return start.startswith(STARTS) or is_bmp or (start.startswith(b"RIFF") and start[8:12] == b"WEBP")


def first_problems(paths: Iterable[Path], checks: Sequence[Callable[[Path], str | None]]) -> dict[Path, str]:
    """Returns the first problem that the checks find in each file that has one."""

    def first(path: Path) -> tuple[Path, str | None]:
        return path, next((found for check in checks if (found := check(path))), None)

    with ThreadPoolExecutor(THREADS) as pool:
        return {path: problem for path, problem in pool.map(first, paths) if problem}


def are_plain_jpegs(paths: Sequence[Path]) -> bool:
    """Returns whether all files are JPEGs without other data behind their end marker."""
    if any(path.suffix.lower() not in JPEG_ENDINGS for path in paths):
        return False  # found without reading a file

    def is_plain(path: Path) -> bool:
        with path.open("rb") as file:
            start = file.read(3)
            file.seek(-2, 2)
            return start == JPEG and file.read(2) == END_OF_JPEG

    with ThreadPoolExecutor(THREADS) as pool:
        return all(pool.map(is_plain, paths))


def header_problem(path: Path) -> str | None:
    """Returns why a file is no whole image, by its first and last bytes; None if it may be one."""
    try:
        if not S_ISREG(path.stat().st_mode):  # a pipe would wait for a writer
            return "it is no regular file"
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = file.read(32)
            file.seek(max(size - 32, 0))
            tail = file.read()
            if any(start.startswith(starts) and end not in tail for starts, end, _ in ENDS):
                file.seek(max(size - TAIL_BYTES, 0))
                tail = file.read()
    except OSError as error:
        return "it is a link to a missing file" if path.is_symlink() else f"it cannot be read: {error.strerror}"
    if not size:
        return "it is empty"
    for starts, end, problem in ENDS:
        if start.startswith(starts):
            return None if end in tail else problem
    if start.startswith(GIFS):
        width, height = (int.from_bytes(start[place : place + 2], "little") for place in (6, 8))
        if width * height > MOST_PIXELS:
            return f"it has {width:,} x {height:,} pixels, and may have {MOST_PIXELS:,}"
        # Some programs fill up with zeros.
        return None if tail.rstrip(b"\0").endswith(END_OF_GIF) else "the GIF is cut off: it has no trailer"
    if start.startswith(b"BM"):
        bits, compression = int.from_bytes(start[28:30], "little"), start[30]
        if bits not in (8, 24, 32) or compression not in ((0, 3) if bits == 32 else (0,)):
            return "TensorFlow decodes no BMP with compression or fewer than 8 bits per pixel"
        return None if int.from_bytes(start[2:6], "little") <= size else "the BMP is cut off"
    if start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        if start[12:16] == b"VP8X" and start[20] & 2:
            return "TensorFlow decodes no animated WebP"
        return None if int.from_bytes(start[4:8], "little") + 8 <= size else "the WebP is cut off"
    return "its first bytes are of no JPEG, PNG, GIF, BMP or WebP"


def decoding_problem(path: Path) -> str | None:
    """Returns why TensorFlow cannot decode an image file; None if it can."""
    import tensorflow as tf

    from tfopt.data.images import decode_image

    try:
        decode_image(tf.io.read_file(str(path)), str(path))
    except tf.errors.OpError as error:
        return f"it cannot be decoded: {' '.join(str(error.message).split())[:200]}"
    return None
