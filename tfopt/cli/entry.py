"""The entry of the command `tfopt`: it chooses the subcommand, and turns every error into one line and an exit code.

TensorFlow takes seconds to import, so a command imports it only after its words are checked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version

from tfopt.cli.artifacts import export_command, inspect_command, publish_command, report_command, verify_command
from tfopt.cli.bench import bench_command
from tfopt.cli.commands import init_command, run_command
from tfopt.cli.compress import compress_command
from tfopt.cli.data import data_command
from tfopt.cli.devices import devices_command
from tfopt.cli.exit_codes import BROKEN_PIPE, SUCCESS, WRONG_USE, Terminated, report_error
from tfopt.cli.lists import models_command, recipes_command
from tfopt.cli.preparation import FLAG, IMPORT, code_of_files_allowed, import_modules
from tfopt.cli.printing import OutputError, say
from tfopt.cli.programs import (
    DoctorOptions,
    accelerate_command,
    doctor_command,
    launch_command,
    monitor_any_command,
    split_at_script,
)
from tfopt.cli.tune import TuneOptions, tune_command
from tfopt.errors import unknown_name
from tfopt.signals import CTRL_C, raised_safely

HELP = """\
usage: tfopt COMMAND [OPTIONS]

  run NAME|FILE.toml   run a recipe: train, prune, quantize, export, verify, report
  recipes [NAME]       list the recipes, or show one; recipes diff A B lists the settings in which two differ
  init DIR             write a script and a TOML file to start a project of your own
  models [NAME]        list the model builders and published models, or build one and count its cost
  devices              show this machine's processor, memory and GPUs; --advise and --audit tell of others
  compress MODEL OUT   search for smaller and faster artifacts of a model within a budget
  export IN OUT        write a model (.keras or SavedModel) as a SavedModel: float32, int8, ...
  verify DIR           measure an exported artifact in a fresh process
  bench DIR|FILE...    measure artifacts and models of other programs side by side, and name the fastest
  inspect DIR|FILE     show the operators, types, weights and multiply-adds of a model, without running it
  publish DIR REPO     copy an artifact into a model repository for servers, as a new version
  report DIR...        write the HTML page of a saved report again, or a page that compares several runs
  launch SCRIPT        run a script in several workers that train together
  accelerate SCRIPT    run an unmodified script with tfopt's training step in each fit that can have it
  doctor SCRIPT|NAME   say where the time of a training step goes, and what to change
  tune SCRIPT|NAME|DIR find settings by measurement: of a training, or for servers of models
  monitor -- COMMAND   sample the GPUs, or the processor, while any program runs
  data COMMAND         list, measure, convert or serve examples

tfopt COMMAND --help shows the options of a command. --version prints the version. All commands but launch and
accelerate take these options; doctor, tune and monitor take them before the script or program.
  --json        print JSON, also for errors
  --traceback   with an error, show where in the program it occurred
  --allow-code  import the builder, source or task that a recipe file names as package.module:name. Python looks for the
                package in the directory of the file and in the working directory
  --import NAME import a module of yours first, such as one that registers the layers of a .keras file

Exit codes: 0 success, 1 the check failed, 2 wrong use, 3 the command could not finish (the disk is full, the loss is
not finite, a script ended before its fit), 70 unexpected error: a bug in tfopt, 130 interrupted, 143 ended by SIGTERM.
launch returns the exit code of the worker that failed first, accelerate and doctor that of the script, monitor that of
the program.
"""
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": run_command,
    "recipes": recipes_command,
    "init": init_command,
    "models": models_command,
    "devices": devices_command,
    "compress": compress_command,
    "export": export_command,
    "verify": verify_command,
    "bench": bench_command,
    "inspect": inspect_command,
    "publish": publish_command,
    "report": report_command,
    "launch": launch_command,
    "doctor": doctor_command,
    "tune": tune_command,
    "monitor": monitor_any_command,
    "accelerate": accelerate_command,
    "data": data_command,
}
RAISES: Mapping[signal.Signals, type[BaseException]] = {signal.SIGTERM: Terminated, **CTRL_C}
OF_SCRIPTS = ("launch", "accelerate")  # the words after these belong to a script


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    Example:
        >>> main(["recipes", "diff", "digits_cnn", "digits_cnn"])
        digits_cnn and digits_cnn have the same settings
        0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    try:
        try:
            return _run(words)
        finally:
            if not sys.stdout.closed:  # by a script
                sys.stdout.flush()  # a broken pipe or a full disk shows here, and not when the interpreter ends
    except BrokenPipeError:
        # `tfopt ... | head` has read enough. The exit code is the one of a program that SIGPIPE ends.
        return BROKEN_PIPE
    except (OSError, OutputError) as error:
        lost = OutputError(getattr(error, "strerror", error))
        return report_error(lost, as_json=False, show_traceback=False)
    finally:
        _discard_output()


def _open_closed_streams() -> None:
    """Opens the null device for each standard stream that the caller has closed, as `tfopt ... >&-` does.

    Otherwise the next file that is opened would be taken for that stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.fstat(number)
                continue  # the stream of a program without a console; its number belongs to another file
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def _discard_output() -> None:
    """Sends nowhere what could not be printed, so that the end of the interpreter does not fail on it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def _run(words: list[str]) -> int:
    words, modules = _without_imports(words)
    own, of_script = list(_own(words)), words[len(_own(words)) :]
    show_traceback, allow_code = "--traceback" in own, FLAG in own
    own = [word for word in own if word not in ("--traceback", FLAG)]
    words = own + of_script
    if not words or words[0] in ("-h", "--help"):
        say(HELP, end="")
        return SUCCESS if words else WRONG_USE
    if words[0] == "--version":
        say(f"tfopt {version('tfopt')}")
        return SUCCESS
    try:
        if words[0] not in COMMANDS:
            raise unknown_name("command", words[0], COMMANDS)
        # A script in this process has the signals as they are, and its warnings as Python shows them.
        runs_script = words[0] in ("accelerate", "doctor")
        warns = contextlib.nullcontext() if runs_script else _one_line_warnings()
        with warns, code_of_files_allowed(allow_code), raised_safely({} if runs_script else RAISES) as received:
            import_modules(modules)
            code = COMMANDS[words[0]](words[1:])
            if received:  # a library has lost it
                raise received[-1]
            return code
    except (BrokenPipeError, OutputError):
        raise
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every error becomes one line and an exit code
        return report_error(error, as_json="--json" in _own(words), show_traceback=show_traceback)


def _without_imports(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words without `--import NAME`, and the names. A script or a program keeps its own."""
    left, modules = list(words), list[str]()
    while IMPORT in left[:-1]:
        place = left.index(IMPORT)
        rest = left[:place] + left[place + 2 :]
        if place > len(_own(rest)):
            break
        modules.append(left[place + 1])
        left = rest
    return left, modules


def _own(words: Sequence[str]) -> Sequence[str]:
    """Returns the words that are tfopt's own, and not those of a script or a program."""
    command = next((word for word in words if not word.startswith("-")), None)
    if command in OF_SCRIPTS:
        return words[: words.index(command)]
    if command == "monitor" and "--" in words:
        return words[: words.index("--")]
    if command in ("doctor", "tune"):
        begin = words.index(command) + 1
        own, _ = split_at_script(list(words[begin:]), DoctorOptions if command == "doctor" else TuneOptions)
        return words[: begin + len(own)]
    return words


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Prints each warning as one line, without the file and the source line that Python adds."""

    def show(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
        say(f"tfopt: warning: {' '.join(str(message).split())}", error=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
