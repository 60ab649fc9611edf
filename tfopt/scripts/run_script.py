"""Runs a user's script in this process, as Python would run it, with a hook on Keras."""

from __future__ import annotations

import builtins
import contextlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from tfopt.errors import ConfigError
from tfopt.scripts.hook import FitHook, hooked

OWN = Path(__file__).parent
FAILED, INTERRUPTED = 1, 130


def run_script(
    path: str,
    arguments: Sequence[str],
    hook: FitHook | None = None,
    *,
    when_imported: Callable[[ModuleType], None] | None = None,
    on_error: Callable[[BaseException], None] = lambda error: None,
) -> int:
    """Runs `python PATH ARGUMENTS` in this process, with a hook on `keras.Model.compile` and `keras.Model.fit`.

    The script sees itself as `__main__`, its own `sys.argv` and its directory in `sys.path`. The working directory
    stays. Afterwards, all of these and the two methods are as before, however the script ended.

    The path is a Python file; or "-m", with the name of a module as the first of the arguments. Without a hook, compile
    and fit are left to Keras. `when_imported` is called with Keras once it is imported, before the script uses it, and
    `on_error` with the error or the `sys.exit(text)` that ends the script.

    Returns: The exit code that Python would return: 1 after an error, whose traceback is printed on standard error.
    Raises:
        ConfigError: There is no such file or module.
    Example:
        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     script = pathlib.Path(directory, "hello.py")
        ...     _ = script.write_text("import sys; print(__name__, sys.argv[1]); sys.exit(3)")
        ...     run_script(str(script), ["world"])
        __main__ world
        3
    """
    is_module = path == "-m"
    if is_module and not arguments:
        raise ConfigError("The name of a module must follow -m. Received: -m alone. Write -m MODULE.")
    if not is_module and not Path(path).is_file():
        lacks = "is no file" if Path(path).exists() else "does not exist"
        raise ConfigError(f"The script must be a Python file. Received: {path}, which {lacks}.")
    words = list(arguments) if is_module else [path, *arguments]
    begin = "" if is_module else str(Path(path).resolve().parent)
    with _as_python_would(words, begin), contextlib.nullcontext() if hook is None else hooked(hook, when_imported):
        try:
            if is_module:
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            else:
                _run_file(path)
        except SystemExit as asked:
            if asked.code is None or isinstance(asked.code, int):
                return asked.code or 0
            on_error(asked)
            print(asked.code, file=sys.stderr)  # noqa: T201 - as Python does
            return FAILED
        except BaseException as error:  # noqa: BLE001 - the script may raise anything; Python would print it too
            on_error(error)
            _hide_own_frames(error)
            sys.excepthook(type(error), error, error.__traceback__)
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
        finally:
            for stream in (sys.stdout, sys.stderr):
                if not getattr(stream, "closed", False):  # the script may close them
                    stream.flush()
    return 0


def _run_file(path: str) -> None:
    """Runs a file as `__main__`. Its `__file__` is absolute, its `sys.argv[0]` as given; runpy makes them alike."""
    file = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - Python leaves "./" in it
    module, before = ModuleType("__main__"), sys.modules["__main__"]
    module.__file__, module.__loader__ = file, SourceFileLoader("__main__", file)
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module
    try:
        exec(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True), vars(module))
    finally:
        sys.modules["__main__"] = before


@contextlib.contextmanager
def _as_python_would(words: list[str], begin: str) -> Iterator[None]:
    """Sets `sys.argv`, and `sys.path` with the script's directory first."""
    argv, path, hook = sys.argv, sys.path, sys.excepthook
    sys.argv = words
    # The first entry is that of the running command, in whose place Python puts the directory of a script.
    sys.path = [*path] if sys.flags.safe_path else [begin, *path[1:]]
    try:
        yield
    finally:
        sys.argv, sys.path, sys.excepthook = argv, path, hook


def _hide_own_frames(error: BaseException) -> None:
    """Removes the frames of this package, of imports and of Python's runner, from an error and from its causes."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _of_others(each.__traceback__)
        waiting += [each.__cause__, each.__context__]


def _of_others(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    following = _of_others(trace.tb_next)
    file = trace.tb_frame.f_code.co_filename
    if file.startswith(("<frozen runpy", "<frozen importlib")) or file == runpy.__file__ or Path(file).parent == OWN:
        return following
    return TracebackType(following, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
