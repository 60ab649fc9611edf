"""The rules of the arguments that sources share, by the name of the argument."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Annotated, Any

from annotated_types import Ge, Lt

from tfopt.errors import ConfigError
from tfopt.settings.validation import Remedy, check_value

Size = Annotated[int, Ge(1)]
Share = Annotated[float, Ge(0), Lt(1)]
Names = str | tuple[str, ...]

# A path counts as a string, and a list as a tuple.
RULES: dict[str, Any] = {
    "config": str | None,
    "data_dir": str | None,
    "directory": str,
    "download": bool,
    "encoding": str | None,
    "exact": bool | None,
    "examples": Size,
    "files_at_a_time": Size,
    "horizon": Size,
    "ignored_target": int | None,
    "image_size": Annotated[Size | tuple[Size, Size], Remedy("Give one side, or (height, width). 224 is usual.")],
    "input_shape": tuple[Size, ...],
    "inputs": str | None,
    "length": Size,
    "min_files": Size,
    "name": str,
    "noise": Annotated[float, Ge(0), Lt(math.inf)],
    "num_classes": Size,
    "num_words": Size,
    "outputs": Size | None,
    "overlap": Annotated[int, Ge(0)],
    "pack": bool,
    "path": str | None,
    "pattern": str,
    "revision": str | None,
    "seed": Annotated[int, Ge(0), Lt(2**32), Remedy("0 is usual.")],
    "separator": str | None,
    "skip_damaged": Annotated[int, Ge(0)],
    "stride": Size,
    "targets": str | None,
    "test_fraction": Annotated[Share, Remedy("0.2 is usual.")],
    "tokens": str,
    "validation_fraction": Annotated[Share, Remedy("0.1 is usual.")],
    "window": Size | None,
}


def check_arguments(**values: Any) -> None:
    """Raises ConfigError unless each argument of a source follows the rule of its name.

    The shares of the test and the validation part must also leave something for the training part.

    Example:
        >>> check_arguments(length=32, test_fraction=0.2, validation_fraction=0.1)
        >>> check_arguments(seed=-1)
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: seed must be a whole number in [0, 2**32). Received: seed=-1. 0 is usual.
    """
    for name, value in values.items():
        check_value(name, value, RULES[name])
    test, validation = values.get("test_fraction", 0), values.get("validation_fraction", 0)
    if validation and validation >= 1 - test:
        raise ConfigError(
            "validation_fraction must be in [0, 1 - test_fraction). Received: "
            f"validation_fraction={validation}, test_fraction={test}. 0.1 is usual."
        )


def optional_package(name: str, extra: str, needed_by: str) -> Any:
    """Returns a package that an extra of tfopt installs.

    Args:
        name: Name by which Python imports it.
        extra: The extra.
        needed_by: What needs it, for the error.
    Raises:
        ConfigError: It is not installed.
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
    size = check_value("image_size", image_size, RULES["image_size"])
    return (size, size) if isinstance(size, int) else size
