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

from functools import partial
from typing import Any

import tensorflow as tf

JPEG, PNG, GIF, BMP, WEBP = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"WEBP"
END_OF_JPEG = b"\xff\xd9"
# The size of a JPEG is read before it is known whether a file is one. Other files are replaced by this header, of 1x1.
TINY_JPEG = bytes.fromhex("ffd8ffc0000b08000100010101 1100ffda0008010100003f00ffd9")
RATIOS = (1, 2, 4, 8)
OTHER = len(RATIOS)  # the branch after those of the ratios
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
    # An operation costs microseconds, as much as a part of a small image. So a whole JPEG, the usual case, is found by
    # few of them, and every other file is looked at in a branch of its own.
    starts = _at(content, 0, JPEG) & (tf.strings.length(content) >= SMALLEST_FILE)
    is_jpeg = starts & (tf.strings.substr(tf.where(starts, content, TINY_JPEG), -2, 2) == END_OF_JPEG)
    jpeg = tf.where(is_jpeg, content, TINY_JPEG)
    branch = tf.where(is_jpeg, _ratio(jpeg, size, exact), OTHER)
    if channels == 1:  # TensorFlow turns CMYK into colour, but not into grey
        branch = tf.where(tf.image.extract_jpeg_shape(jpeg)[2] == 4, OTHER, branch)
    branches = [partial(_jpeg, content, size, channels, ratio, exact) for ratio in RATIOS]
    pixels = tf.switch_case(branch, [*branches, partial(_other, content, name, size, channels)])
    return tf.ensure_shape(pixels, (*(size or (None, None)), channels))


def _ratio(jpeg: Any, size: tuple[int, int] | None, exact: bool) -> Any:
    """Returns the number of the largest ratio at which a decoded JPEG is at least as large as the size."""
    if size is None or exact:
        return 0
    # A decoder rounds sizes up: 375 pixels at 1/2 are 188. So an image of 2 * (188 - 1) + 1 pixels is large enough.
    smallest = [[ratio * (side - 1) + 1 for side in size] for ratio in RATIOS[1:]]
    fits = tf.reduce_all(tf.image.extract_jpeg_shape(jpeg)[:2] >= tf.constant(smallest), axis=1)
    return tf.reduce_sum(tf.cast(fits, tf.int32))


def _jpeg(content: Any, size: tuple[int, int] | None, channels: int, ratio: int, exact: bool) -> tf.Tensor:
    faster: dict[str, Any] = {} if exact else {"dct_method": "INTEGER_FAST", "fancy_upscaling": False}
    return _resize(tf.io.decode_jpeg(content, channels=channels, ratio=ratio, **faster), size)


def _other(content: Any, name: Any, size: tuple[int, int] | None, channels: int) -> tf.Tensor:
    """Decodes a file of another kind, and a JPEG whose end is not the end of the file."""
    with tf.control_dependencies([_check(tf.strings.length(content) >= SMALLEST_FILE, "it is too short", name)]):
        start = tf.strings.join([tf.strings.substr(content, 0, 34), b"\0" * 34])
    kinds = {JPEG: _at(start, 0, JPEG), PNG: _at(start, 0, PNG), GIF: _at(start, 0, GIF), BMP: _at(start, 0, BMP)}
    kinds[WEBP] = _at(start, 0, b"RIFF") & _at(start, 8, WEBP)
    known = tf.reduce_any(list(kinds.values()))
    whole = tf.cond(known, partial(_is_whole, content, start, kinds), lambda: True)
    animated = _at(start, 12, b"VP8X") & (tf.bitwise.bitwise_and(_number(start, 20, tf.uint8), ANIMATED) > 0)
    bits, compression = _number(start, 28, tf.int16), _number(start, 30, tf.int32)
    plain = (bits == 8) | (bits == 24) | (bits == 32)
    plain &= (compression == 0) | ((compression == 3) & (bits == 32))
    checks = [
        _check(known, "it starts like none of these", name),
        _check(whole, "it is cut off", name),
        _check(~(kinds[WEBP] & animated), "an animated WebP, which TensorFlow cannot decode", name),
        _check(~kinds[BMP] | plain, "a BMP with compression or fewer than 8 bits per pixel", name),
    ]
    with tf.control_dependencies(checks):
        has_palette = tf.identity(kinds[BMP] & (bits == 8))
    pixels = tf.cond(
        has_palette,
        partial(_with_palette, content),
        lambda: tf.io.decode_image(content, channels=3, expand_animations=False),
    )
    return _resize(tf.image.rgb_to_grayscale(pixels) if channels == 1 else pixels, size)


def _is_whole(content: Any, start: Any, kinds: dict[bytes, Any]) -> tf.Tensor:
    """Whether a file has the end that its kind has, or is as long as its header says."""
    size, end = tf.strings.length(content), tf.strings.substr(content, -8, 8)
    last = tf.strings.substr(content, -1, 1)
    return tf.reduce_all(
        [
            ~kinds[JPEG] | _holds(content, END_OF_JPEG),
            ~kinds[PNG] | _at(end, 0, b"IEND") | _holds(content, b"IEND"),
            ~kinds[GIF] | (last == b";") | (last == b"\0"),  # some programs fill up with zeros
            ~kinds[BMP] | (_number(start, 2, tf.int32) <= size),
            ~kinds[WEBP] | (_number(start, 4, tf.int32) <= size - 8),
        ]
    )


def _with_palette(content: Any) -> tf.Tensor:
    """Decodes a BMP of 8 bits per pixel. TensorFlow returns its numbers of colours, in place of the colours."""
    indices = tf.io.decode_bmp(content)[..., 0]
    start = 14 + _number(content, 14, tf.int32)
    stored = tf.strings.substr(content, start, 4 * 256)  # four bytes per colour: blue, green, red and nothing
    palette = tf.reshape(tf.io.decode_raw(tf.strings.join([stored, b"\0" * 1024]), tf.uint8)[:1024], (256, 4))
    return tf.gather(palette[:, 2::-1], tf.cast(indices, tf.int32))


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


def _check(condition: Any, problem: str, name: Any) -> Any:
    return tf.debugging.Assert(condition, [f"{RULE} Received, {problem}:", name])
