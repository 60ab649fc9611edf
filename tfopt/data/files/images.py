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

import tensorflow as tf

JPEG, PNG, GIF, BMP, RIFF, WEBP = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"RIFF", b"WEBP"
RATIOS = (1, 2, 4, 8)
OTHER, PALETTE = len(RATIOS), len(RATIOS) + 1  # the branches after those of the ratios
SMALLEST_FILE = 26  # bytes
ANIMATED = 2  # the bit of an extended WebP's flags
RULE = "An image must be a whole JPEG, PNG, GIF, BMP or WebP file."


def decode_image(
    content: Any, name: Any, size: tuple[int, int] | None = None, channels: int = 3, *, exact: bool = False
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
    long_enough = tf.strings.length(content) >= SMALLEST_FILE
    with tf.control_dependencies([_check(long_enough, "it is empty or too short", name)]):
        content = tf.identity(content)
    start = tf.strings.substr(content, 0, 34)
    is_jpeg = _at(start, 0, JPEG)
    is_bmp = _at(start, 0, BMP)
    others = _at(start, 0, PNG) | _at(start, 0, GIF) | (_at(start, 0, RIFF) & _at(start, 8, WEBP))
    with tf.control_dependencies([_check(is_jpeg | is_bmp | others, "it starts like none of these", name)]):
        branch = tf.cond(
            is_jpeg,
            partial(_branch_of_jpeg, content, name, size, channels, exact),
            partial(_branch_of_others, content, name, start),
        )
    branches = [partial(_jpeg, content, size, channels, ratio, exact) for ratio in RATIOS]
    branches += [partial(_other, content, size, channels), partial(_with_palette, content, size, channels)]
    pixels = tf.switch_case(branch, branches)
    return tf.ensure_shape(pixels, (*(size or (None, None)), channels))


def decode_jpeg(
    content: Any, name: Any, size: tuple[int, int] | None = None, channels: int = 3, *, exact: bool = False
) -> tf.Tensor:
    """Decodes a JPEG that ends with its end marker, to the same pixels as `decode_image`, and faster.

    `decode_image` has branches for the formats, and each branch in TensorFlow costs a call of a function. This function
    is for files of which the format is known.

    Args:
        content: The bytes of a file, a string scalar.
        name: The file or record for the error message, a string scalar.
        size: (height, width) of the result. None leaves the size of the file.
        channels: 3 for colour. 1 for grey, but not of a JPEG in CMYK.
        exact: Whether to decode all pixels with the precise method, as in `decode_image`.
    Returns: uint8 [height, width, channels].
    Raises:
        tf.errors.InvalidArgumentError: The content is no JPEG, or does not end with its end marker.
    Example:
        >>> content = tf.io.encode_jpeg(tf.zeros((60, 80, 3), tf.uint8))
        >>> decode_jpeg(content, "black.jpg", size=(20, 30)).shape.as_list()
        [20, 30, 3]
    """
    long_enough = tf.strings.length(content) >= SMALLEST_FILE
    with tf.control_dependencies([_check(long_enough, "it is empty or too short", name)]):
        is_whole = _at(content, 0, JPEG) & (tf.strings.substr(content, -2, 2) == b"\xff\xd9")
    with tf.control_dependencies([_check(is_whole, "it is cut off, or no JPEG", name)]):
        content = tf.identity(content)
    if size is None or exact:
        pixels = _jpeg(content, size, channels, 1, exact)
    else:
        branches = [partial(_jpeg, content, size, channels, ratio, exact) for ratio in RATIOS]
        pixels = tf.switch_case(_number_of_ratio(tf.image.extract_jpeg_shape(content), size), branches)
    return tf.ensure_shape(pixels, (*(size or (None, None)), channels))


def _branch_of_jpeg(content: Any, name: Any, size: tuple[int, int] | None, channels: int, exact: bool) -> tf.Tensor:
    """Returns the number of the branch that decodes a JPEG: the ratio by which it is decoded smaller."""
    ends = tf.strings.substr(content, -2, 2) == b"\xff\xd9"
    whole = tf.cond(ends, lambda: True, lambda: _holds(content, b"\xff\xd9"))
    with tf.control_dependencies([_check(whole, "it is cut off", name)]):
        shape = tf.image.extract_jpeg_shape(content)
    branch = tf.constant(0)
    if size is not None and not exact:
        branch = _number_of_ratio(shape, size)
    # TensorFlow turns CMYK into colour, but not into grey.
    return tf.where(shape[2] == 4, OTHER, branch) if channels == 1 else branch


def _branch_of_others(content: Any, name: Any, start: Any) -> tf.Tensor:
    is_png, is_bmp, is_webp = _at(start, 0, PNG), _at(start, 0, BMP), _at(start, 8, WEBP)
    header = tf.strings.join([start, b"\0" * 34])
    size = tf.strings.length(content)
    ends = tf.strings.substr(content, -8, 4) == b"IEND"
    whole = tf.cond(~is_png | ends, lambda: True, lambda: _holds(content, b"IEND"))
    whole &= ~is_webp | (_number(header, 4, tf.int32) <= size - 8)
    whole &= ~is_bmp | (_number(header, 2, tf.int32) <= size)
    last = tf.strings.substr(content, -1, 1)
    whole &= ~_at(start, 0, GIF) | (last == b";") | (last == b"\0")  # some programs fill up with zeros
    flags = _number(header, 20, tf.uint8)
    animated = is_webp & _at(start, 12, b"VP8X") & (tf.bitwise.bitwise_and(flags, ANIMATED) > 0)
    bits, compression = _number(header, 28, tf.int16), _number(header, 30, tf.int32)
    plain = (bits == 8) | (bits == 24) | (bits == 32)
    plain &= (compression == 0) | ((compression == 3) & (bits == 32))
    checks = [
        _check(whole, "it is cut off", name),
        _check(~animated, "an animated WebP, which TensorFlow cannot decode", name),
        _check(~is_bmp | plain, "a BMP with compression or fewer than 8 bits per pixel", name),
    ]
    with tf.control_dependencies(checks):
        return tf.where(is_bmp & (bits == 8), PALETTE, OTHER)


def _number_of_ratio(shape: tf.Tensor, size: tuple[int, int]) -> tf.Tensor:
    # A decoder rounds sizes up: 375 pixels at 1/2 are 188.
    fits = [tf.reduce_all((shape[:2] + (ratio - 1)) // ratio >= size) for ratio in RATIOS[1:]]
    return tf.add_n([tf.cast(each, tf.int32) for each in fits])


def _jpeg(content: Any, size: tuple[int, int] | None, channels: int, ratio: int, exact: bool) -> tf.Tensor:
    faster: dict[str, Any] = {} if exact else {"dct_method": "INTEGER_FAST", "fancy_upscaling": False}
    return _resize(tf.io.decode_jpeg(content, channels=channels, ratio=ratio, **faster), size)


def _other(content: Any, size: tuple[int, int] | None, channels: int) -> tf.Tensor:
    return _resize(_grey_if(channels, tf.io.decode_image(content, channels=3, expand_animations=False)), size)


def _with_palette(content: Any, size: tuple[int, int] | None, channels: int) -> tf.Tensor:
    """Decodes a BMP of 8 bits per pixel. TensorFlow returns its numbers of colours, in place of the colours."""
    indices = tf.io.decode_bmp(content)[..., 0]
    start = 14 + _number(content, 14, tf.int32)
    stored = tf.strings.substr(content, start, 4 * 256)  # four bytes per colour: blue, green, red
    palette = tf.reshape(tf.io.decode_raw(tf.strings.join([stored, b"\0" * 1024]), tf.uint8)[:1024], (256, 4))
    colours = tf.gather(palette[:, 2::-1], tf.cast(indices, tf.int32))
    return _resize(_grey_if(channels, colours), size)


def _grey_if(channels: int, pixels: tf.Tensor) -> tf.Tensor:
    return tf.image.rgb_to_grayscale(pixels) if channels == 1 else pixels


def _resize(pixels: tf.Tensor, size: tuple[int, int] | None) -> tf.Tensor:
    if size is None:
        return pixels
    return tf.cast(tf.round(tf.image.resize(pixels, size)), tf.uint8)


def _at(start: Any, position: int, expected: bytes) -> tf.Tensor:
    return tf.strings.substr(start, position, len(expected)) == expected


def _number(content: Any, position: int, dtype: tf.DType) -> tf.Tensor:
    """Returns the whole number that the bytes at a position hold, the lowest first."""
    return tf.io.decode_raw(tf.strings.substr(content, position, dtype.size), dtype)[0]


def _holds(content: Any, sought: bytes) -> tf.Tensor:
    """Whether some bytes are anywhere in a file. Programs write other data behind an image."""
    all_bytes = tf.io.decode_raw(content, tf.uint8)
    last = tf.size(all_bytes) - len(sought) + 1
    return tf.reduce_any(tf.reduce_all([all_bytes[i : last + i] == each for i, each in enumerate(sought)], axis=0))


def _check(condition: Any, problem: str, name: Any) -> Callable[..., Any]:
    return tf.debugging.Assert(condition, [f"{RULE} Received, {problem}:", name])
