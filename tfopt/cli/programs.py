"""The commands that run other programs: launch, accelerate, doctor and monitor.

Their own flags end where the script or the program begins. They check first that their outputs can be written.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge

from tfopt.atomic.own_files import Form, check_replaceable, json_with, write_own
from tfopt.cli.exit_codes import NOT_FINISHED, SUCCESS, WRONG_USE, report_error
from tfopt.cli.preparation import look_beside, read_recipe, start_tensorflow
from tfopt.cli.printing import say
from tfopt.errors import ConfigError, TfoptError, TrainingError
from tfopt.settings.flags import parse
from tfopt.settings.validation import check_fields
from tfopt.terminal import working

if TYPE_CHECKING:
    from tfopt.report import DiagnosisReport

HELP_FLAGS = {"-h", "--help"}
IS_REPORT = json_with("name", "changed", "skipped", "metrics", "steps")  # a PassReport
DOCTOR_HELP = """\
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
MONITOR_HELP = """\
usage: tfopt monitor [--interval S] [--out FILE.json] [--json] -- COMMAND [ARGS...]

  COMMAND        any program; its exit code is the exit code
  --interval S   seconds between samples, 0.5 by default
  --out FILE     write all samples as JSON
  --json         print all samples as JSON on standard output, after the output of the program

Without --json, the mean and the maximum of each figure are printed on standard error when the program has ended.
"""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Runs SCRIPT [ARGS...], a Python file or -m MODULE, in several workers that train together.

    Write the script after the options. The exit code is the one of the worker that failed first, 143 after SIGTERM, 130
    after Ctrl-C.
    """

    workers: int
    """Number of worker processes."""
    devices_per_worker: int | None = None
    """Number of GPUs for each worker, by default an equal share. Without GPUs, the number of logical CPU devices, by
    default one."""


@dataclass(frozen=True, kw_only=True)
class AccelerateOptions:
    """Runs SCRIPT [ARGS...], a Python file or -m MODULE, with tfopt's training step in each fit that can have it.

    The script is not changed and need not know tfopt. Write it after the options. Its output and its exit code stay. A
    report on standard error says what was applied to which line, and what could not be.
    """

    precision: Literal["auto", "float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    """Dtype policy of the script's models. float32 changes nothing. The others change the weights beyond rounding."""
    xla: bool = True
    """Whether XLA may compile the step where Keras chose it."""
    steps_per_execution: Literal["auto"] | Annotated[int, Ge(1)] = "auto"
    """Steps of a call into TensorFlow, in fits where nothing looks at each step. auto means 10."""
    report: str | None = None
    """File to which the report is written as JSON."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options of `tfopt doctor`; see DOCTOR_HELP."""

    steps: int = 100
    stop: bool = False
    apply: bool = False
    trace: str | None = None
    out: str | None = None
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """The options of `tfopt monitor`; see MONITOR_HELP."""

    interval: float = 0.5
    out: str | None = None
    json: bool = False


def launch_command(words: list[str]) -> int:
    own, script = split_at_script(words, LaunchOptions)
    options = parse(LaunchOptions, own, "tfopt launch")
    start_tensorflow()
    from tfopt.training.distributed.launch import launch

    return launch(script, options.workers, options.devices_per_worker)


def accelerate_command(words: list[str]) -> int:
    # TensorFlow is not started: the script may set environment variables before it imports it.
    own, script = split_at_script(words, AccelerateOptions)
    options = parse(AccelerateOptions, own, "tfopt accelerate")
    if not script:
        raise ConfigError(
            "The script must follow the options. Received: none. Write tfopt accelerate SCRIPT [ARGS...]."
        )
    out = None if options.report is None else writable_file("--report", options.report, IS_REPORT)
    from tfopt.scripts.accelerate import accelerate

    done = accelerate(
        script[0],
        script[1:],
        precision=options.precision,
        xla=options.xla,
        steps_per_execution=options.steps_per_execution,
    )
    say(f"tfopt: {done.report}", error=True)
    if out is not None:
        write_own(out, done.report.to_json() + "\n", IS_REPORT)
    return done.exit_code


def split_at_script(words: list[str], options: type) -> tuple[list[str], list[str]]:
    """Returns the words before a script, and the script with its own words.

    A flag of the script may have the name of a flag of ours, so our flags end where the script begins. Of our options,
    those that are True or False have no value.

    Example:
        >>> split_at_script(["--workers", "2", "train.py", "--workers", "8"], LaunchOptions)
        (['--workers', '2'], ['train.py', '--workers', '8'])
    """
    names = [each.name for each in fields(options) if isinstance(each.default, bool)]
    names += [each.replace("_", "-") for each in names]
    switches = {*HELP_FLAGS, *(f"--{no}{name}" for no in ("", "no-", "no_") for name in names)}
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] != "-m":
        place += 1 if "=" in words[place] or words[place] in switches else 2
    return words[:place], words[place:]


def doctor_command(words: list[str]) -> int:
    own, asked = split_at_script(words, DoctorOptions)
    if not words or HELP_FLAGS & set(own):
        say(DOCTOR_HELP, end="")
        return SUCCESS if words else WRONG_USE
    options = parse(DoctorOptions, own, "tfopt doctor")  # first: a wrong option may have taken the script's place
    if not asked:
        raise ConfigError(f"A script or a recipe must be named. Received: {' '.join(words)}. Write tfopt doctor NAME.")
    if options.steps < 4:
        raise ConfigError(f"steps must be at least 4. Received: steps={options.steps}. Leave it out for 100.")
    if options.out is not None:
        options = replace(options, out=str(writable_directory("--out", options.out)))
    if options.trace is not None:
        options = replace(options, trace=str(writable_directory("--trace", options.trace)))
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
        from tfopt.profiling.trace.events import CHROME_TRACE, is_chrome_trace

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


def monitor_any_command(words: list[str]) -> int:
    place = words.index("--") if "--" in words else len(words)
    own, program = words[:place], words[place + 1 :]
    if not words or HELP_FLAGS & set(own):
        say(MONITOR_HELP, end="")
        return SUCCESS if words else WRONG_USE
    if not program:
        raise ConfigError(
            f"A program must follow after --. Received: {' '.join(words)}. Write tfopt monitor -- python train.py."
        )
    options = parse(MonitorOptions, own, "tfopt monitor")
    if not options.interval > 0:
        raise ConfigError(
            f"--interval must be a number of seconds above 0. Received: {options.interval}. Use 0.5, the default."
        )
    from tfopt.profiling.monitoring.command import monitor_command
    from tfopt.report import Utilization

    out = None if options.out is None else writable_file("--out", options.out, Utilization.is_own)
    code, load = monitor_command(program, options.interval)
    if options.json:
        say(load.to_json())
    else:
        say(load, error=True)
    if out is not None:
        try:
            write_own(out, load.to_json(), Utilization.is_own)
        except TfoptError as error:  # the program has run; its exit code says more
            report_error(error, as_json=False, show_traceback=False)
            return code or NOT_FINISHED
    return code


def writable_file(flag: str, out: str, is_own: Form) -> Path:
    """Returns the path of a file. Raises ConfigError if it cannot be written, or if tfopt did not write it.

    Example:
        >>> writable_file("--out", "/proc/no/load.json", lambda content: True)
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: --out must be a file that can be written. Received: --out /proc/no/load.json ...
    """
    path = Path(out).absolute()  # the program may change the working directory
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a directory")
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise _refused(flag, out, "a file", error) from error
    check_replaceable(path, is_own)
    return path


def writable_directory(flag: str, out: str) -> Path:
    """Returns the path of a directory, which is made if it is missing. Raises ConfigError if it cannot be written.

    Example:
        >>> writable_directory("--out", "/proc/no")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: --out must be a directory that can be written. Received: --out /proc/no ...
    """
    path = Path(out).absolute()  # the script may change the working directory
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise _refused(flag, out, "a directory", error) from error
    return path


def _refused(flag: str, out: str, what: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{flag} must be {what} that can be written. Received: {flag} {out} ({error.strerror or error}). The program "
        "has not run. Choose another place."
    )
