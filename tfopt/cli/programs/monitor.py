"""`tfopt monitor`: samples the machine while any program runs."""

from __future__ import annotations

from dataclasses import dataclass

from tfopt.cli.exit_codes import NOT_FINISHED, SUCCESS, WRONG_USE, report_error
from tfopt.cli.parsing import parse_words
from tfopt.cli.printing import say
from tfopt.cli.programs.outputs import writable_file
from tfopt.errors import ConfigError, TfoptError

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
        say(HELP, end="")
        return SUCCESS if words else WRONG_USE
    if "--" not in words or words[-1] == "--":
        raise ConfigError(
            f"A program must follow after --. Received: {' '.join(words)}. Write tfopt monitor -- python train.py."
        )
    place = words.index("--")
    options = parse_words(MonitorOptions, words[:place], "tfopt monitor")
    if not options.interval > 0:
        raise ConfigError(
            f"--interval must be a number of seconds above 0. Received: {options.interval}. Use 0.5, the default."
        )
    from tfopt.profiling.monitoring.command import monitor_command
    from tfopt.report import Utilization

    out = None if options.out is None else writable_file("--out", options.out, Utilization.is_own)

    code, load = monitor_command(words[place + 1 :], options.interval)
    if options.json:
        say(load.to_json())
    else:
        say(load, error=True)
    if out is not None:
        from tfopt.atomic.own_files import write_own

        try:
            write_own(out, load.to_json(), Utilization.is_own)
        except TfoptError as error:  # the program has run; its exit code says more
            report_error(error, as_json=False, show_traceback=False)
            return code or NOT_FINISHED
    return code
