"""Damage to a file: flipped bits, cuts, other content, no file at all, and edited fields of JSON."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tfopt.atomic.checked_json import CHECKSUM, with_checksum

Spoil = Callable[[Path], None]  # of a file

DEEP = 100_000
WRONG: tuple[Any, ...] = (None, -1, 10**30, "x", [], {}, True, 1.5)


def flips(count: int, seed: int) -> Iterator[tuple[str, Spoil]]:
    """Yields as many flips of one bit each, at places drawn over the whole file."""
    draw = random.Random(seed)
    for number in range(count):
        share, bit = draw.random(), draw.randrange(8)

        def flip(file: Path, share: float = share, bit: int = bit) -> None:
            content = bytearray(file.read_bytes())
            content[int(share * len(content))] ^= 1 << bit
            file.write_bytes(content)

        yield f"bit flip {number}", flip


def cuts(count: int) -> Iterator[tuple[str, Spoil]]:
    """Yields cuts of the file, from one byte off its end to half a byte in a thousand left."""
    for number in range(count):

        def cut(file: Path, number: int = number) -> None:
            content = file.read_bytes()
            file.write_bytes(content[: len(content) - 1 if number == 0 else len(content) * number // (count + 1)])

        yield f"cut {number}", cut


def _replaced(content: bytes) -> Spoil:
    return lambda file: _write(file, content)


def _write(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def _gone(file: Path) -> None:
    file.unlink()


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _linked(target: str) -> Spoil:
    def link(file: Path) -> None:
        file.unlink()
        file.symlink_to(target.replace("SELF", file.name))

    return link


def _doubled(file: Path) -> None:
    file.write_bytes(file.read_bytes() * 2)


def _reversed(file: Path) -> None:
    file.write_bytes(file.read_bytes()[::-1])


WHOLE: dict[str, Spoil] = {
    "empty": _replaced(b""),
    "missing": _gone,
    "a pipe": _pipe,
    "a directory": _folder,
    "a link to itself": _linked("SELF"),
    "a link to nothing": _linked("nothing-is-here"),
    "a link to /dev/zero": _linked("/dev/zero"),
    "zeros": _replaced(bytes(1000)),
    "bytes that are no UTF-8": _replaced(b"\xff\xfe\x80abc" * 50),
    "twice its content": _doubled,
    "its content backwards": _reversed,
    "a gzip bomb's begin": _replaced(b"\x1f\x8b\x08\x00" + bytes(500)),
    "a pickle that calls": _replaced(b"cos\nsystem\n(S'touch was-called'\ntR."),
}

JSON_WHOLE: dict[str, Spoil] = {
    "nested deeply": _replaced(b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    "lists nested deeply": _replaced(b"[" * DEEP + b"]" * DEEP),
    "a number of 10,000 digits": _replaced(b"9" * 10_000),
    "a list": _replaced(b"[1, 2]"),
    "a string": _replaced(b'"text"'),
    "null": _replaced(b"null"),
    "a number": _replaced(b"3"),
    "an empty object": _replaced(b"{}"),
    "NaN": _replaced(b"NaN"),
    "a lone surrogate": _replaced(b'{"a": "\\ud800"}'),
    "a byte order mark": lambda file: _write(file, b"\xef\xbb\xbf" + file.read_bytes()),
    "every name twice": lambda file: _write(file, _twice(file.read_bytes())),
}


def _twice(content: bytes) -> bytes:
    text = content.decode().strip()
    return f"{text[:-1]},{text[1:]}".encode() if text.startswith("{") and len(text) > 2 else content * 2


def edits(content: Any, *, checksum: bool, most: int, seed: int) -> Iterator[tuple[str, Spoil]]:
    """Yields edits of a document: each field in turn gets a value of another type, or is removed.

    With `checksum` the document's own checksum is made anew, as somebody would who edits it on purpose.
    """
    draw = random.Random(seed)
    places = [place for place in _places(content) if place[-1] != CHECKSUM]
    draw.shuffle(places)
    for place in places[:most]:
        old = _at(content, place)
        for value in [draw.choice([each for each in WRONG if each != old]), ...]:
            changed = copy.deepcopy(content)
            parent = _at(changed, place[:-1])
            if value is ...:
                del parent[place[-1]]
            else:
                parent[place[-1]] = value
            name = ".".join(map(str, place))
            what = "removed" if value is ... else f"becomes {value!r}"
            document = with_checksum(changed) if checksum and isinstance(changed, dict) else changed
            again = ", with a new checksum" if checksum else ""
            yield f"{name} {what}{again}", _replaced(json.dumps(document).encode())


def _places(content: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for number, (name, value) in enumerate(items):
        if isinstance(content, list) and number > 1:
            return
        yield (*above, name)
        yield from _places(value, (*above, name))


def _at(content: Any, place: tuple[Any, ...]) -> Any:
    for name in place:
        content = content[name]
    return content
