"""The result of a compression: the models of which none is better in every figure, and what became of each trial."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfopt.atomic.own_files import check_replaceable, write_own
from tfopt.compression.config import BYTES, DROP, MEMORY, latency_at
from tfopt.errors import ConfigError
from tfopt.report import Receipt, Record
from tfopt.report.formatting import is_share, memory_size, short_bytes
from tfopt.report.sheet import PROBLEM, Sheet, Shown, Table

WRITER = "tfopt.CompressionReport"


@dataclass(frozen=True, kw_only=True)
class CompressedModel(Record):
    """An artifact that a compression made.

    Attributes:
        name: The name of its trial.
        artifact: Its directory.
        recipe: The TOML file with the settings that made it.
        multiply_adds: Share of the multiply-adds of the given model that are left.
        receipts: Its receipt for each batch size.
        figures: Loss of score, latencies and sizes, by their names; less is better.
    """

    name: str
    artifact: str
    recipe: str
    multiply_adds: float
    receipts: tuple[Receipt, ...]
    figures: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TrialRecord(Record):
    """What became of one trial.

    Attributes:
        number: The number of the trial.
        settings: What was proposed.
        multiply_adds: Share of the multiply-adds that it leaves.
        state: "measured", "failed", "given up" during its training, "left out" before it, or "open": the search ended
            before it, or in it.
        reason: Why it failed, was given up, left out or ended.
    """

    number: int
    settings: Mapping[str, float | str]
    multiply_adds: float
    state: str
    reason: str = ""


def figures_of(receipts: Sequence[Receipt]) -> dict[str, float]:
    """Returns the figures of an artifact: loss of score (in the worst output), latencies, bytes, and the peak memory.

    Raises:
        ConfigError: The artifact and its baseline have no score.
    """
    first = receipts[0]
    sign = 1 if first.higher_is_better else -1
    drops = [sign * (first.baseline_scores[name] - score) for name, score in first.scores.items()]
    if not drops:
        reason = first.unavailable.get("accuracy", "it has no labels")
        raise ConfigError(f"A compression needs a score. Received: examples without one: {reason}. Set metric.")
    peaks = [each.memory_peak_bytes for each in receipts if each.memory_peak_bytes is not None]
    memory = {MEMORY: float(max(peaks))} if peaks else {}
    latencies = {latency_at(each.batch_size): each.latency_ms_median for each in receipts}
    return {DROP: round(max(drops), 9), **latencies, BYTES: float(first.bytes_on_disk), **memory}


def front(models: Sequence[CompressedModel], budget: Mapping[str, float]) -> tuple[CompressedModel, ...]:
    """Returns the models that no other one beats or equals in every figure, the smallest first.

    Memory is mostly that of the runtime. So it tells models apart only where the budget bounds it.
    """
    names = {name for each in models for name in each.figures if name != MEMORY or name in budget}
    rows = {each.name: [each.figures.get(name, math.inf) for name in names] for each in models}

    def beats(one: str, other: str) -> bool:
        pairs = list(zip(rows[one], rows[other], strict=True))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    kept = [each for each in models if not any(beats(other.name, each.name) for other in models)]
    return tuple(sorted(kept, key=lambda each: each.figures[BYTES]))


def excess(figures: Mapping[str, float], budget: Mapping[str, float]) -> dict[str, float]:
    """Returns by how much figures exceed their bounds. A figure that is unknown exceeds none.

    Example:
        >>> excess({"bytes": 130.0, "score drop": 0.01}, {"bytes": 100, "score drop": 0.02})
        {'bytes': 30.0}
    """
    over = {name: figures[name] - bound for name, bound in budget.items() if name in figures}
    return {name: value for name, value in over.items() if value > 0}


def show_figure(name: str, value: float) -> str:
    """Returns a figure as text.

    Example:
        >>> show_figure("score drop", 0.0042), show_figure("ms at batch 8", 1.5), show_figure("bytes", 40_000)
        ('0.0042', '1.500', '40.0 kB')
    """
    if name == DROP:
        return f"{value:.4f}"
    return short_bytes(value) if name == BYTES else memory_size(value) if name == MEMORY else f"{value:.3f}"


@dataclass(frozen=True, kw_only=True)
class CompressionReport(Record, Shown):
    """The result of a compression.

    Attributes:
        directory: The directory of the search. The same call with it goes on.
        score: The name of the score.
        budget: The bounds by the names of the figures.
        baseline: The figures of the given model as a float32 artifact.
        front: The artifacts of which none is better in every figure, the smallest first.
        trials: What became of each proposal.
        ended: Why the search ended.
        seconds: How long it took.
    """

    directory: str
    score: str
    budget: Mapping[str, float]
    baseline: Mapping[str, float]
    front: tuple[CompressedModel, ...]
    trials: tuple[TrialRecord, ...] = ()
    ended: str = ""
    seconds: float = 0.0

    @property
    def within(self) -> tuple[CompressedModel, ...]:
        """The artifacts of the front that keep the whole budget, the smallest first. An unknown figure keeps none."""
        known = [each for each in self.front if each.figures.keys() >= self.budget.keys()]
        return tuple(each for each in known if not excess(each.figures, self.budget))

    @property
    def best(self) -> CompressedModel | None:
        """The fastest artifact within the budget, at the first batch size; None if there is none."""
        fast = next(name for name in self.baseline if name.startswith("ms"))
        return min(self.within, key=lambda each: each.figures[fast], default=None)

    @property
    def missed(self) -> dict[str, float]:
        """By how much the artifact that comes nearest to the budget exceeds each bound; empty if it exceeds none."""

        def miss(model: CompressedModel) -> float:
            over = excess(model.figures, self.budget)
            return sum(value / (self.budget[name] or 1.0) for name, value in over.items())

        return excess(min(self.front, key=miss).figures, self.budget) if self.front else {}

    def plot(self, path: str | Path) -> Path:
        """Draws loss of score against latency at the first batch size into a .svg or .png file.

        Raises:
            ConfigError: The name does not end so, or belongs to a file that tfopt did not write.
            ExportError: The file cannot be written.
        """
        from matplotlib.figure import Figure

        path = Path(path)
        names = {".svg": "Creator", ".png": "Software"}
        if path.suffix not in names:
            raise ConfigError(f"path must end in {', '.join(names)}. Received: path={str(path)!r}.")
        check_replaceable(path, _is_plot)
        fast = next(name for name in self.baseline if name.startswith("ms"))
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes: Any = figure.add_subplot()
        points = [("float32, as given", self.baseline), *((each.name, each.figures) for each in self.front)]
        axes.scatter([each[fast] for _, each in points], [each[DROP] for _, each in points], color="#0072b2")
        for name, each in points:
            text = f" {name}, {short_bytes(each[BYTES])}"
            axes.annotate(text, (each[fast], each[DROP]), fontsize=8, parse_math=False)
        for bound, line in ((self.budget.get(fast), axes.axvline), (self.budget.get(DROP), axes.axhline)):
            if bound is not None:
                line(bound, color="#b5b8bc", linestyle="--")
        axes.set_xlabel(fast)
        axes.set_ylabel(f"Loss of {self.score}" + (" (1 is 100 points)" if is_share(self.score) else ""))
        axes.spines[["top", "right"]].set_visible(False)
        content = io.BytesIO()
        figure.savefig(content, format=path.suffix[1:], dpi=150, metadata={names[path.suffix]: WRITER})
        write_own(path, content.getvalue(), _is_plot)
        return path

    def _sheet(self) -> Sheet:
        names = list(self.baseline)
        named = [(each.name, f"{each.multiply_adds:.1%}", each.figures) for each in self.front]
        rows = [
            (name, share, *(show_figure(key, figures[key]) for key in names if key in figures))
            for name, share, figures in [("float32, as given", "100.0%", self.baseline), *named]
        ]
        words = [("budget", ", ".join(f"{key} {show_figure(key, value)}" for key, value in self.budget.items()))]
        best, missed = self.best, self.missed
        if best is not None and self.budget:
            words.append(("best", best.artifact))
        for name, value in missed.items():
            words.append((PROBLEM, f"{name} is {show_figure(name, value)} above the budget at the least"))
        for name in self.budget:
            if self.front and not any(name in each.figures for each in self.front):
                words.append((PROBLEM, f"{name} could not be measured"))
        failed = [f"trial {each.number}: {each.reason}" for each in self.trials if each.state == "failed"]
        measured = sum(each.state == "measured" for each in self.trials)
        title = f"compression of {self.directory}: {measured} of {len(self.trials)} proposals trained and measured"
        heads = ("", "multiply-adds", *names)
        table = Table(head=heads, rows=rows, figures=range(1, len(heads)), folded="")
        given_up = sum(each.state == "given up" for each in self.trials)
        still_open = [each for each in self.trials if each.state == "open"]
        if still_open:
            cut = [f"trial {each.number}: {each.reason}" for each in still_open if each.reason]
            words.append(("open", "; ".join([f"{len(still_open)} proposals", *cut])))
        left_out = sum(each.state == "left out" for each in self.trials)
        if left_out:
            words.append(("left out", f"{left_out}, which what was measured makes needless"))
        if self.ended:
            words.append(("ended", self.ended))
        if given_up:
            words.append(("given up", f"{given_up}, which learned less than smaller models"))
        shown = [*(words if self.budget else words[1:]), *(("failed", each) for each in failed)]
        return Sheet(title=title, tables=[table, Table(rows=shown)])


def _is_plot(content: bytes) -> bool:
    return WRITER.encode() in content
