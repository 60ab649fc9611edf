"""How records show: a title and tables, as aligned text, and as HTML in a notebook.

Notebooks have light and dark themes, so the colours are those of the notebook: text inherits its colour, lines and
backgrounds are half transparent. All styles are inline, because notebooks remove style sheets. All text is escaped.
"""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tfopt.terminal import printable

LINE = "1px solid rgba(128,128,128,0.35)"
CELL = f"padding:0.2em 0.8em 0.2em 0;border-bottom:{LINE};text-align:left;vertical-align:top;white-space:pre-wrap"
FIGURE = f"{CELL};text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums"
TABLE = "border-collapse:collapse;margin:0.3em 0;font-size:inherit;color:inherit;background:transparent"
DIM = "opacity:0.65"
MARKED = "color:#d03b3b;font-weight:600"  # readable on white and on black
PROBLEM = "problem"
"""A row that begins with this word is marked."""
LONGEST = 20


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text, which print with aligned columns.

    Example:
        >>> print(Table(head=("layer", "weights"), rows=[("conv", "9"), ("dense", "1,000")], figures={1}))
        layer  weights
        conv         9
        dense    1,000
    """

    # The cells of each row. Rows may differ in length.
    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()  # the heads of the columns
    figures: Collection[int] = ()  # numbers of the columns with figures, which are aligned on the right
    # The words that unfold the table in a notebook. "" folds no table, None those of over 20 rows.
    folded: str | None = None

    def __str__(self) -> str:
        lines = [*([self.head] if self.head else []), *self.rows]
        widths: dict[int, int] = {}
        for line in lines:
            for place, cell in enumerate(line):
                widths[place] = max(widths.get(place, 0), len(cell))
        return "\n".join(
            "  ".join(
                cell.rjust(widths[place]) if place in self.figures else cell.ljust(widths[place])
                for place, cell in enumerate(line)
            ).rstrip()
            for line in lines
        )

    def html(self) -> str:
        """Returns the table as HTML; nothing if it has no rows.

        Example:
            >>> "&lt;lambda&gt;" in Table(rows=[["<lambda>", "1"]]).html()
            True
        """
        if not self.rows:
            return ""
        heads = "".join(self._cell("th", cell, place, DIM) for place, cell in enumerate(self.head))
        body = "".join(f"<tr>{''.join(self._cells(row))}</tr>" for row in self.rows)
        head = f"<thead><tr>{heads}</tr></thead>" if heads else ""
        whole = f'<table style="{TABLE}">{head}<tbody>{body}</tbody></table>'
        words = f"{len(self.rows)} rows" if self.folded is None and len(self.rows) > LONGEST else self.folded
        if not words:
            return whole
        return f'<details><summary style="cursor:pointer">{_text(words)}</summary>{whole}</details>'

    def _cells(self, row: Sequence[str]) -> Iterable[str]:
        for place, cell in enumerate(row):
            yield self._cell("td", cell, place, MARKED if row[0] == PROBLEM and place == len(row) - 1 else "")

    def _cell(self, tag: str, text: str, place: int, style: str) -> str:
        base = FIGURE if place in self.figures else f"{CELL};white-space:nowrap" if place == 0 else CELL
        return f'<{tag} style="{base}{";" + style if style else ""}">{_text(text)}</{tag}>'


def pairs(rows: Mapping[str, str]) -> Table:
    """Returns a table of names and values.

    Example:
        >>> print(pairs({"precision": "int8"}))
        precision  int8
    """
    return Table(rows=list(rows.items()))


def lines(texts: Iterable[str]) -> Table:
    """Returns a table with one cell in each row."""
    return Table(rows=[(text,) for text in texts])


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """What shows a record: a title, a note below it, and tables.

    Example:
        >>> print(Sheet(title="out/int8", tables=[pairs({"precision": "int8"})]))
        out/int8
          precision  int8
    """

    title: str = ""
    note: str = ""
    tables: Sequence[Table] = ()

    def __str__(self) -> str:
        texts = [line for table in self.tables if table.rows for line in str(table).split("\n")]
        return "\n".join([self.title, *(f"  {line}" for line in texts)] if self.title else texts)

    def html(self) -> str:
        """Returns the sheet as HTML.

        Example:
            >>> Sheet(title="<b>").html()
            '<div style="margin:0.4em 0;overflow-x:auto"><div style="font-weight:600">&lt;b&gt;</div></div>'
        """
        head = f'<div style="font-weight:600">{_text(self.title)}</div>' if self.title else ""
        below = f'<div style="{DIM}">{_text(self.note)}</div>' if self.note else ""
        tables = "".join(table.html() for table in self.tables)
        return f'<div style="margin:0.4em 0;overflow-x:auto">{head}{below}{tables}</div>'


class Shown(ABC):
    """A record that shows as a sheet, printed and in a notebook."""

    @abstractmethod
    def _sheet(self) -> Sheet:
        """Returns what shows the record."""

    def __str__(self) -> str:
        return str(self._sheet())

    def _repr_html_(self) -> str:
        return self._sheet().html()


def _text(text: str) -> str:
    return html.escape(printable(text))
