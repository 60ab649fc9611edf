"""A run in the terminal: its plan, the progress of each fit, and the result of each pass.

Names and reasons must be `Text` and not strings, because rich would read "[conv1]" as markup and not print it.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segments
from rich.table import Table
from rich.text import Text

from tfopt.profiling.monitoring.callback import LOGGED
from tfopt.report import Decision, PassReport
from tfopt.report.formatting import SCORE_LABELS, duration, short_bytes
from tfopt.report.record import RANGE
from tfopt.terminal import PrintableConsole

# On a narrower terminal, the column of reasons would be too narrow to read.
WIDTH_FOR_REASONS = 70
FIGURES = re.compile(r": [\d.]+ .*")  # the times in the reason of one node, which no other node has
SECONDS_BETWEEN_DRAWINGS = 0.1
PLAIN_LINES = 10
NARROWEST_BAR = 10
GAP = "  "
# The most important figures come first in the line, and stay longest on a narrow terminal.
SHOWN_FIRST = ("loss", *SCORE_LABELS, "sparsity")
KEPT_LONGEST = (*SCORE_LABELS, "loss", "sparsity")
# What the line shows of GpuMonitor's figures: their names there, and how they are written.
LOADS: dict[str, tuple[str, Callable[[float], str]]] = {
    "gpu_utilization_percent": ("gpu", "{:.0f}%".format),
    "gpu_tensorflow_memory_peak_bytes": ("memory", short_bytes),
    "gpu_power_watts": ("power", "{:.0f} W".format),
    "process_cpu_percent": ("cpu", "{:.0f}%".format),
}


@dataclass(frozen=True)
class PlanTable:
    """The settings of a plan, each with its value and the reason. A narrow terminal shows the reason below the value.

    Example:
        >>> table = PlanTable([Decision(setting="precision", value="float32", reason="no GPU")])
        >>> Console(width=80, color_system=None).print(table)
         setting     value     reason
        ──────────────────────────────
         precision   float32   no GPU
        >>> Console(width=40, color_system=None).print(table)
        precision  float32
          no GPU
    """

    decisions: Sequence[Decision]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < WIDTH_FOR_REASONS:
            yield from self._blocks()
            return
        table = Table("setting", "value", "reason", box=box.SIMPLE_HEAD, show_edge=False, header_style="dim")
        for decision in self.decisions:
            value, reason = Text(decision.value, style="bold"), Text(decision.reason, style="dim")
            table.add_row(Text(decision.setting), value, reason)
        yield table

    def _blocks(self) -> RenderResult:
        width = max((len(decision.setting) for decision in self.decisions), default=0)
        for decision in self.decisions:
            yield Text.assemble(f"{decision.setting:{width}}  ", (decision.value, "bold"))
            yield Padding(Text(decision.reason, style="dim"), (0, 0, 0, 2))


def pass_summary(report: PassReport) -> Text:
    """Returns the result of a pass in a few lines: changes and steps by kind, and skips by reason.

    Example:
        >>> from tfopt.report import Change, Skip
        >>> changed = [Change(name=name, kind="Dense", detail="75.0% zeros") for name in ("hidden1", "hidden2")]
        >>> skipped = [Skip(name="logits", kind="Dense", reason="the output layer is left dense")]
        >>> print(pass_summary(PassReport(name="prune", changed=changed, skipped=skipped, metrics={"sparsity": 0.7})))
        prune: 2 changed, 1 skipped, sparsity 0.7
          changed  2 Dense
          skipped  logits: the output layer is left dense
    """
    text = Text()
    text.append(report.name, style="bold")
    text.append(f": {len(report.changed)} changed, {len(report.skipped)} skipped")
    text.append("".join(f", {figure}" for figure in report.figures))
    if report.changed:
        kinds = Counter(change.kind for change in report.changed)
        text.append("\n  changed  ", style="dim")
        text.append(", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    by_kind: dict[str, list[str]] = {}
    for step in report.steps:
        by_kind.setdefault(step.kind, []).append(step.detail)
    for kind, details in by_kind.items():
        text.append("\n  step     ", style="dim")
        text.append(details[0] if len(details) == 1 else f"{len(details)} {kind}")
    by_reason: dict[str, list[str]] = {}
    for skip in report.skipped:
        by_reason.setdefault(FIGURES.sub("", skip.reason), []).append(skip.name)
    for reason, names in by_reason.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        text.append("\n  skipped  ", style="dim")
        text.append(f"{shown}: {reason}")
    for note in report.notes:
        if note.kind != RANGE:  # the page has these
            text.append("\n  note     ", style="dim")
            text.append(f"{note.name}: {note.detail}")
    return text


class FitProgress(keras.callbacks.Callback):
    """Shows the progress of a whole `fit` in one line: its figures and the time left, at the end the total time.

    The bar is a line of the terminal's full width, which is drawn over itself. It is not a live display of rich: Keras
    does not inform a callback when `fit` raises an error, and a live display would then leave a hidden cursor and a
    redirected stdout. The terminal wraps before the next character, so the next output, for example a traceback, begins
    on a new line. On a narrow terminal, the bar is left out first, then the steps, then the less important figures. No
    figure is cut.

    If the console is not a terminal (a file, a pipe, a notebook), it prints a plain line after the first epoch and then
    after about every tenth of the epochs. Pass `verbose=0` to `fit`, so that Keras does not draw its own bars.

    Args:
        description: Start of the line, for example the name of the phase.
        console: Console for the line. None means standard output.
    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> x = np.zeros((4, 2))
        >>> _ = model.fit(x, x[:, :1], verbose=0, callbacks=[FitProgress("train")])
        train  epoch 1/1  loss 0  took 0:0...
    """

    _follows_several_steps = True  # of a call into TensorFlow

    def __init__(self, description: str = "", *, console: Console | None = None) -> None:
        super().__init__()
        self._description = description
        self._console = console or PrintableConsole()
        self._in_place = self._console.is_terminal and not self._console.is_dumb_terminal
        self._reset(epochs=0, steps=None)

    def _reset(self, epochs: int, steps: int | None) -> None:
        self._epochs, self._steps = epochs, steps
        self._epoch = self._step = 0
        self._first_epoch: int | None = None  # above 0 in a resumed training
        self._figures: dict[str, Any] = {}
        self._began = time.monotonic()
        self._started: tuple[float, float] | None = None  # the time of the first step, and the epochs done then
        self._drawn_at = 0.0

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
        # The clock starts after the first step, which compiles and would make the estimate too long.
        self._started = self._started or (now, self._done())
        if self._in_place and now - self._drawn_at >= SECONDS_BETWEEN_DRAWINGS:
            self._drawn_at = now
            self._draw()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._figures.update(_with_load(logs or {}))
        self._steps = self._steps or self._step  # after one epoch the length of the data set is known
        self._step = self._steps
        if self._in_place:
            self._draw()
        elif self._is_milestone():
            self._print_line(self._time_left())

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._first_epoch is None:  # nothing was left to train
            return
        took = f"took {duration(time.monotonic() - self._began)}"
        if self._in_place:
            self._draw(took)
            self._console.line()
        else:
            self._print_line(took)

    def _is_milestone(self) -> bool:
        done, total = round(self._done()), self._total()
        if self._done() >= total or self.model.stop_training:  # on_train_end prints the last line
            return False
        return done == 1 or done * PLAIN_LINES // total > (done - 1) * PLAIN_LINES // total

    def _draw(self, end: str | None = None) -> None:
        width = self._console.width
        step = f"{self._step}/{self._steps}" if self._steps else f"{self._step}"
        heads = [f"{self._where()}{GAP}{step}", self._where(), self._where(label="")]
        words, bar_width = fitted(heads, self._figures, self._time_left() if end is None else end, width)
        before, behind = (Text(part) for part in words)
        line = Table.grid(padding=0, pad_edge=False, expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        bar = ProgressBar(total=self._total(), completed=self._done(), width=bar_width)
        line.add_row(before, bar if bar_width else "", behind)
        segments = self._console.render_lines(line)[0]
        with self._console:  # one write for both prevents flicker
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
            self._console.print(Segments(segments), end="")

    def _print_line(self, time_words: str) -> None:
        words = [self._where(), figures_line(self._figures), time_words]
        self._console.print(Text(GAP.join(filter(None, words))), soft_wrap=True)

    def _where(self, label: str = "epoch ") -> str:
        return f"{self._description}{GAP}{label}{self._epoch + 1}/{self._epochs}".lstrip()

    def _total(self) -> int:
        return self._epochs - (self._first_epoch or 0)

    def _done(self) -> float:
        """Returns the number of epochs of this fit that are done, with the done part of the current epoch."""
        within = min(self._step / self._steps, 1.0) if self._steps else 0.0
        return self._epoch - (self._first_epoch or 0) + within

    def _time_left(self) -> str:
        """Returns the estimate in words, or an empty string if there is no estimate yet."""
        done, (started, at) = self._done(), self._started or (0.0, self._done())
        remaining = max(self._total() - done, 0.0)
        if done <= at and remaining:
            return ""
        return f"{duration((time.monotonic() - started) / (done - at) * remaining if remaining else 0)} left"


def fitted(
    heads: Sequence[str], figures: Mapping[str, Any], time_words: str, width: int
) -> tuple[tuple[str, str], int | None]:
    """Returns the left and the right text of a line of some width, and the width of the bar between them, or None.

    The line may start with one of the heads, the longest first. It ends with the words about the time.

    Example:
        >>> figures = {"loss": 0.06, "accuracy": 0.98, "val_accuracy": 0.97, "recall": 0.9}
        >>> for width in (100, 90, 50):
        ...     fitted(["train  epoch 3/40  5/45", "train  epoch 3/40"], figures, "0:12 left", width)
        (('train  epoch 3/40  5/45  ', '  loss 0.06  accuracy 0.98 (val 0.97)  recall 0.9  0:12 left'), 15)
        (('train  epoch 3/40  5/45  loss 0.06  accuracy 0.98 (val 0.97)  recall 0.9', '0:12 left'), None)
        (('train  epoch 3/40  5/45  accuracy 0.98 (val 0.97)', ''), None)
    """
    before, behind = heads[0] + GAP, GAP.join(["", *filter(None, [figures_line(figures), time_words])])
    if width - len(before) - len(behind) >= NARROWEST_BAR:
        return (before, behind), width - len(before) - len(behind)
    names = sorted(_names(figures), key=lambda name: _rank(name, KEPT_LONGEST))
    shorter = [figures_line(figures, names[:count]) for count in range(len(names), 0, -1)]
    candidates = [(f"{head}{GAP}{line}", time_words) for line in shorter for head in heads]
    candidates += [(f"{head}{GAP}{shorter[-1]}", "") for head in heads if shorter]
    candidates += [(head, time_words) for head in heads]
    for left, right in candidates:
        if len(left) + (len(GAP) + len(right) if right else 0) <= width:
            return (left, right), None
    return (heads[-1][:width], ""), None


def figures_line(figures: Mapping[str, Any], names: Collection[str] | None = None) -> str:
    """Returns figures, as Keras logs them, as one line: the loss first, each followed by its validation value.

    Without names, which do not include those of validation values, all are shown.

    Example:
        >>> figures_line({"accuracy": 0.98123, "loss": 0.0612, "val_accuracy": 0.9712, "val_loss": 0.08})
        'loss 0.0612 (val 0.08)  accuracy 0.9812 (val 0.9712)'
    """
    shown = [name for name in _names(figures) if names is None or name in names]
    shown.sort(key=lambda name: _rank(name, SHOWN_FIRST))
    return GAP.join(
        f"{name} {_short(figures[name])}"
        + (f" (val {_short(figures[f'val_{name}'])})" if f"val_{name}" in figures else "")
        for name in shown
    )


def _names(figures: Mapping[str, Any]) -> list[str]:
    return [name for name in figures if not (name.startswith("val_") and name.removeprefix("val_") in figures)]


def _rank(name: str, order: tuple[str, ...]) -> int:
    return order.index(name) if name in order else len(order)


def _with_load(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of an epoch, of those of the machine only some, as text."""
    figures = {name: value for name, value in logs.items() if name not in LOGGED}
    for name, (label, write) in LOADS.items():
        if name in logs:
            figures[label] = "unavailable" if math.isnan(logs[name]) else write(logs[name])
    return figures


def _short(value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 0.1 else f"{value:.4g}"  # both have about four decimals
