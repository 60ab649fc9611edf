"""The result of `tfopt.tune`: the settings that are faster, what each of them contributes, and the trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tomli_w

from tfopt.report import Record
from tfopt.report.formatting import grouped
from tfopt.report.record import record_of
from tfopt.report.sheet import Sheet, Shown, Table
from tfopt.timing import Estimate, shown_ratio


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """What was seen of settings that were trained in turns with others.

    Attributes:
        state: "measured", "slower" (found out early), "loss" (their loss is higher), "failed", or "cut" (the
            time of the search has ended it).
        speedup: Their speed as a share of that of the others, with its interval; None if it was not timed.
        losses: The losses of the others and their own, in the two epochs that are compared.
        peak_bytes: The largest memory that their process took; None if it failed.
        seconds: How long it ran.
        reason: Why there is no speed; empty if there is one.
    """

    state: str
    speedup: Estimate | None = None
    losses: tuple[tuple[float, ...], ...] = ()
    peak_bytes: int | None = None
    seconds: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class TuneTrial(Comparison):
    """One trial: settings that were trained in turns with those of the start.

    Attributes:
        number: Its number in the study.
        changes: The settings in which it differs from the start.
    """

    number: int
    changes: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Contribution(Record):
    """What one setting contributes: the speed with it over that without it, all others being as in the result.

    Attributes:
        setting: The setting.
        value: Its value in the trial.
        start: Its value at the start.
        speedup: The ratio with its interval; None if it was not measured.
        kept: Whether the result has it.
        reason: Why it was not measured.
    """

    setting: str
    value: Any
    start: Any
    speedup: Estimate | None
    kept: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class TuneReport(Record, Shown):
    """The speed settings of a training, with the measurements that chose them.

    Attributes:
        name: The recipe, the model or the script.
        kind: "recipe", "model" or "script".
        examples_per_s: The speed at the start.
        changes: The settings in which the result differs from the start; empty if nothing is faster.
        settings: The same as the nested tables of a recipe, with the learning rate that another batch needs; for a
            script, without tables.
        speedup: The speed of the result as a share of the start's, measured once more at the end; None if there are no
            changes.
        contributions: What each setting contributes.
        trials: The trials, in their order.
        left_out: The settings that were not searched, with the reasons.
        ended_by: Why the search ended.
        seconds: How long it took.
        command: The command that runs a script with the settings; empty for others.
        lines: What to change in a script instead, so that it trains with them itself.
        unconfirmed: What the last comparison saw of the best settings, if it did not confirm them.
        kept: The file that keeps the settings for later runs of a recipe on this machine; empty if none does.
    """

    name: str
    kind: str
    examples_per_s: float
    changes: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    speedup: Estimate | None = None
    contributions: tuple[Contribution, ...] = ()
    trials: tuple[TuneTrial, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    ended_by: str
    seconds: float
    command: str = ""
    lines: tuple[str, ...] = ()
    unconfirmed: str = ""
    kept: str = ""

    def to_toml(self) -> str:
        """Returns the settings as TOML that can be laid over a recipe: `tfopt run NAME FILE.toml`."""
        return tomli_w.dumps(dict(self.settings))

    @classmethod
    def from_json(cls, text: str | bytes) -> TuneReport:
        """Reads what `to_json` wrote.

        Raises:
            ConfigError: The text is no report.
        """
        return record_of(cls, text)

    def _sheet(self) -> Sheet:
        result = "no faster setting was found, so the start stays"
        if not self.trials and self.ended_by.startswith("minutes"):
            result = "there was no time to try anything: raise minutes"
        elif self.unconfirmed:
            result = f"the start stays: the best settings were not confirmed ({self.unconfirmed})"
        if self.speedup is not None:
            result = f"{shown_ratio(self.speedup)} of the start"
        rows = [
            ("start", f"{grouped(self.examples_per_s)} examples/s"),
            ("result", result),
            ("trials", f"{len(self.trials)} in {self.seconds:.0f} s; {self.ended_by}"),
        ]
        if self.kind == "model" and self.changes:
            words = ", ".join(f"{name}={value!r}" for name, value in self.settings.get("training", {}).items())
            rows.append(("apply", f"tfopt.compile(model, tfopt.plan(TrainingConfig({words})), ...)"))
        if self.command:
            rows.append(("command", self.command))
        rows += [("or change", line) for line in self.lines]
        if self.kept:
            rows.append(("kept", f"{self.kept}, which later runs of this recipe here use"))
        reasons = dict.fromkeys(self.left_out.values())
        left = [(", ".join(name for name, of in self.left_out.items() if of == each), each) for each in reasons]
        return Sheet(
            title=f"speed settings of {self.name}",
            tables=[
                Table(rows=rows),
                self._contributions(),
                self._trials(),
                Table(head=("left out", "") if left else (), rows=left, folded=""),
            ],
        )

    def _contributions(self) -> Table:
        rows = [
            (
                each.setting,
                str(each.value),
                str(each.start),
                f"unavailable ({each.reason})" if each.speedup is None else shown_ratio(each.speedup),
                "" if each.kept else "dropped",
            )
            for each in self.contributions
        ]
        return Table(head=("setting", "value", "start", "contributes", "") if rows else (), rows=rows, folded="")

    def _trials(self) -> Table:
        rows = [
            (
                " ".join(f"{name}={value}" for name, value in each.changes.items()),
                "" if each.speedup is None else shown_ratio(each.speedup),
                each.state if not each.reason else f"{each.state}: {each.reason}",
            )
            for each in self.trials
        ]
        return Table(head=("trial", "of the start", "") if rows else (), rows=rows, folded="")
