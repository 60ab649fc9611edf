"""The commands in odd environments: closed, broken and full streams, terminals, no environment, other modes of Python.

A command does what it does elsewhere, or says in one line what is missing, with the exit code for that. Its interpreter
is a fork where Python reads the environment late, and a real process where it reads it at its start.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from campaign.fault import EQUAL_OR_WORD, Fault, Said, expected, in_fork, make_template
from campaign.limits import as_anybody, own_mounts, read_only
from tfopt.cli.exit_codes import BROKEN_PIPE, SUCCESS, UNEXPECTED, WRONG_USE

KIND = "environment"
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
NOBODY = 65534

TINY = """
name = "tiny"
export_dir = "artifacts"
[model]
builder = "mlp"
arguments = { units = [16] }
[data]
source = "synthetic"
arguments = { examples = 200, input_shape = [8], num_classes = 4 }
[training]
epochs = 1
precision = "float32"
"""


@dataclass(frozen=True, kw_only=True)
class _Command:
    """A command of users.

    Attributes:
        words: Its words.
        says: Whether it prints the same each time.
        wrote: The artifact that it writes, if it does.
        usual: Its exit code elsewhere.
        waits: Whether it starts processes of its own, so that it is tried in few environments.
    """

    words: tuple[str, ...]
    says: bool = True
    wrote: str = ""
    usual: int = SUCCESS
    waits: bool = False

    @property
    def name(self) -> str:
        return " ".join(["tfopt", *self.words])

    def result(self, place: Path, code: int, output: str) -> list[Any]:
        """Returns the exit code, what was written, and whether the output, if there is one, is the usual one."""
        from tfopt.exporting.manifest import read_intact_manifest

        found: list[Any] = [code]
        if self.wrote and code == 0:
            found.append(read_intact_manifest(place / self.wrote).precision)
        usual, said = place.with_name("said.txt"), " ".join(output.replace(str(place), "").split())
        if said and self.says:
            if not usual.is_file():
                usual.write_text(said)
            found.append(said == usual.read_text())
        else:
            found.append(True)
        return found


COMMANDS = (
    _Command(words=("--help",)),
    _Command(words=("recipes",)),
    _Command(words=("models",)),
    _Command(words=("devices",), says=False),
    _Command(words=("run", "tiny.toml", "--epochs", "many"), usual=WRONG_USE),
    _Command(words=("data", "list")),
    _Command(words=("inspect", "model")),
    _Command(words=("inspect", "nosuch", "--json"), usual=WRONG_USE),
    _Command(words=("export", "model.keras", "out"), wrote="out", says=False),
    _Command(words=("verify", "model"), says=False, waits=True),
    _Command(words=("bench", "model", "--seconds", "0.05"), says=False, waits=True),
    _Command(words=("run", "tiny.toml"), says=False, wrote="artifacts/float32", waits=True),
)


def _make(place: Path) -> None:
    import keras

    import tfopt

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,), name="x"), keras.layers.Dense(4, name="head")], name="tiny")
    model.save(place / "model.keras")
    tfopt.export(model, place / "model")
    (place / "tiny.toml").write_text(TINY)


def _judged(command: _Command, place: Path, code: int, output: str, errors: str, *, blind: bool = False) -> Any:
    """Returns what a command did, or raises what it said."""
    if "Traceback (most recent call last)" in errors or "Exception ignored" in errors or code in (UNEXPECTED, 120):
        raise RuntimeError(f"exit code {code}: {errors[-400:]}")
    if code < 0:
        raise RuntimeError(f"ended by signal {-code}: {errors[-400:]}")
    if code == BROKEN_PIPE or (blind and code != command.usual):
        raise Said(f"exit code {code}")  # the reader has gone, or is the null device: nobody is left to tell
    last = errors.strip().splitlines()[-1] if errors.strip() else ""
    if code != command.usual and last.startswith("tfopt: "):
        raise Said(last)
    return command.result(place, code, output)


def _forked(command: _Command, place: Path, prepare: Callable[[Path], Any], *, blind: bool = False) -> Any:
    """Runs a command in a fork, whose standard streams are files unless `prepare` opens others."""
    out, err = place.with_name("out.txt"), place.with_name("err.txt")

    def act() -> None:
        os.chdir(place)
        os.environ.update(ENVIRONMENT)
        for number, path in ((1, out), (2, err)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(descriptor, number)
            os.close(descriptor)
        prepare(place)
        for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
            with contextlib.suppress(OSError):
                os.fstat(number)
                file = os.fdopen(number, "r" if number == 0 else "w", closefd=False)
                setattr(sys, name, file)
                continue
            setattr(sys, name, None)  # as the interpreter does for a closed one
        from tfopt.cli import main

        os._exit(main(list(command.words)))

    for path in (out, err):
        path.write_text("")
    code = in_fork(act, place.with_name("log.txt"), 400)
    if code is None:
        raise TimeoutError("over 200 s")
    return _judged(command, place, code, out.read_text(errors="replace"), err.read_text(errors="replace"), blind=blind)


def _real(command: _Command, place: Path, words: tuple[str, ...], environment: dict[str, str], shell: str = "") -> Any:
    """Runs a command in a process of its own."""
    own = [sys.executable, *words, "-m", "tfopt", *command.words]
    if shell:  # what it does with the streams of "$@"
        own = ["/bin/sh", "-c", shell, "sh", *own]
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        own, cwd=place, env={**ENVIRONMENT, **paths, **environment}, capture_output=True, timeout=600, check=False
    )
    output, errors = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return _judged(command, place, done.returncode, output, errors)


def _opened(number: int, path: str, flags: int = os.O_RDWR) -> Callable[[Path], None]:
    def prepare(place: Path) -> None:
        descriptor = os.open(path, flags)
        os.dup2(descriptor, number)
        os.close(descriptor)

    return prepare


def _closed(*numbers: int) -> Callable[[Path], None]:
    def prepare(place: Path) -> None:
        for number in numbers:
            os.close(number)

    return prepare


def _broken(number: int) -> Callable[[Path], None]:
    def prepare(place: Path) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, number)
        os.close(writer)

    return prepare


def _both(*each: Callable[[Path], Any]) -> Callable[[Path], None]:
    return lambda place: [one(place) for one in each] and None


def _set(**values: str) -> Callable[[Path], None]:
    return lambda place: os.environ.update(values)


def _unset(*names: str) -> Callable[[Path], None]:
    return lambda place: [os.environ.pop(name, None) for name in names] and None


def _terminal(**values: str) -> Callable[[Path], None]:
    """Gives the command a terminal, which a fork reads."""

    def prepare(place: Path) -> None:
        os.environ.update(values)
        for name in ("COLUMNS", "LINES"):
            if name not in values:
                os.environ.pop(name, None)
        ours, theirs = os.openpty()
        if os.fork() == 0:
            os.close(theirs)
            with contextlib.suppress(OSError):
                while select.select([ours], [], [], 200)[0] and os.read(ours, 4096):
                    pass
            os._exit(0)
        os.close(ours)
        for number in (0, 1):
            os.dup2(theirs, number)
        os.close(theirs)

    return prepare


def _gone(place: Path) -> None:
    folder = place / "gone"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()


def _packages_read_only(place: Path) -> None:
    own_mounts()
    for directory in {Path(sys.prefix).resolve(), Path(__file__).resolve().parents[2] / "tfopt"}:
        read_only(directory, own=False)


def _of_nobody(place: Path) -> None:
    """The working directory and all in it belongs to another user, who lets others read."""
    for path in [place, *place.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o755 if path.is_dir() else 0o644)
    as_anybody().__enter__()


def _unreadable(place: Path) -> None:
    for path in [*place.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o700 if path.is_dir() else 0o600)
    as_anybody().__enter__()


IN_FORKS: dict[str, Callable[[Path], Any]] = {
    "standard input is closed": _closed(0),
    "standard output is closed": _closed(1),
    "standard error is closed": _closed(2),
    "all three streams are closed": _closed(0, 1, 2),
    "standard output is /dev/full": _opened(1, "/dev/full"),
    "standard error is /dev/full": _opened(2, "/dev/full"),
    "both outputs are /dev/full": _both(_opened(1, "/dev/full"), _opened(2, "/dev/full")),
    "standard output is a broken pipe": _broken(1),
    "standard error is a broken pipe": _broken(2),
    "both outputs are broken pipes": _both(_broken(1), _broken(2)),
    "a terminal of 20 columns": _terminal(COLUMNS="20", TERM="xterm"),
    "a terminal of 0 columns": _terminal(COLUMNS="0", TERM="xterm"),
    "a dumb terminal": _terminal(TERM="dumb"),
    "a terminal without a name": _terminal(TERM=""),
    "COLUMNS=20 and no terminal": _set(COLUMNS="20"),
    "COLUMNS is no number": _set(COLUMNS="wide", LINES="-1"),
    "no HOME": _unset("HOME", "USER", "LOGNAME"),
    "HOME is missing": _set(HOME="/nonexistent/home", XDG_CACHE_HOME="/nonexistent/cache"),
    "TMPDIR is missing": _set(TMPDIR="/nonexistent"),
    "the working directory is gone": _gone,
    "packages on a read-only disk": _packages_read_only,
    "a working directory of another user": _of_nobody,
    "files of another user, who lets nobody read": _unreadable,
}
REAL: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "env -i": ((), {}, ""),
    "LANG=C": ((), {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, ""),
    "PYTHONIOENCODING=ascii": ((), {"PYTHONIOENCODING": "ascii"}, ""),
    "PYTHONOPTIMIZE=2": ((), {"PYTHONOPTIMIZE": "2"}, ""),
    "-W error": (("-W", "error"), {}, ""),
    "-X dev": (("-X", "dev"), {}, ""),
    "all three streams are closed by the shell": ((), {}, 'exec "$@" <&- >&- 2>&-'),
    "a reader that leaves": ((), {}, '"$@" | true'),
    "standard output is /dev/full": ((), {}, 'exec "$@" >/dev/full'),
}
# An import of TensorFlow takes many seconds, so what reads the environment early is tried where it matters.
IN_REAL = {"recipes": (*REAL,), "inspect model": ("env -i", "PYTHONOPTIMIZE=2", "-W error")}
COSTLY = ("all three streams are closed", "standard output is a broken pipe", "a dumb terminal", "no HOME")
COSTLY += ("a working directory of another user",)


def faults(work: Path, *, share: float = 1.0, only: str = "") -> Iterator[Fault]:
    """Yields each command in each environment; with a share below 1 as many fewer of them."""
    template, number = work / "commands", 0
    for command in COMMANDS:
        chosen = [(how, act) for how, act in _acts(command) if (number := number + 1) * share % 1 < share or share == 1]
        if not chosen or (only and only not in f"{KIND}: {command.name}"):
            continue
        if not template.is_dir():
            template.mkdir()
            make_template("the artifact", partial(_make, template), work / "commands.log")
        (work / "said.txt").unlink(missing_ok=True)
        right = expected(
            f"{KIND}: {command.name}",
            lambda place, command=command: _forked(command, place, lambda place: None),  # type: ignore[misc]
            template,
            work / "place",
        )
        for how, act in chosen:
            yield Fault(
                kind=KIND,
                part=command.name,
                how=how,
                act=act,
                template=template,
                expected=right,
                must=EQUAL_OR_WORD,
                keeps=False,
                limit_s=620,
            )


def _acts(command: _Command) -> Iterator[tuple[str, Callable[[Path], Any]]]:
    for how, prepare in IN_FORKS.items():
        if not command.waits or how in COSTLY:
            blind = how.startswith(("both outputs", "all three", "standard error"))
            yield (
                how,
                lambda place, prepare=prepare, blind=blind: _forked(  # type: ignore[misc]
                    command, place, prepare, blind=blind
                ),
            )
    for how in IN_REAL.get(" ".join(command.words), ()):
        words, environment, shell = REAL[how]
        yield (
            f"{how}, a process of its own",
            lambda place, words=words, environment=environment, shell=shell: _real(  # type: ignore[misc]
                command, place, words, environment, shell
            ),
        )
