"""Numbers, sizes, times and scores as short text, in logs, tables and reports."""

from __future__ import annotations

import math

COUNT_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
MEMORY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
SCORE_LABELS = {
    "accuracy": "Accuracy",
    "mean_iou": "Mean IoU",
    "bits_per_byte": "Bits per byte",
    "mean_absolute_error": "Mean absolute error",
}
"""The scores of the tasks, as reports name them. Reports show them first."""
CLEAR = 0.05  # the least difference of two times that counts


def short_count(value: float) -> str:
    """Returns a count with three digits and a unit.

    Example:
        >>> short_count(4_089_184_256), short_count(730)
        ('4.09 G', '730')
    """
    return _short(value, COUNT_UNITS, "")


def short_bytes(value: float) -> str:
    """Returns the size of a file, of weights or of traffic with three digits and a unit. 1 kB is 1,000 bytes.

    Example:
        >>> short_bytes(102_228_128)
        '102 MB'
    """
    return _short(value, BYTE_UNITS, " B")


def memory_size(value: float) -> str:
    """Returns the size of a device's memory, or of a part of it, as drivers write it. 1 KiB is 1,024 bytes.

    Example:
        >>> memory_size(8 * 2**30), memory_size(1536), memory_size(900)
        ('8.0 GiB', '1.5 KiB', '900 B')
    """
    power = min(int(math.log2(max(value, 1))) // 10, len(MEMORY_UNITS) - 1)
    return f"{value / 1024**power:,.{min(power, 1)}f} {MEMORY_UNITS[power]}"


def grouped(value: float) -> str:
    """Returns a number with three digits, or with all digits before the point if it has more.

    Example:
        >>> grouped(1980.4), grouped(36.54)
        ('1,980', '36.5')
    """
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def shortened(text: str, longest: int) -> str:
    """Returns a text without its middle if it is too long.

    Example:
        >>> shortened("model/block_1/conv_2/convolution", 20)
        'model/bloc…nvolution'
    """
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}…{text[len(text) - (longest - half - 1) :]}"


def duration(seconds: float) -> str:
    """Returns a duration as hours (if above 0), minutes and seconds.

    Example:
        >>> duration(75.4), duration(3675)
        ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def score_label(name: str) -> str:
    """Returns the name of a score for reports.

    Example:
        >>> score_label("mean_iou"), score_label("mask_mean_iou")
        ('Mean IoU', 'Mask mean IoU')
    """
    if name in SCORE_LABELS:
        return SCORE_LABELS[name]
    words = name.replace("_", " ").strip()
    return (words[:1].upper() + words[1:]).replace("mean iou", "mean IoU")


def show_score(name: str, value: float) -> str:
    """Returns the value of a score as text: a share in per cent, any other score with four digits.

    Example:
        >>> show_score("accuracy", 0.9833), show_score("bits_per_byte", 2.34567)
        ('98.33%', '2.346')
    """
    return f"{value:.2%}" if is_share(name) else f"{value:.4g}"


def is_share(name: str) -> bool:
    """Returns whether a score is a share from 0 to 1, whose differences are points.

    Example:
        >>> is_share("mean_iou"), is_share("mean_absolute_error")
        (True, False)
    """
    return name.endswith(("accuracy", "mean_iou", "accuracy_from_logits"))


def speed_verdict(speedup: float, least: float, greatest: float) -> str:
    """Returns a ratio of speeds in words. Only a difference of over 5% that every round of turns shows counts.

    Example:
        >>> speed_verdict(2.0, 1.8, 2.1), speed_verdict(1.2, 0.9, 1.4), speed_verdict(0.5, 0.4, 0.6)
        ('faster', 'about even', 'slower')
    """
    if speedup < 1 - CLEAR and greatest < 1:
        return "slower"
    return "faster" if speedup >= 1 + CLEAR and least > 1 else "about even"


def _short(value: float, units: tuple[tuple[float, str], ...], smallest: str) -> str:
    for size, unit in units:
        if value >= 0.9995 * size:
            number = value / size
            return f"{number:.{max(0, 2 - len(str(int(number + 0.5))) + 1)}f} {unit}"
    return f"{value:.0f}{smallest}"
