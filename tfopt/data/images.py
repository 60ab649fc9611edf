"""Encoded images as arrays of pixels: decoded and resized inside tf.data, with errors that name the file.

A JPEG is a grid of blocks of 8x8 pixels, each stored as 64 frequencies. A decoder can leave out high frequencies and
return the image at 1/2, 1/4 or 1/8 of its size. It then does less work, and its result is a mean of the pixels that
bilinear resizing would skip. So a JPEG is decoded at the smallest of these sizes that is at least the size asked for,
and resized from there.

Pixels stay uint8, because a batch of them is a quarter of a batch of float32.

Some files must not reach TensorFlow's decoder: it ends the process at an animated WebP, and returns wrong pixels for a
BMP with a palette or with compression. A look at the first bytes finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

JPEG = b"\xff\xd8\xff"
END_OF_JPEG = b"\xff\xd9"
# The size of a JPEG is read before it is known whether a file is one. Other files are replaced by this header, of 1x1.
TINY_JPEG = bytes.fromhex("ffd8ffc0000b08000100010101 1100ffda0008010100003f00ffd9")
RATIOS = (1, 2, 4, 8)
SMALLEST_FILE = 26  # bytes
TAIL_BYTES = 2**16  # cameras and editors write other data behind the end of an image
ANIMATED = 2  # the bit of an extended WebP's flags
RULE = "An image must be a whole JPEG, PNG, GIF, BMP or WebP file."
PROBLEMS = (
    "it is too short",
    "it starts like none of these",
    "it is cut off",
    "an animated WebP, which TensorFlow cannot decode",
    "a BMP with compression or fewer than 8 bits per pixel",
    "",
)
HEADER_BYTES = 34
Box = Callable[[tf.Tensor], tf.Tensor]


def _pattern(start: bytes, position: int = 0, second: bytes = b"") -> list[int]:
    """Returns the bytes that a kind of file begins with, and other bytes at a position; -1 stands for any byte."""
    pattern = [*start, *[-1] * (HEADER_BYTES - len(start))]
    pattern[position : position + len(second)] = second
    return pattern


def _weights(position: int, length: int) -> list[int]:
    """Returns the weight of each byte of a header in a whole number at a position, lowest byte first."""
    weights = [0] * HEADER_BYTES
    weights[position : position + length] = [256**i for i in range(length)]
    return weights


STARTS = np.array(
    [
        _pattern(JPEG),
        _pattern(b"\x89PNG\r\n\x1a\n"),
        _pattern(b"GIF8"),
        _pattern(b"BM"),
        _pattern(b"RIFF", 8, b"WEBP"),
        _pattern(b"RIFF", 8, b"WEBPVP8X"),
    ],
    np.int32,
)
# The size of a BMP, the size of a WebP, the flags of an extended WebP, and a BMP's bits per pixel and compression.
NUMBERS = np.array([_weights(2, 4), _weights(4, 4), _weights(20, 1), _weights(28, 2), _weights(30, 4)], np.int32)


def central_box(share: float, size: tuple[int, int]) -> Box:
    """Returns the function to a share of the largest centred part of an image with the aspect ratio of `size`.

    Example:
        >>> central_box(0.5, (10, 10))(tf.constant([20, 40])).numpy().tolist()
        [5, 15, 10, 10]
    """

    def box(sides: tf.Tensor) -> tf.Tensor:
        scale = share * tf.reduce_min(tf.cast(sides, tf.float32) / tf.constant(size, tf.float32))
        kept = tf.clip_by_value(tf.cast(tf.round(scale * tf.constant(size, tf.float32)), tf.int32), 1, sides)
        return tf.concat([(sides - kept) // 2, kept], axis=0)

    return box


def decode_image(
    content: Any,
    name: Any,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    *,
    exact: bool = False,
    box: Box | None = None,
) -> tf.Tensor:
    """Decodes an image and resizes it bilinearly, inside tf.data or eagerly.

    Of a GIF the first frame is taken. The alpha channel is left out: a transparent pixel has the colour that the file
    stores for it. The orientation in a photo's EXIF data has no effect, as in Keras.

    Args:
        content: The bytes of a file, a string scalar.
        name: The file or record for the error message, a string scalar.
        size: (height, width) of the result. None leaves the size of the file.
        channels: 3 for colour, 1 for grey.
        exact: Whether to decode all pixels of a JPEG with the precise method, as `keras.utils.load_img` and
            `keras.utils.image_dataset_from_directory` do. Otherwise a JPEG of at least twice the size is decoded at a
            smaller size.
        box: Function from the (height, width) of an image, int32 [2], to the part of it that is resized: (top, left,
            height, width), int32 [4]. Of a JPEG no other part is decoded, unless `exact`. None takes the whole image.
    Returns: uint8 [height, width, channels].
    Raises:
        tf.errors.InvalidArgumentError: The content is no image, is cut off, or is of a kind that TensorFlow cannot
            decode: an animated WebP, or a BMP with compression or fewer than 8 bits per pixel. These errors give the
            name. Damage in the middle of a file is found by the decoder, whose error does not give it, or stays
            unnoticed if it only changes the colours of a JPEG.
    Example:
        >>> content = tf.io.encode_jpeg(tf.zeros((60, 80, 3), tf.uint8))
        >>> decode_image(content, "black.jpg", size=(20, 30)).shape.as_list()
        [20, 30, 3]
    """
    # An operation costs microseconds, as much as a part of a small image. So a whole JPEG, the usual case, is found by
    # few of them, and every other file is looked at in a branch of its own.
    ratios = RATIOS[:1] if size is None or exact else RATIOS
    is_jpeg = _is_whole_jpeg(content)
    jpeg = tf.where(is_jpeg, content, TINY_JPEG)
    part, number = _part(jpeg, size, ratios, box)
    branch = tf.where(is_jpeg, number, len(ratios))
    if channels == 1:  # TensorFlow turns CMYK into colour, but not into grey
        branch = tf.where(tf.image.extract_jpeg_shape(jpeg)[2] == 4, len(ratios), branch)
    branches = [partial(_jpeg, content, size, channels, ratio, exact, part) for ratio in ratios]
    pixels = tf.switch_case(branch, [*branches, partial(_other, content, name, size, channels, box)])
    return tf.ensure_shape(pixels, (*(size or (None, None)), channels))


def decode_jpeg(
    content: Any,
    name: Any,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    *,
    exact: bool = False,
    box: Box | None = None,
) -> tf.Tensor:
    """Decodes a JPEG that ends with its end marker, to the same pixels as `decode_image`, and faster.

    `decode_image` has branches for the formats, and each branch in TensorFlow costs a call of a function. This function
    is for files of which the format is known. Its arguments are the same, but a JPEG in CMYK cannot become grey.

    Raises:
        tf.errors.InvalidArgumentError: The content is no JPEG, or does not end with its end marker.
    Example:
        >>> content = tf.io.encode_jpeg(tf.zeros((60, 80, 3), tf.uint8))
        >>> decode_jpeg(content, "black.jpg", size=(20, 30)).shape.as_list()
        [20, 30, 3]
    """
    ratios = RATIOS[:1] if size is None or exact else RATIOS
    words = [f"{RULE} Received, it is cut off, or no JPEG:", name]
    with tf.control_dependencies([tf.raw_ops.Assert(condition=_is_whole_jpeg(content), data=words)]):
        jpeg = tf.identity(content)
    part, number = _part(jpeg, size, ratios, box)
    branches = [partial(_jpeg, jpeg, size, channels, ratio, exact, part) for ratio in ratios]
    pixels = branches[0]() if len(ratios) == 1 else tf.switch_case(number, branches)
    return tf.ensure_shape(pixels, (*(size or (None, None)), channels))


def _is_whole_jpeg(content: Any) -> Any:
    length = tf.strings.length(content)
    end = tf.strings.substr(content, tf.maximum(length - 2, 0), 2)
    return (tf.strings.substr(content, 0, len(JPEG)) == JPEG) & (end == END_OF_JPEG) & (length >= SMALLEST_FILE)


def _part(jpeg: Any, size: tuple[int, int] | None, ratios: tuple[int, ...], box: Box | None) -> tuple[Any, Any]:
    """Returns the box of a JPEG, and the number of the largest ratio at which it is at least as large as the size."""
    if size is None or (box is None and len(ratios) == 1):
        return None, 0
    sides = tf.image.extract_jpeg_shape(jpeg)[:2]
    part = None if box is None else box(sides)
    # A decoder rounds sizes up: 375 pixels at 1/2 are 188. So an image of 2 * (188 - 1) + 1 pixels is large enough.
    smallest = [[ratio * (side - 1) + 1 for side in size] for ratio in ratios]
    fits = tf.reduce_all(
        (sides if part is None else part[2:]) >= tf.constant(smallest[1:], tf.int32, (len(ratios) - 1, 2)), axis=1
    )
    return part, tf.reduce_sum(tf.cast(fits, tf.int32))


def _jpeg(
    content: Any, size: tuple[int, int] | None, channels: int, ratio: int, exact: bool, part: tf.Tensor | None
) -> tf.Tensor:
    if exact:  # cut afterwards: at its edges, a part that is decoded alone lacks the colours of the pixels beside it
        return _resize(tf.io.decode_jpeg(content, channels=channels), size, part)
    faster: dict[str, Any] = {"ratio": ratio, "dct_method": "INTEGER_FAST", "fancy_upscaling": False}
    if part is None:
        pixels = tf.io.decode_jpeg(content, channels=channels, **faster)
    else:
        window = tf.concat([part[:2] // ratio, (part[2:] + ratio - 1) // ratio], axis=0)
        pixels = tf.io.decode_and_crop_jpeg(content, window, channels=channels, **faster)
    # TensorFlow resizes float32 faster than uint8, to the same values.
    return pixels if size is None else _resize(tf.cast(pixels, tf.float32), size)


def _other(content: Any, name: Any, size: tuple[int, int] | None, channels: int, box: Box | None) -> tf.Tensor:
    """Decodes a file of another kind, and a JPEG whose end is not the end of the file.

    All starts and all numbers of the header are compared at once, since each operation here costs time for every image,
    even if this branch is not taken.
    """
    length = tf.strings.length(content)
    padded = tf.strings.join([tf.strings.substr(content, 0, HEADER_BYTES), b"\0" * HEADER_BYTES])
    header = tf.cast(tf.io.decode_raw(tf.strings.substr(padded, 0, HEADER_BYTES), tf.uint8), tf.int32)
    header = tf.ensure_shape(header, HEADER_BYTES)
    kinds = tf.reduce_all((header == STARTS) | (STARTS < 0), axis=1)
    _, is_png, is_gif, is_bmp, is_webp, is_extended_webp = tf.unstack(kinds)
    bmp_bytes, webp_bytes, flags, bits, compression = tf.unstack(tf.linalg.matvec(NUMBERS, header))
    tail = tf.strings.substr(content, tf.maximum(length - TAIL_BYTES, 0), TAIL_BYTES)
    end = tf.where(is_png, b"IEND", tf.where(is_gif, b";", END_OF_JPEG))
    has_end = tf.size(tf.raw_ops.StringSplitV2(input=[tail], sep=end).values) > 1
    whole = tf.where(is_bmp, bmp_bytes <= length, tf.where(is_webp, webp_bytes <= length - 8, has_end))
    plain = (compression == 0) & ((bits == 8) | (bits == 24)) | (bits == 32) & ((compression == 0) | (compression == 3))
    animated = is_extended_webp & (tf.bitwise.bitwise_and(flags, ANIMATED) > 0)
    problems = [length < SMALLEST_FILE, ~tf.reduce_any(kinds), ~whole, animated, is_bmp & ~plain, True]
    first = tf.argmax(tf.cast(tf.stack(problems), tf.int32))
    words = [f"{RULE} Received:", tf.gather(PROBLEMS, first), name]
    # tf.debugging.Assert would add a condition around it.
    with tf.control_dependencies([tf.raw_ops.Assert(condition=first == len(PROBLEMS) - 1, data=words)]):
        branch = tf.where(is_webp | is_extended_webp, 2, tf.where(is_bmp & (bits == 8), 1, 0))
    pixels = tf.switch_case(
        branch,
        [
            lambda: tf.io.decode_image(content, channels=3, expand_animations=False),
            partial(_with_palette, content),
            # TensorFlow decodes a WebP with an alpha channel to four channels only.
            lambda: tf.io.decode_image(content, channels=0, expand_animations=False)[..., :3],
        ],
    )
    part = None if box is None else box(tf.shape(pixels)[:2])
    return _resize(tf.image.rgb_to_grayscale(pixels) if channels == 1 else pixels, size, part)


def _with_palette(content: Any) -> tf.Tensor:
    """Decodes a BMP of 8 bits per pixel. TensorFlow returns its numbers of colours, in place of the colours."""
    indices = tf.io.decode_bmp(content)[..., 0]
    start = 14 + tf.io.decode_raw(tf.strings.substr(content, 14, 4), tf.int32)[0]
    stored = tf.strings.substr(content, start, 4 * 256)  # four bytes per colour: blue, green, red and nothing
    palette = tf.reshape(tf.io.decode_raw(tf.strings.join([stored, b"\0" * 1024]), tf.uint8)[:1024], (256, 4))
    return tf.gather(palette[:, 2::-1], tf.cast(indices, tf.int32))


def _resize(pixels: tf.Tensor, size: tuple[int, int] | None, part: tf.Tensor | None = None) -> tf.Tensor:
    if size is None:
        return pixels
    if part is not None:
        top, left, height, width = tf.unstack(part, num=4)
        pixels = pixels[top : top + height, left : left + width]
    return tf.cast(tf.round(tf.image.resize(pixels, size)), tf.uint8)
