"""The folders of a user: their files without those that systems leave there, the folders of the parts, and notes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfopt.data.examples import Split
from tfopt.errors import ConfigError
from tfopt.settings.validation import check_value

PART_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
# People also write Training_Set, test-data or train images.
AFTER_PART = re.compile(r"[ _-]?(set|data|images)$")
# Systems and programs write these; so are names that begin with a dot.
CLUTTER = {"__macosx", "__pycache__", "@eadir", "$recycle.bin", "system volume information", "lost+found"}
CLUTTER |= {"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"}
SHOWN = 5


def tolerate(problems: Sequence[tuple[str, str]], total: int, limit: float, what: str) -> tuple[str, ...]:
    """Returns notes about what cannot be read, if it is within the limit that the user set.

    Args:
        problems: Name and reason of each file that cannot be read.
        total: Number of all files.
        limit: Largest number of problems; below 1 their largest share.
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
    """Raises ConfigError unless the limit of unreadable files is a share below 1 or a whole number."""
    number = isinstance(max_unreadable, int | float) and not isinstance(max_unreadable, bool)
    if not number or not max_unreadable >= 0 or (max_unreadable > 1 and max_unreadable != int(max_unreadable)):
        raise ConfigError(
            "max_unreadable must be a whole number of at least 0, or a share below 1. "
            f"Received: max_unreadable={max_unreadable!r}. 0 allows none."
        )


def is_clutter(name: str) -> bool:
    """Returns whether a file or folder is hidden, or one that systems and programs leave behind.

    Example:
        >>> [name for name in (".ipynb_checkpoints", "__MACOSX", "Thumbs.db", "cats") if not is_clutter(name)]
        ['cats']
    """
    return name.startswith(".") or name.lower() in CLUTTER


def content(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns the sub-folders and the other entries of a folder, sorted, without clutter.

    Raises:
        ConfigError: The folder cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            found = sorted((entry.name, entry.is_dir()) for entry in entries if not is_clutter(entry.name))
    except OSError as error:
        raise ConfigError(
            f"A folder must be readable. Received: {str(folder)!r} ({error.strerror}). Change its permissions, or "
            "remove it."
        ) from error
    return [folder / name for name, is_folder in found if is_folder], [folder / name for name, is_ in found if not is_]


def files_below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yields the files in a folder and its sub-folders without clutter, also broken links and pipes.

    A link to a folder is followed, unless it leads back to a folder above it.
    """
    real = folder.resolve()
    if real in above:
        return
    folders, files = content(folder)
    yield from files
    for each in folders:
        yield from files_below(each, (*above, real))


def part_folders(directory: Path) -> dict[Split, Path]:
    """Returns the folders of the parts of a directory: train, validation and test; {} if there is none for training.

    Raises:
        ConfigError: Two folders have names of one part, or all folders have names of parts and none is for training.
    Example:
        >>> import tempfile
        >>> directory = Path(tempfile.mkdtemp())
        >>> for name in ("Training", "valid", "other"):
        ...     (directory / name).mkdir()
        >>> {part: folder.name for part, folder in part_folders(directory).items()}
        {'train': 'Training', 'validation': 'valid'}
    """
    folders, _ = content(directory)
    named = [(part, folder) for folder in folders if (part := _part(folder.name))]
    found = dict(reversed(named))
    names = ", ".join(repr(folder.name) for _, folder in named)
    if "train" not in found:
        if len(named) > 1 and len(named) == len(folders):
            raise ConfigError(
                f"Folders of parts must include one for training. Received: {names} in {str(directory)!r}. Name one "
                "of them train."
            )
        return {}
    if len(found) < len(named):
        raise ConfigError(
            f"Each part must have one folder. Received: {names} in {str(directory)!r}, of which two are the same part. "
            "Join them, or rename one: train, validation, test."
        )
    return {part: found[part] for part in ("train", "validation", "test") if part in found}


def _part(name: str) -> Split | None:
    known = {name.lower(), AFTER_PART.sub("", name.lower())}
    return next((part for part, names in PART_NAMES.items() if known & {*names}), None)


def existing_directory(argument: str, path: str | Path) -> Path:
    """Returns a directory as a path. Raises ConfigError unless it exists.

    Example:
        >>> existing_directory("directory", "/missing")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: directory must be an existing folder. Received: directory='/missing'. ...
    """
    check_value(argument, path, str)
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise ConfigError(
            f"{argument} must be an existing folder. Received: {argument}={str(path)!r}. Correct the path."
        )
    return directory


def not_used(paths: Sequence[Path], root: Path, what: str) -> tuple[str, ...]:
    """Returns a note about files or folders that are not used, or none.

    Example:
        >>> not_used([Path("a/x/1.txt"), Path("a/2.csv")], Path("a"), "Files that are no images")
        ('Files that are no images were not used: 2 (x/1.txt, 2.csv).',)
    """
    names = [path.relative_to(root).as_posix() for path in paths]
    return (f"{what} were not used: {len(names)} ({shortened(names)}).",) if names else ()


def shortened(names: Sequence[str]) -> str:
    """Returns the first names of a list, and how many more there are.

    Example:
        >>> shortened("abcdefg")
        'a, b, c, d, e and 2 more'
    """
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
