"""Frames of other threads: `sys._current_frames`, which Python documents in spite of its private name."""

from __future__ import annotations

import sys
from types import FrameType


def frame_of_thread(thread: int) -> FrameType | None:
    """Returns the innermost frame of a thread, by its identifier; None if it has ended."""
    return sys._current_frames().get(thread)
