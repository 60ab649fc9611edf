"""Counts and bytes as short text, for tables."""

from __future__ import annotations

COUNT_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def short_count(value: float) -> str:
    """Returns a count with three digits and a unit.

    Example:
        >>> short_count(4_089_184_256), short_count(730)
        ('4.09 G', '730')
    """
    return _short(value, COUNT_UNITS, "")


def short_bytes(value: float) -> str:
    """Returns a number of bytes with three digits and a unit. 1 kB is 1,000 bytes.

    Example:
        >>> short_bytes(102_228_128)
        '102 MB'
    """
    return _short(value, BYTE_UNITS, " B")


def grouped(value: float) -> str:
    """Returns a number with three digits, or with all digits before the point if it has more.

    Example:
        >>> grouped(1980.4), grouped(36.54)
        ('1,980', '36.5')
    """
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def _short(value: float, units: tuple[tuple[float, str], ...], smallest: str) -> str:
    for size, unit in units:
        if value >= 0.9995 * size:
            number = value / size
            return f"{number:.{max(0, 2 - len(str(int(number + 0.5))) + 1)}f} {unit}"
    return f"{value:.0f}{smallest}"
