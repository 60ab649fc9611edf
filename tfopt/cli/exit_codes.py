"""The exit codes of the command `tfopt`, and the line that reports an error.

An error is one line on standard error. With `--json` it is also JSON on standard output.
"""

from __future__ import annotations

import errno
import sysconfig
import traceback
from pathlib import Path

from tfopt.cli.printing import OutputError, print_json, say
from tfopt.errors import ArtifactError, ConfigError, TfoptError, UnsupportedModelError

SUCCESS, CHECK_FAILED, WRONG_USE, NOT_FINISHED, UNEXPECTED = 0, 1, 2, 3, 70
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143  # 128 and the number of the signal
LONGEST_MESSAGE = 300
# Errors of the operating system that come from the machine (a full disk, no memory, no permission) and not from a bug
# in tfopt.
OF_THE_MACHINE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EACCES,
    errno.EPERM,
)
# Errors of a path that was given: it is too long, it leads in a circle, a part of it is a file, it is missing.
OF_A_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOENT, errno.ENOTEMPTY)
# What is raised where memory or the number of processes is limited: by Python and by libraries in C++ for a thread
# (RuntimeError), and by the loader of shared libraries (ImportError).
NO_THREAD, NO_SEGMENT = ("can't start new thread", "Resource temporarily unavailable"), "failed to map segment"
NO_PATH = ("embedded null byte", "Symlink loop")  # what pathlib says of other such paths


class Terminated(KeyboardInterrupt):
    """SIGTERM has come. It ends a command as Ctrl-C does: nothing temporary is left."""


class CheckError(Exception):
    """The check failed before a receipt could be made, for example on a damaged artifact."""

    def __init__(self, cause: TfoptError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def report_error(error: BaseException, *, as_json: bool, show_traceback: bool) -> int:
    """Prints an error and returns its exit code. Every error of every command ends here.

    Example:
        >>> import contextlib, io
        >>> with contextlib.redirect_stderr(io.StringIO()) as shown:
        ...     report_error(ConfigError("epochs must be positive."), as_json=False, show_traceback=False)
        2
        >>> shown.getvalue()
        'tfopt: epochs must be positive.\\n'
    """
    code = _exit_code(error)
    if isinstance(error, CheckError):
        error = error.cause
    if isinstance(error, OutputError):
        as_json = False  # that output is the problem
    place = None if isinstance(error, TfoptError) else _own_code(error)
    kind = type(error).__name__
    message = " ".join(str(error).split()) or kind
    if as_json:
        print_json({"error": {"type": kind, "message": message, "exit_code": code}})
    if show_traceback:
        traceback.print_exception(error)
    if code in (INTERRUPTED, TERMINATED):
        message = "interrupted" if code == INTERRUPTED else "ended by SIGTERM"
    elif isinstance(error, OutputError):
        message = f"the output could not be written, so the result is not known: {message}"
    elif code == WRONG_USE and _is_of_a_path(error):
        message = f"a path cannot be used: {_shortened(message)}. Check the paths that were given"
    elif place is not None and code == WRONG_USE:
        message = f"{place} raised {kind}: {message}{'' if show_traceback else ' (--traceback shows where)'}"
    elif code == UNEXPECTED:
        hint = "" if show_traceback else "; --traceback shows where it occurred"
        message = f"unexpected {kind}: {_shortened(message)} (this is a bug in tfopt{hint})"
    say(f"tfopt: {message}", error=True)
    return code


def is_of_the_machine(error: BaseException) -> bool:
    """Whether an error comes from the machine: it has no memory, no room on its disk, no permission.

    Example:
        >>> is_of_the_machine(OSError(errno.ENOSPC, "")), is_of_the_machine(RuntimeError("can't start new thread"))
        (True, True)
    """
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno in OF_THE_MACHINE)
        or (isinstance(error, RuntimeError) and str(error) in NO_THREAD)
        or (isinstance(error, ImportError) and NO_SEGMENT in str(error))
    )


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return TERMINATED if isinstance(error, Terminated) else INTERRUPTED
    if isinstance(error, CheckError):
        return CHECK_FAILED
    if isinstance(error, ConfigError | UnsupportedModelError | ArtifactError):
        return WRONG_USE  # the same command fails again, however often it is tried
    if is_of_the_machine(error) or isinstance(error, TfoptError | OutputError):
        return NOT_FINISHED
    return WRONG_USE if _is_of_a_path(error) or _own_code(error) is not None else UNEXPECTED


def _is_of_a_path(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in OF_A_PATH and _own_code(error) is None
    return isinstance(error, ValueError | RuntimeError) and str(error).startswith(NO_PATH)


def _shortened(message: str) -> str:
    return message if len(message) <= LONGEST_MESSAGE else f"{message[: LONGEST_MESSAGE - 1]}…"


def _own_code(error: BaseException) -> str | None:
    """Returns the place in the user's own code (a builder, a source, a task) where an error began, or None."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}, line {error.lineno},"
    others = Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        installed = {"site-packages", "dist-packages"}.intersection(file.parts) or any(map(file.is_relative_to, others))
        if file.is_file() and not installed and not file.name.startswith("__autograph_generated"):
            return f"{frame.filename}, line {frame.lineno},"
    return None
