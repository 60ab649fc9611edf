"""`tfopt doctor`: where the time of a training step goes, and what to change."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tfopt.atomic.own_files import check_replaceable
from tfopt.cli.exit_codes import SUCCESS, WRONG_USE
from tfopt.cli.own_code import look_beside, read_recipe
from tfopt.cli.parsing import parse_words, start_tensorflow
from tfopt.cli.printing import say
from tfopt.cli.programs.outputs import writable_directory
from tfopt.cli.programs.scripts import split_at_script
from tfopt.errors import ConfigError, TrainingError
from tfopt.terminal import working

if TYPE_CHECKING:
    from tfopt.report import DiagnosisReport

HELP = """\
usage: tfopt doctor [OPTIONS] SCRIPT.py [ARGS...] | NAME | FILE.toml

  SCRIPT.py    a script that trains a Keras model with fit; it runs as it is, with its words ARGS. Or -m MODULE
  NAME         a recipe, or a recipe file
  --steps N    number of training steps to watch, 100 by default, at least 4; more where epochs are short
  --stop       end the script after these steps
  --apply      for recipes: change the settings, measure again, and print both
  --trace DIR  record a trace of TensorFlow's profiler of ten steps, for XProf or Perfetto, and list its operators
  --out DIR    write diagnosis.json and report.html
  --json       print the report as JSON, after the output of the script

The script's result and exit code are those that it has without this. Its model is measured when it has ended.
"""


SWITCHES = ("--stop", "--apply", "--json")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Says where the time of a training step goes, and what to change."""

    steps: int = 100
    """Number of training steps to watch."""
    stop: bool = False
    """End the script after these steps."""
    apply: bool = False
    """For recipes: change the settings, measure again, and print both."""
    trace: str | None = None
    """Directory for a trace of TensorFlow's profiler of ten steps."""
    out: str | None = None
    """Directory for diagnosis.json and report.html."""
    json: bool = False
    """Print the report as JSON."""


def doctor_command(words: list[str]) -> int:
    """Runs `tfopt doctor`. The words after the script are the script's."""
    if not words or words[0] in ("-h", "--help"):
        say(HELP, end="")
        return SUCCESS if words else WRONG_USE
    own, asked = split_at_script(words, SWITCHES)
    options = parse_words(DoctorOptions, own, "tfopt doctor")  # first: a wrong option may have taken the script's place
    if not asked:
        raise ConfigError(f"A script or a recipe must be named. Received: {' '.join(words)}. Write tfopt doctor NAME.")
    if options.steps < 4:
        raise ConfigError(f"steps must be at least 4. Received: steps={options.steps}. Leave it out for 100.")
    for flag, directory in (("--out", options.out), ("--trace", options.trace)):
        if directory is not None:
            options = replace(options, **{flag.removeprefix("--"): str(writable_directory(flag, directory))})
    _check_outputs(options)
    target, *rest = asked
    if target == "-m" or target.endswith(".py"):
        if options.apply:
            raise ConfigError(
                "--apply is for recipes. Received: a script. Use tfopt accelerate to change its settings."
            )
        return _script(target, rest, options)
    if Path(target).is_dir():
        raise ConfigError(f"A script or a recipe must be named. Received: {target}, a directory. Name a file in it.")
    if rest:
        raise ConfigError(f"A recipe takes no further words. Received: {' '.join(rest)}. Put the options before it.")
    return _recipe(target, options)


def _check_outputs(options: DoctorOptions) -> None:
    """Raises ConfigError if a file that tfopt did not write would be replaced at the end."""
    if options.out is not None:
        from tfopt.report import DiagnosisReport
        from tfopt.reporting.saved_report import is_page

        check_replaceable(Path(options.out, "diagnosis.json"), DiagnosisReport.is_own)
        check_replaceable(Path(options.out, "report.html"), is_page)
    if options.trace is not None:
        from tfopt.profiling.trace.chrome_trace import CHROME_TRACE, is_chrome_trace

        check_replaceable(Path(options.trace, CHROME_TRACE), is_chrome_trace)


def _script(path: str, arguments: list[str], options: DoctorOptions) -> int:
    from tfopt.scripts.doctor import diagnose_script

    code, found = diagnose_script(path, arguments, steps=options.steps, stops=options.stop, trace_dir=options.trace)
    if isinstance(found, TrainingError):
        say(f"tfopt: {found}", error=True)
        if options.json:
            say(json.dumps({"error": {"type": "TrainingError", "message": str(found)}}))
        return code
    if options.json:
        say(found.to_json())
    else:
        say(f"tfopt: {found}", error=True)  # standard output is the script's
    _write(found, options)
    return code


def _recipe(name: str, options: DoctorOptions) -> int:
    recipe = read_recipe(name)
    start_tensorflow()
    look_beside()
    from tfopt.runner.diagnosis import apply_advice, diagnose_recipe

    with working(f"training {recipe.name} for {options.steps} steps, and measuring them"):
        found = diagnose_recipe(recipe, steps=options.steps, trace_dir=options.trace)
    if not options.apply:
        _show(found, options)
        return SUCCESS
    changed, settings = apply_advice(recipe, found)
    if not settings:
        _show(found, options)
        say("nothing to apply: no diagnosis has a setting that leaves the training as it is", error=True)
        return SUCCESS
    with working(f"training {recipe.name} with the changed settings, and measuring it"):
        after = diagnose_recipe(changed, steps=options.steps)
    if options.json:
        both = {"before": found.to_dict(), "applied": settings, "after": after.to_dict()}
        say(json.dumps(both, indent=2))
    else:
        say(found)
        say(f"\napplied: {', '.join(f'--{key} {value}' for key, value in settings.items())}\n")
        say(after.breakdown)
        say(f"\n{found.breakdown.step_ms:.3g} ms per step before, {after.breakdown.step_ms:.3g} ms after")
    _write(found, options, after)
    return SUCCESS


def _show(found: DiagnosisReport, options: DoctorOptions) -> None:
    say(found.to_json() if options.json else found)
    _write(found, options)


def _write(found: DiagnosisReport, options: DoctorOptions, after: DiagnosisReport | None = None) -> None:
    if options.out is None:
        return
    from tfopt.reporting.html_page import write_diagnosis_html
    from tfopt.reporting.saved_report import save_report

    out = Path(options.out)
    save_report(after or found, out)
    write_diagnosis_html(found, out / "report.html", after=after)
