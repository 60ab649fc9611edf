"""Records as small HTML tables for notebooks.

Notebooks have light and dark themes, so the colours are those of the notebook: text inherits its colour, lines and
backgrounds are half transparent. All styles are inline, because notebooks remove style sheets. All text is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from tfopt.printable import printable

LINE = "1px solid rgba(128,128,128,0.35)"
CELL = f"padding:0.2em 0.8em 0.2em 0;border-bottom:{LINE};text-align:left;vertical-align:top;white-space:pre-wrap"
FIGURE = f"{CELL};text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums"
DIM = "opacity:0.65"
MARKED = "color:#d03b3b;font-weight:600"  # readable on white and on black
LONGEST = 20


def block(title: str, *parts: str, note: str = "") -> str:
    """Returns a titled block of HTML.

    Args:
        title: The title, as text.
        parts: HTML of the parts, from the other functions.
        note: A line below the title, as text.
    Example:
        >>> block("<b>", table([["a", "1"]])).startswith('<div style="')
        True
    """
    head = f'<div style="font-weight:600">{_text(title)}</div>' if title else ""
    below = f'<div style="{DIM}">{_text(note)}</div>' if note else ""
    return f'<div style="margin:0.4em 0;overflow-x:auto">{head}{below}{"".join(parts)}</div>'


def table(
    rows: Iterable[Sequence[str]],
    head: Sequence[str] = (),
    *,
    figures: int = 0,
    marked: Iterable[int] = (),
    folds: bool = True,
) -> str:
    """Returns a table, or nothing if it has no rows.

    Args:
        rows: The cells of each row, as text.
        head: The heads of the columns, as text.
        figures: Number of columns at the end that hold figures, which are aligned on the right.
        marked: Numbers of the rows whose last cell is marked as a problem.
        folds: Whether a long table is folded.
    Example:
        >>> "&lt;lambda&gt;" in table([["<lambda>", "1"]])
        True
    """
    lines, noted = list(rows), set(marked)
    if not lines:
        return ""
    heads = "".join(_cell("th", cell, place, len(head), figures, DIM) for place, cell in enumerate(head))
    body = "".join(
        "<tr>"
        + "".join(
            _cell("td", cell, place, len(row), figures, MARKED if number in noted and place == len(row) - 1 else "")
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for number, row in enumerate(lines)
    )
    style = "border-collapse:collapse;margin:0.3em 0;font-size:inherit;color:inherit;background:transparent"
    whole = f'<table style="{style}">{f"<thead><tr>{heads}</tr></thead>" if head else ""}<tbody>{body}</tbody></table>'
    return folded(f"{len(lines)} rows", whole) if folds and len(lines) > LONGEST else whole


def pairs(rows: Mapping[str, str]) -> str:
    """Returns a table of names and values.

    Example:
        >>> "precision" in pairs({"precision": "int8"})
        True
    """
    return table([(name, value) for name, value in rows.items()])


def folded(summary: str, content: str) -> str:
    """Returns HTML that a click unfolds.

    Example:
        >>> folded("12 rows", "<p>...</p>")
        '<details><summary style="cursor:pointer">12 rows</summary><p>...</p></details>'
    """
    return f'<details><summary style="cursor:pointer">{_text(summary)}</summary>{content}</details>'


def _cell(tag: str, text: str, place: int, columns: int, figures: int, style: str) -> str:
    base = FIGURE if place >= columns - figures else f"{CELL};white-space:nowrap" if place == 0 else CELL
    return f'<{tag} style="{base}{";" + style if style else ""}">{_text(text)}</{tag}>'


def _text(text: str) -> str:
    return html.escape(printable(text))
