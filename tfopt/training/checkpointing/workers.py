"""The processes of a training: SIGTERM that one of them receives, and what they tell each other about checkpoints."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import tensorflow as tf

from tfopt.errors import ConfigError
from tfopt.terminal import printable
from tfopt.training.distributed.strategy import is_multi_worker

TERMINATED = 128 + signal.SIGTERM


@dataclass
class Sigterm:
    """Whether SIGTERM came to this process during a `fit`, and whether the process is about to end for it."""

    received: bool = False
    ending: bool = False

    def end(self, saved: str) -> NoReturn:
        """Ends the process with exit code 143. `saved` is the checkpoint in words."""
        self.ending = True
        print(f"tfopt: SIGTERM: saved {printable(saved)}", file=sys.stderr)  # noqa: T201
        raise SystemExit(TERMINATED)


@contextlib.contextmanager
def sigterm_requests() -> Iterator[Sigterm]:
    """Notes SIGTERM while it lasts. Outside the main thread it notes nothing, since Python allows no handler there.

    Example:
        >>> with sigterm_requests() as sigterm:
        ...     sigterm.received
        False
    """
    sigterm = Sigterm()
    if threading.current_thread() is not threading.main_thread():
        yield sigterm
        return

    def request(number: int, frame: FrameType | None) -> None:
        sigterm.received = True

    before = signal.signal(signal.SIGTERM, request)
    try:
        yield sigterm
    finally:
        # With several workers, the SIGTERM of another worker may have ended the training. This worker's own signal
        # may come while the process ends, and must not interrupt that.
        signal.signal(signal.SIGTERM, signal.SIG_IGN if sigterm.ending else before)


class Workers:
    """The processes that train under one strategy. With one process nothing is sent.

    `any`, `agree` and `on_chief` are collectives: every worker must call them at the same point of the training.

    Example:
        >>> workers = Workers(tf.distribute.get_strategy())
        >>> workers.any(True), workers.agree(3), workers.is_chief
        (True, True, True)
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files."""
        return bool(self.strategy.extended.should_checkpoint)

    def any(self, value: bool) -> bool:
        """Returns whether the value is true on at least one worker."""
        if not is_multi_worker(self.strategy):
            return value
        return float(self._sum(tf.constant(float(value)))) > 0

    def agree(self, number: int) -> bool:
        """Returns whether all workers have the same number."""
        if not is_multi_worker(self.strategy):
            return True
        value = tf.constant(float(number), "float64")
        mean = float(self._sum(value)) / self.strategy.num_replicas_in_sync
        return not float(self._sum((value - mean) ** 2))

    def on_chief(self, act: Callable[[], object], refused_elsewhere: str) -> None:
        """Does on the chief what it alone does, since it writes. Raises ConfigError on every worker if it cannot."""
        refused: ConfigError | None = None
        if self.is_chief:
            try:
                act()
            except ConfigError as error:
                refused = error
        if self.any(refused is not None):
            raise refused or ConfigError(refused_elsewhere)

    @functools.cached_property
    def _sum(self) -> Callable[[tf.Tensor], tf.Tensor]:
        """Sums a number over all replicas."""

        def add(value: tf.Tensor) -> tf.Tensor:
            return self.strategy.reduce("SUM", self.strategy.run(tf.identity, args=(value,)), axis=None)

        return tf.function(add)
