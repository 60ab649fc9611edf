"""Scores as text: their names and values in logs, tables and reports."""

from __future__ import annotations

SCORE_LABELS = {
    "accuracy": "Accuracy",
    "mean_iou": "Mean IoU",
    "bits_per_byte": "Bits per byte",
    "mean_absolute_error": "Mean absolute error",
}
"""The scores of the tasks, as reports name them. Reports show them first."""


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
