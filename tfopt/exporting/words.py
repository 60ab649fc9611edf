"""Words for the inputs of strings on which a model is checked, as text in the manifest.

A string may be an image or a record. JSON holds text only, so a byte that is no UTF-8 becomes a private character.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

CHECKED_WORDS = 64
CHECKED_CHARACTERS = 2**18  # of all words together, but always one whole word
OTHER_WORDS = ("", "a", "b", "ab")  # for a model that takes strings and has no table of them
PRIVATE = {0xDC00 + byte: 0x10DC00 + byte for byte in range(0x80, 0x100)}
SURROGATES = {private: surrogate for surrogate, private in PRIVATE.items()}


def first_words(words: Iterable[str]) -> tuple[str, ...]:
    """Returns the first different words, and always one: for a model without a table of them, some of its own."""
    found = list(itertools.islice(dict.fromkeys(words), CHECKED_WORDS))
    sizes = list(itertools.accumulate(map(len, found)))
    return tuple(found[: max(1, sum(size <= CHECKED_CHARACTERS for size in sizes))]) or OTHER_WORDS


def text_of(word: bytes) -> str:
    """Returns a string of TensorFlow as text that JSON can hold, from which `bytes_of` makes the same bytes.

    Example:
        >>> [bytes_of(text_of(word)) for word in (b"ab", "é".encode(), b"\\xff\\xd8")]
        [b'ab', b'\\xc3\\xa9', b'\\xff\\xd8']
    """
    return word.decode("utf-8", "surrogateescape").translate(PRIVATE)


def bytes_of(text: str) -> bytes:
    return text.translate(SURROGATES).encode("utf-8", "surrogateescape")
