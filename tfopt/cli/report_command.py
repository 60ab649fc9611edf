"""The command `tfopt report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tfopt.cli.exit_codes import SUCCESS
from tfopt.cli.parsing import parse_words
from tfopt.cli.printing import say
from tfopt.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Writes the HTML page of a saved report again, or one page that compares several runs.

    A directory must hold report.json of `tfopt run`, diagnosis.json or utilization.json.
    """

    directories: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="DIR")]
    """Directories of the reports. The first run is the one that the others are compared with."""
    out: str | None = None
    """The HTML file. By default DIR/report.html for one directory, and comparison.html for several."""
    json: bool = False
    """Print the report or the comparison as JSON, and write a page only with --out."""


def report_command(words: list[str]) -> int:
    options = parse_words(ReportOptions, words, "tfopt report")
    if not options.directories:
        raise ConfigError("tfopt report needs at least one directory. Received: none. Write tfopt report DIR.")
    from tfopt.reporting.comparison import compare, write_comparison_html
    from tfopt.reporting.html_page import write_html
    from tfopt.reporting.saved_report import load_report

    reports = {name: load_report(directory) for name, directory in _names(options.directories).items()}
    first = next(iter(reports.values()))
    out = None if options.out is None else Path(options.out)
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"out must lie in an existing directory. Received: out={options.out!r}. Make {out.parent}.")
    if options.json:
        say((first if len(reports) == 1 else compare(reports)).to_json())
        if out is None:
            return SUCCESS
    if len(reports) == 1:
        page = write_html(first, out or Path(options.directories[0]) / "report.html")
    else:
        page = write_comparison_html(reports, out or Path("comparison.html"))
    if not options.json:
        say(f"report: {page}")
    return SUCCESS


def _names(directories: tuple[str, ...]) -> dict[str, str]:
    """Returns a name for each directory: its last part, or the whole path where the last parts are the same.

    Raises:
        ConfigError: A directory is given twice.
    """
    last = [Path(directory).resolve().name for directory in directories]
    names = list(last) if len(set(last)) == len(last) else list(directories)
    if len(set(names)) < len(names):
        raise ConfigError(f"Each directory must be given once. Received: {' '.join(directories)}. Leave one out.")
    return dict(zip(names, directories, strict=True))
