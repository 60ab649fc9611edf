"""The split of examples into training, validation and test part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfopt.data.arguments import check_arguments
from tfopt.data.examples import Split
from tfopt.data.files.folders import shortened
from tfopt.errors import ConfigError


def split(
    count: int,
    classes: np.ndarray | None = None,
    *,
    test_fraction: float,
    validation_fraction: float = 0.0,
    seed: int = 0,
) -> dict[Split, np.ndarray]:
    """Returns the numbers of the examples of each part, shuffled. Every class has the same share in each part.

    Args:
        count: Number of examples.
        classes: Class number of each example. None means that the examples have no classes.
        test_fraction: Share of the test part. With 0 it is empty.
        validation_fraction: Share of the validation part. With 0 it is empty.
        seed: Seed of the split.
    Raises:
        ConfigError: A share is out of range, or a class has too few examples for every part.
    Example:
        >>> {part: len(numbers) for part, numbers in split(10, test_fraction=0.2, validation_fraction=0.1).items()}
        {'train': 7, 'validation': 1, 'test': 2}
    """
    check_arguments(test_fraction=test_fraction, validation_fraction=validation_fraction, seed=seed)
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
    classes: np.ndarray | None = None,
    *,
    test_fraction: float,
    validation_fraction: float,
    seed: int,
) -> dict[Split, np.ndarray]:
    """Returns the numbers of the files of each part. A file of a part's own folder stays in this part.

    Args:
        parts: Part of each file, by the folder that it lies in; None where there are no such folders.
        classes: Class number of each file.
        test_fraction: Share of the test part, unless it has a folder.
        validation_fraction: Share of the validation part, unless it has a folder.
        seed: Seed of the split and of the order.
    Raises:
        ConfigError: The training or the test part is empty.
    Example:
        >>> chosen = split_files(["train"] * 4 + ["test"], test_fraction=0.2, validation_fraction=0.25, seed=0)
        >>> len(chosen["train"]), len(chosen["validation"]), chosen["test"]
        (3, 1, array([4]))
    """
    own = np.array([part or "train" for part in parts])
    pool = np.flatnonzero(own == "train")
    found = split(
        len(pool),
        None if classes is None else classes[pool],
        test_fraction=0 if "test" in own else test_fraction,
        validation_fraction=0 if "validation" in own else validation_fraction,
        seed=seed,
    )
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


def tolerate(problems: Sequence[tuple[str, str]], total: int, limit: float, what: str) -> tuple[str, ...]:
    """Returns notes about what cannot be read, if it is within the limit that the user set.

    Args:
        problems: Name and reason of each file or row that cannot be read.
        total: Number of all files or rows.
        limit: Largest number of problems; below 1 their largest share.
        what: What a problem is, in the plural: "images".
    Raises:
        ConfigError: There are more problems than the limit allows.
    Example:
        >>> tolerate([("a.png", "it is empty")], 10, 0.1, "images")
        ('1 of 10 images was left out: a.png (it is empty).',)
    """
    if not problems:
        return ()
    listed = shortened([f"{name} ({reason})" for name, reason in problems])
    if len(problems) > (limit * total if limit < 1 else limit):
        raise ConfigError(
            f"At most {limit:g}{' of the' if 0 < limit < 1 else ''} {what} may be unreadable. Received: "
            f"{len(problems)} of {total} that cannot be read: {listed}. Repair or remove them, or set "
            f"max_unreadable={len(problems)}."
        )
    return (f"{len(problems)} of {total} {what} {'was' if len(problems) == 1 else 'were'} left out: {listed}.",)


def check_limit(max_unreadable: Any) -> None:
    """Raises ConfigError unless the limit of unreadable files is a share below 1 or a whole number.

    Example:
        >>> check_limit(0.01)
    """
    number = isinstance(max_unreadable, int | float) and not isinstance(max_unreadable, bool)
    if not number or not max_unreadable >= 0 or (max_unreadable > 1 and max_unreadable != int(max_unreadable)):
        raise ConfigError(
            "max_unreadable must be a whole number of at least 0, or a share below 1. "
            f"Received: max_unreadable={max_unreadable!r}. 0 allows none."
        )


def _divide(
    chosen: np.ndarray, classes: np.ndarray | None, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.model_selection import train_test_split

    stratify = None if classes is None else classes[chosen]
    first, second = train_test_split(chosen, test_size=float(fraction), random_state=seed, stratify=stratify)
    return first, second
