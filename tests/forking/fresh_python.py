"""A fresh Python process for a test: it has used neither TensorFlow nor Keras, nor anything that the test has done.

Python takes seconds to import TensorFlow. So the program runs in a fork of a server that has imported what the program
needs, and has used none of it: no op has run, no device has been started. `client.py` behaves as the interpreter for
whoever starts it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CLIENT = Path(__file__).with_name("client.py")


def write_interpreter(
    directory: Path,
    imports: Sequence[str],
    blocked: Sequence[str] = (),
    tests: int | None = None,
    base: Path | None = None,
    prepare: str = "",
) -> Path:
    """Writes an executable that takes the interpreter's words, and runs programs in forks of one server.

    `-c code`, `-m module` and scripts are forked, also with -I. Python really starts for other options, and in another
    environment.

    Args:
        directory: Where it and the server's socket go; several processes may share it. The path is short, as sockets'.
        imports: The modules that a program finds imported. "package.*" stands for all modules of the package.
        blocked: The modules that no program can import.
        tests: The process with which the server ends, this one by default.
        base: Another such executable, whose server forks this one's, and so imports for both.
        prepare: A program that the server runs once it has imported them, for all of its forks.
    """
    settings = {
        "python": sys.executable,
        "starts_server": [sys.executable, "-P"] if base is None else [str(base)],
        "imports": list(imports),
        "prepare": prepare,
        "blocked": list(blocked),
        "tests": tests or os.getpid(),
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    }
    directory.mkdir(exist_ok=True)
    command = shlex.join(map(str, [sys.executable, "-I", "-S", CLIENT, directory]))
    for name, text in {"settings.json": json.dumps(settings), "python": f'#!/bin/sh\nexec {command} "$@"\n'}.items():
        whole = directory / f"{name}.{os.getpid()}"
        whole.write_text(text)
        whole.chmod(0o700)
        whole.rename(directory / name)
    return directory / "python"


class FreshPython:
    """Runs programs in fresh processes.

    Args:
        interpreters: The executables by what a program finds imported. "nothing" is Python itself.
    """

    def __init__(self, interpreters: Mapping[str, str | Path]) -> None:
        self.interpreters = interpreters

    def __call__(
        self, *words: Any, imported: str = "tfopt", check: bool = False, timeout: float = 600, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end, and returns its exit code and what it has printed.

        Args:
            words: Those after `python`: "-c" and the code, or a script, and its arguments.
            imported: What the program finds imported: "tfopt" (all of it, and so TensorFlow and Keras), "keras"
                (with TensorFlow, so that a user's program shows which imports of tfopt it lacks), "tensorflow" (alone:
                Keras and tfopt cannot be imported), or "nothing", which is for tests of imports, of the
                environment that libraries read at their import, of hashes that differ between processes, and of
                programs that need none of this. Python really starts then, as it does for other options, `-B` for
                example, and with another environment.
            check: Whether an exit code other than 0 fails the test, with the end of standard error.
            timeout: In seconds.
            options: subprocess.run takes these.
        """
        command = [str(self.interpreters[imported]), *map(str, words)]
        done = subprocess.run(
            command, **{"capture_output": True, "text": True, "check": False, "timeout": timeout, **options}
        )
        assert not check or done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-3000:]}"
        return done

    @contextmanager
    def running(self, *words: Any, imported: str = "tfopt", **options: Any) -> Iterator[subprocess.Popen[str]]:
        """Starts a program, and kills it at the end of the block if it still runs."""
        command = [str(self.interpreters[imported]), *map(str, words)]
        with subprocess.Popen(command, **{"stdout": subprocess.PIPE, "text": True, **options}) as process:
            try:
                yield process
            finally:
                self.kill(process)

    @staticmethod
    def kill(process: subprocess.Popen[Any], within_s: float = 60) -> None:
        """Kills a process of one of the interpreters, and waits until its program has ended, and holds no lock.

        `process.wait()` waits only for the client, whose program the server kills a moment later.
        """
        process.kill()
        process.wait()
        words = process.args
        program = Path(words[0] if isinstance(words, list) else words).with_name(f"program-{process.pid}")
        deadline = time.monotonic() + within_s
        while program.exists():
            assert time.monotonic() < deadline, "the program of a killed process has not ended"
            time.sleep(0.005)
