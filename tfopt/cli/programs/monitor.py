"""`tfopt monitor`: samples the machine while any program runs."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from tfopt.cli.exit_codes import SUCCESS, WRONG_USE
from tfopt.cli.parsing import parse_words
from tfopt.errors import ConfigError
from tfopt.report import Utilization

HELP = """\
usage: tfopt monitor [--interval S] [--out FILE.json] [--json] -- COMMAND [ARGS...]

  COMMAND        any program; its exit code is the exit code
  --interval S   seconds between samples, 0.5 by default
  --out FILE     write all samples as JSON
  --json         print all samples as JSON on standard output, after the output of the program

Without --json, the mean and the maximum of each figure are printed on standard error when the program has ended.
"""


@dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """Samples the GPUs, or the processor load, while a program runs."""

    interval: float = 0.5
    """Seconds between samples."""
    out: str | None = None
    """File for all samples as JSON."""
    json: bool = False
    """Print all samples as JSON."""


def monitor_any_command(words: list[str]) -> int:
    """Runs `tfopt monitor`. The words after -- are the program's."""
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")  # noqa: T201
        return SUCCESS if words else WRONG_USE
    if "--" not in words or words[-1] == "--":
        raise ConfigError(
            f"A program must follow after --. Received: {' '.join(words)}. Write tfopt monitor -- python train.py."
        )
    place = words.index("--")
    options = parse_words(MonitorOptions, words[:place], "tfopt monitor")
    from tfopt.profiling.monitoring.command import monitor_command

    code, timeline = monitor_command(words[place + 1 :], options.interval)
    if options.out is not None:
        from tfopt.atomic.files import write_text

        write_text(Path(options.out), timeline.to_json())
    if options.json:
        print(timeline.to_json())  # noqa: T201
    else:
        print(_summary(timeline), file=sys.stderr)  # noqa: T201
    return code


def _summary(timeline: Utilization) -> str:
    lines = [f"{timeline.source}: {len(timeline.seconds)} samples"]
    for name, values in timeline.series.items():
        known = [value for value in values if value is not None]
        if known:
            lines.append(f"  {name:32} mean {statistics.fmean(known):,.1f}, max {max(known):,.1f}")
        else:
            lines.append(f"  {name:32} unavailable (no value could be read)")
    return "\n".join(lines)
