"""Figures in README and docs: each that states a measurement is bound to its file and key in benchmarks/results.

A table is written from the results (page_tables.py). Prose, and a table written by hand, names its sources in a comment
in the same paragraph:

    Masks lengthen a step by 1.9%, of a perceptron by 13%.
    <!-- mask_overhead.json: 1.9% = models/cnn/median - 1; 13% = models/mlp/median - 1 -->

A key is a path of names and positions, where * is the largest of all. It may be combined with numbers and other keys
by -, * and /, from left to right. The value must round to the figure with the decimals that are shown, after a
multiplication by 100 where the figure ends in %. A figure without a source is a problem, unless its words are among
NOT_MEASURED of test_pages.py.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from page_tables import Part, filled, read

UNITS = (
    r"x(?!\w)|%|\s(?:ms|us|s|kB|MB|GB|KiB|MiB|GiB|bytes|points?|pt|seconds?|minutes?|hours?|times|bits per byte|k|M|G"
    r"|GFLOP)\b(?!-)"
)
NUMBER = r"(?<![\w.,/-])[-+]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
FIGURE = re.compile(
    rf"\b\d+ of \d+\b|{NUMBER}(?:{UNITS})|(?<![\w.,/-])[-+]?\d[\d,]*\.\d+\b|\b\d+e-\d+\b|\b\d{{1,3}}(?:,\d{{3}})+\b"
)
OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


def problems(text: str, parts: Mapping[str, Part], not_measured: tuple[str, ...]) -> list[str]:
    """Returns what is wrong with the figures of a page: without a source, or not what the source says."""
    found = [] if filled(text, parts) == text else ["a table differs from the results: run benchmarks/write_pages.py"]
    for name in re.findall(r"<!-- table of ([^,>]+?)(?:,[^>]*)? -->", text):
        found += [f"table of {name}: no such table"] if name not in parts else []
    prose = re.sub(r"<!-- table of .*?<!-- end of table -->", "", text, flags=re.DOTALL)
    for block in _blocks(prose):
        found += _block_problems(block, not_measured)
    return found


def _blocks(text: str) -> Iterator[str]:
    """Yields the paragraphs, tables and outputs of a page, without its code."""
    text = re.sub(r"<!-- an example of the output -->\n```text\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    outputs = r"^```(\w*)\n(.*?)^```$"
    text = re.sub(outputs, lambda match: match[2] if match[1] == "text" else "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.split(r"\n\s*\n", re.sub(r"(?<=\n\n)(?: {4}.*\n)+", "", text))


def _block_problems(block: str, not_measured: tuple[str, ...]) -> list[str]:
    sources, words = dict(_sources(block)), visible(block)
    for phrase in not_measured:
        words = words.replace(phrase, " ")
    shown = FIGURE.findall(words)
    found = [f"{figure!r} has no source, in {words[:100]!r}" for figure in shown if figure not in sources]
    for figure, source in sources.items():
        if figure not in shown:
            found.append(f"{figure!r} has a source, and is not in {words[:100]!r}")
        try:
            value = _value(*source)
        except (LookupError, ValueError, FileNotFoundError) as error:
            found.append(f"{figure!r}: no {source[1]!r} in {source[0]}.json ({error!r})")
            continue
        if _rounded(value, figure) != figure:
            found.append(f"{figure!r} is {_rounded(value, figure)!r} in {source[0]}.json: {source[1]}")
    return found


def visible(block: str) -> str:
    """Returns the words of a paragraph, without its comments, code and addresses."""
    return " ".join(re.sub(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)|https?://\S+", " ", block, flags=re.DOTALL).split())


def _sources(block: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields each figure that a comment binds, with its file and the keys."""
    for name, bound in re.findall(r"<!-- ([\w-]+)\.json: (.*?) -->", block, re.DOTALL):
        for each in " ".join(bound.split()).split("; "):
            figure, _, keys = each.partition(" = ")
            yield figure, (name, keys)


def _value(name: str, keys: str) -> float:
    first, *rest = re.split(r" ([-*/]) ", keys)
    value = _term(name, first)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        value = OPERATIONS[sign](value, _term(name, term))
    return value


def _term(name: str, term: str) -> float:
    if re.fullmatch(r"\d[\d.]*(e\d+)?", term):
        return float(term)
    return _at(read(name), term.split("/"))


def _at(found: Any, keys: list[str]) -> float:
    if not keys:
        return float(found)
    if keys[0] == "*":
        return max(_at(each, keys[1:]) for each in found.values())
    return _at(found[int(keys[0]) if isinstance(found, list) else keys[0]], keys[1:])


def _rounded(value: float, figure: str) -> str:
    """Returns the value as the figure is written: its decimals, thousands, sign and unit."""
    match = re.match(r"([-+]?)([\d,]+)(?:\.(\d+))?(e-?\d+)?(.*)", figure, re.DOTALL)
    assert match is not None
    sign, whole, decimals, power, unit = match.groups(default="")
    if power:
        return re.sub(r"e([-+])0", r"e\1", f"{value:.{len(decimals)}e}") + unit
    shown = f"{value * (100 if unit == '%' else 1):{'+' if sign == '+' else ''},.{len(decimals)}f}"
    return (shown if "," in whole else shown.replace(",", "")) + unit
