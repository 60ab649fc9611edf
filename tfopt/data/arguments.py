"""The rules of the arguments that sources share, by the name of the argument."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from tfopt.errors import ConfigError
from tfopt.settings.validation import Remedy, check_value

Size = Annotated[int, Ge(1)]
Share = Annotated[float, Ge(0), Lt(1)]
Names = str | tuple[str, ...]
ImageSize = Annotated[Size | tuple[Size, Size], Remedy("Give one side, or (height, width). 224 is usual.")]

# A path counts as a string, and a list as a tuple.
RULES: dict[str, Any] = {
    **dict.fromkeys(("check_finite", "download", "pack"), bool),
    **dict.fromkeys(("name", "pattern", "tokens"), str),
    **dict.fromkeys(("config", "data_dir", "encoding", "path", "revision", "separator"), str | None),
    **dict.fromkeys(("inputs", "targets"), str | None),
    **dict.fromkeys(("examples", "files_at_a_time", "horizon", "length", "min_files"), Size),
    **dict.fromkeys(("num_classes", "num_words", "stride"), Size),
    **dict.fromkeys(("outputs", "window"), Size | None),
    **dict.fromkeys(("overlap", "skip_damaged"), Annotated[int, Ge(0)]),
    "central_crop": Annotated[float | None, Gt(0), Le(1), Remedy("It is a share; 0.875 is usual. None is off.")],
    "exact": bool | None,
    "ignored_target": int | None,
    "input_shape": tuple[Size, ...],
    "noise": Annotated[float, Ge(0), Lt(math.inf)],
    "seed": Annotated[int, Ge(0), Lt(2**32), Remedy("0 is usual.")],
    "test_fraction": Annotated[Share, Remedy("0.2 is usual.")],
    "validation_fraction": Annotated[Share, Remedy("0.1 is usual.")],
}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError unless each argument of a source follows the rule of its name, if there is one.

    A source passes its `locals()`. The shares of the test and the validation part must also leave something for the
    training part.

    Example:
        >>> check_arguments({"length": 32, "test_fraction": 0.2, "validation_fraction": 0.1})
        >>> check_arguments({"seed": -1})
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: seed must be a whole number in [0, 2**32). Received: seed=-1. 0 is usual.
    """
    for name, value in arguments.items():
        if name in RULES:
            check_value(name, value, RULES[name])
    test, validation = arguments.get("test_fraction", 0), arguments.get("validation_fraction", 0)
    if validation and validation >= 1 - test:
        raise ConfigError(
            "validation_fraction must be in [0, 1 - test_fraction). Received: "
            f"validation_fraction={validation}, test_fraction={test}. 0.1 is usual."
        )


def optional_package(name: str, extra: str, needed_by: str) -> Any:
    """Returns a package that an extra of tfopt installs. Raises ConfigError, with what needs it, if it is missing.

    Example:
        >>> optional_package("no_such_package", "tables", "A table")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: A table needs the package no_such_package. Install it: pip install 'tfopt[tables]'.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{needed_by} needs the package {name}. Install it: pip install 'tfopt[{extra}]'.") from error


def height_and_width(image_size: int | Sequence[int]) -> tuple[int, int]:
    """Returns (height, width) of images. Raises ConfigError unless `image_size` is one side or two.

    Example:
        >>> height_and_width(32), height_and_width([32, 64])
        ((32, 32), (32, 64))
    """
    size = check_value("image_size", image_size, ImageSize)
    return (size, size) if isinstance(size, int) else size
