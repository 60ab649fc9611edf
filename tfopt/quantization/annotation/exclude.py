"""The patterns of the setting `exclude`: which nodes or layers they match, and a check that each matches one."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from tfopt.errors import ConfigError


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a node's name matches one of the patterns, with or without the numbers that Keras adds to layer names.

    Keras opens the scope of a layer "head" twice, so the names of its nodes start with "head_1".
    """
    names = (name, re.sub(r"_\d+(?=/)", "", name))
    return any(fnmatch.fnmatchcase(candidate, pattern) for candidate in names for pattern in patterns)


def check_exclude(patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raises ConfigError unless each pattern matches one of the names."""
    known = list(names)
    for pattern in patterns:
        if not any(matches(name, (pattern,)) for name in known):
            raise ConfigError(
                f"exclude must name nodes of the graph (or, for training, layers of the model). Received: "
                f"exclude={tuple(patterns)}, where {pattern!r} matches none. To see the names, run without exclude "
                "and read the report."
            )
