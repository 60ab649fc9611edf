"""What a user does with settings that were found for a script: the command `tfopt accelerate`, and lines to change."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from tfopt.tuning.facts import Facts
from tfopt.tuning.trial import STEP
from tfopt.tuning.workload import Workload


def command_of(workload: Workload, changes: Mapping[str, Any]) -> str:
    """Returns the command that runs a script with the settings; nothing if it is as before.

    Example:
        >>> command_of(Workload(kind="script", name="train.py", folder=""), {"step": "tfopt", "jit_compile": False})
        'tfopt accelerate --no-xla train.py'
    """
    if workload.kind != "script" or STEP not in changes:
        return ""
    flags = ["--precision", changes["precision"]] if "precision" in changes else []
    if changes.get("jit_compile") is False:
        flags.append("--no-xla")
    return shlex.join(["tfopt", "accelerate", *flags, workload.name, *workload.words])


def lines_of(workload: Workload, changes: Mapping[str, Any], facts: Facts) -> tuple[str, ...]:
    """Returns the lines of a script to change, for what the command does not do.

    Example:
        >>> facts = Facts(values={}, places={"compile": "train.py:7", "fit": "train.py:9"})
        >>> script = Workload(kind="script", name="train.py", folder="")
        >>> lines_of(script, {"steps_per_execution": 50, "prefetch": 8}, facts)
        ('train.py:7: compile(..., steps_per_execution=50)', 'train.py:9: fit(dataset.prefetch(8), ...)')
    """
    if workload.kind != "script":
        return ()
    given = {}
    if changes.get("jit_compile") is not None and not (STEP in changes and changes["jit_compile"] is False):
        given["jit_compile"] = changes["jit_compile"]
    if "steps_per_execution" in changes:
        given["steps_per_execution"] = changes["steps_per_execution"]
    found = []
    if given:
        words = ", ".join(f"{name}={value}" for name, value in given.items())
        found.append(f"{facts.places.get('compile', 'unknown')}: compile(..., {words})")
    if "prefetch" in changes:
        found.append(f"{facts.places.get('fit', 'unknown')}: fit(dataset.prefetch({changes['prefetch']}), ...)")
    return tuple(found)
