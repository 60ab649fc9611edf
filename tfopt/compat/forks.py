"""Forks of a process that has used TensorFlow: they have none of its threads, and an operation waits without end."""

from __future__ import annotations

import os

from tfopt.compat.tensorflow import has_started
from tfopt.errors import ConfigError

_forked_from: int | None = None  # the process that had used TensorFlow


def check_not_forked() -> None:
    """Raises ConfigError in a fork of a process that had used TensorFlow. A fork before the first use is safe.

    Example:
        >>> check_not_forked()
    """
    if _forked_from is not None:
        raise ConfigError(
            "TensorFlow must not be used in a fork of a process that has used it: the fork has none of its threads, "
            f"and would wait without end. Received: a fork of process {_forked_from}. Start the process with "
            'multiprocessing.get_context("spawn"), or fork it before the first use of TensorFlow.'
        )


def _note() -> None:
    global _forked_from
    if _forked_from is None and has_started():
        _forked_from = os.getppid()


os.register_at_fork(after_in_child=_note)
