"""One progress bar for a whole `fit`, where Keras draws one per epoch.

The bar is a line that fills the terminal's width and is drawn over itself. It is not a live display: Keras tells a
callback nothing when `fit` raises, and a live display would then leave a hidden cursor and a redirected stdout
behind. A line needs no end. The terminal wraps before the next character, so whatever is printed next, a traceback
or the words of another callback, begins on a line of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import keras
from rich.console import Console
from rich.control import Control
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segments
from rich.table import Table
from rich.text import Text

SECONDS_BETWEEN_DRAWINGS = 0.1
PLAIN_LINES = 10
NARROWEST_BAR = 10


class FitProgress(keras.callbacks.Callback):
    """Shows how far a whole `fit` has come, its figures and the time left, in one line.

    Where the console is not a terminal (a file, a pipe, a notebook) it prints a plain line after the first epoch and
    then about every tenth of the epochs. Give `verbose=0` to `fit`, or Keras draws its own bars as well.

    Args:
        description: What the line begins with, for example the phase.
        console: Where to draw; standard output if None.

    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> x = np.zeros((4, 2))
        >>> _ = model.fit(x, x[:, :1], verbose=0, callbacks=[FitProgress("train")])
        train  epoch 1/1  loss 0  0:00:00 left
    """

    def __init__(self, description: str = "", *, console: Console | None = None) -> None:
        super().__init__()
        self._description = description
        self._console = console or Console()
        self._in_place = self._console.is_terminal and not self._console.is_dumb_terminal
        self._reset(epochs=0, steps=None)

    def _reset(self, epochs: int, steps: int | None) -> None:
        self._epochs, self._steps = epochs, steps
        self._epoch = self._step = 0
        self._first_epoch: int | None = None  # not 0 when a training is resumed
        self._figures: dict[str, Any] = {}
        self._started: tuple[float, float] | None = None  # when, and how many epochs were done then
        self._drawn_at = 0.0
        self._printed_epoch = -1

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._reset(self.params["epochs"], self.params["steps"])

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch, self._step = epoch, 0
        if self._first_epoch is None:
            self._first_epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._step = batch + 1
        self._figures.update(logs or {})
        now = time.monotonic()
        # The clock starts after the first step: that one compiles, and would spoil the estimate.
        self._started = self._started or (now, self._done())
        if self._in_place and now - self._drawn_at >= SECONDS_BETWEEN_DRAWINGS:
            self._drawn_at = now
            self._draw()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._figures.update(logs or {})
        self._steps = self._steps or self._step  # a data set of unknown length is known after one epoch
        self._step = self._steps
        if self._in_place:
            self._draw()
        elif self._is_milestone():
            self._print_line()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._first_epoch is None:  # nothing was left to train
            return
        if self._in_place:
            self._console.line()
        elif self._printed_epoch < self._epoch:  # training was stopped early
            self._print_line()

    def _is_milestone(self) -> bool:
        done, total = round(self._done()), self._total()
        return done == 1 or done * PLAIN_LINES // total > (done - 1) * PLAIN_LINES // total

    def _draw(self) -> None:
        step = f"{self._step}/{self._steps}" if self._steps else f"{self._step}"
        where, time_left = Text(f"{self._where()}  {step}"), Text(f"{self._time_left()} left")
        figures = Text(figures_line(self._figures))
        # On a narrow terminal the figures give way; six blanks lie between the four columns.
        room = self._console.width - len(where) - len(time_left) - NARROWEST_BAR - 6
        figures.truncate(max(room, 1), overflow="ellipsis")
        line = Table.grid(padding=(0, 2, 0, 0), pad_edge=False, expand=True)
        for ratio in (None, 1, None, None):  # the bar takes what the others leave
            line.add_column(no_wrap=True, ratio=ratio)
        bar = ProgressBar(total=self._total(), completed=self._done())
        line.add_row(where, bar, figures, time_left)
        segments = self._console.render_lines(line)[0]
        with self._console:  # one write for both, so that the line does not flicker
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
            self._console.print(Segments(segments), end="")

    def _print_line(self) -> None:
        self._printed_epoch = self._epoch
        words = f"{self._where()}  {figures_line(self._figures)}  {self._time_left()} left"
        self._console.print(Text(words), soft_wrap=True)

    def _where(self) -> str:
        return f"{self._description}  epoch {self._epoch + 1}/{self._epochs}".lstrip()

    def _total(self) -> int:
        return self._epochs - (self._first_epoch or 0)

    def _done(self) -> float:
        """Returns how many epochs of this fit are done, the current one in part."""
        within = min(self._step / self._steps, 1.0) if self._steps else 0.0
        return self._epoch - (self._first_epoch or 0) + within

    def _time_left(self) -> str:
        done = self._done()
        if done >= self._total():
            return str(timedelta())
        started, at = self._started or (0.0, done)
        if done <= at:
            return "?:??:??"
        seconds = (time.monotonic() - started) / (done - at) * (self._total() - done)
        return str(timedelta(seconds=round(seconds)))


def figures_line(figures: Mapping[str, Any]) -> str:
    """Returns figures as one line, loss first, each with its validation value behind it.

    Example:
        >>> figures_line({"accuracy": 0.98123, "loss": 0.0612, "val_accuracy": 0.9712, "val_loss": 0.08})
        'loss 0.0612 (val 0.08)  accuracy 0.9812 (val 0.9712)'
    """
    names = [name for name in figures if not (name.startswith("val_") and name.removeprefix("val_") in figures)]
    # What people watch comes first, since a narrow terminal cuts off the end.
    watched = ("loss", "accuracy", "sparsity")
    names.sort(key=lambda name: watched.index(name) if name in watched else len(watched))
    return "  ".join(
        f"{name} {_short(figures[name])}"
        + (f" (val {_short(figures[f'val_{name}'])})" if f"val_{name}" in figures else "")
        for name in names
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
