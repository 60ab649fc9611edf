"""The division of examples into the parts for training, validation and testing, by shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfopt.data.examples import Split
from tfopt.errors import ConfigError


def split(
    count: int, classes: np.ndarray | None, test_fraction: float, validation_fraction: float, seed: int
) -> dict[Split, np.ndarray]:
    """Returns the numbers of the examples of each part, shuffled. A part with the share 0 is empty.

    Args:
        classes: Class number of each example, or None. Every class has the same share in each part.
    Raises:
        ConfigError: A class has too few examples for every part.
    Example:
        >>> {part: len(numbers) for part, numbers in split(10, None, 0.2, 0.1, seed=0).items()}
        {'train': 7, 'validation': 1, 'test': 2}
    """
    train = np.random.default_rng(seed).permutation(count)
    test = validation = train[:0]
    try:
        if test_fraction:
            train, test = _divide(np.arange(count), classes, test_fraction, seed)
        if validation_fraction:
            train, validation = _divide(train, classes, validation_fraction / (1 - test_fraction), seed)
    except ValueError as error:
        raise ConfigError(
            "Every class must have at least two examples, and each part at least one of every class. "
            f"Received: {count} examples and test_fraction={test_fraction} ({error}). "
            "Add examples of the rare classes, or change test_fraction. Values for a regression must be floats."
        ) from error
    return {"train": train, "validation": validation, "test": test}


def split_files(
    parts: Sequence[Split | None],
    classes: np.ndarray | None,
    test_fraction: float,
    validation_fraction: float,
    seed: int,
) -> dict[Split, np.ndarray]:
    """Returns the numbers of the files of each part. The shares only make parts that have no folder of their own.

    Args:
        parts: Part of each file, by the folder that it lies in; None where there are no such folders.
        classes: As for `split`.
    Raises:
        ConfigError: The training or the test part is empty.
    Example:
        >>> chosen = split_files(["train"] * 4 + ["test"], None, 0.2, 0.25, seed=0)
        >>> len(chosen["train"]), len(chosen["validation"]), chosen["test"]
        (3, 1, array([4]))
    """
    own = np.array([part or "train" for part in parts])
    pool = np.flatnonzero(own == "train")
    shares = (0 if "test" in own else test_fraction, 0 if "validation" in own else validation_fraction)
    found = split(len(pool), None if classes is None else classes[pool], *shares, seed)
    chosen = {part: pool[numbers] for part, numbers in found.items()}
    generator = np.random.default_rng(seed)
    for part in ("validation", "test"):
        if part in own:
            chosen[part] = generator.permutation(np.flatnonzero(own == part))
    empty = [part for part in ("train", "test") if not len(chosen[part])]
    if empty:
        raise ConfigError(
            f"The {empty[0]} part must hold examples. Received: none, with test_fraction={test_fraction}. Set "
            "test_fraction=0.2, or give the part a folder of its own."
        )
    return chosen


def _divide(
    chosen: np.ndarray, classes: np.ndarray | None, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.model_selection import train_test_split

    stratify = None if classes is None else classes[chosen]
    first, second = train_test_split(chosen, test_size=float(fraction), random_state=seed, stratify=stratify)
    return first, second
