"""Text from outside (a name in a file, a path, a message) as it may be shown in a terminal or on a page.

A terminal obeys control characters: they move the cursor, change colours, set its title. Marks of writing direction
make a line read as what it does not say. Every place that shows text goes through here.
"""

from __future__ import annotations

import unicodedata
from typing import TextIO

# Cc: control characters, such as escape; Cs: halves of characters; Zl, Zp: ends of lines and paragraphs.
HIDDEN = frozenset({"Cc", "Cs", "Zl", "Zp"})
DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
LAYOUT = frozenset("\n\t")


def printable(text: str) -> str:
    r"""Returns a text with its control characters and marks of direction written as escapes. Lines stay lines.

    Example:
        >>> printable("digits\x1b[2J\n\u202egnp.exe")
        'digits\\x1b[2J\n\\u202egnp.exe'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character in LAYOUT or is_printable(character) else ascii(character)[1:-1] for character in text
    )


def encodable(text: str, stream: TextIO) -> str:
    r"""Returns a text with the characters that a stream cannot hold written as escapes.

    Example:
        >>> import io
        >>> encodable("größe", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        'gr\\xf6\\xdfe'
    """
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def is_printable(text: str) -> bool:
    r"""Returns whether a text is one line without control characters and marks of direction.

    Example:
        >>> is_printable("größe"), is_printable("two\nlines")
        (True, False)
    """
    return not any(unicodedata.category(each) in HIDDEN or each in DIRECTIONS for each in text)
