"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tfopt.diagnosis.measured import Measured
from tfopt.report import Diagnosis

# A change that saves less of the step than this is not advised.
WORTH = 0.05


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One cause of a slow step, and how to find it.

    Attributes:
        cause: Name of the cause.
        check: Returns the diagnosis, or the figure that says that the cause is absent. Raises CannotMeasureError if it
            cannot be checked.
        threshold: What must hold for the diagnosis, in words.
        remedy: What to change, in words.
        source: Where the rule comes from.
    """

    cause: str
    check: Callable[[Measured], Diagnosis | str]
    threshold: str
    remedy: str
    source: str


def is_worth(found: Diagnosis) -> bool:
    """Returns whether a change saves enough to be advised; an unknown gain may be enough."""
    return found.gain is None or found.gain >= WORTH


class AbsentError(Exception):
    """The cause is absent; the message is the figure that says so."""
