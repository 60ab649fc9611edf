"""An executable that behaves as the Python interpreter, but forks certain programs, which saves them the imports."""

import json
import os
import shlex
import sys
from pathlib import Path

CLIENT = Path(__file__).with_name("client.py")


def write_stand_in(directory, words, imports, blocked, path):
    """Writes the executable.

    Args:
        directory: Where it and its server's socket go. The server ends when the directory is removed, or this process.
        words: The interpreter's first arguments for the programs that are forked.
        imports: The modules that they find imported.
        blocked: The modules that cannot be imported.
        path: Where modules are found.
    Returns: Its path.
    """
    settings = {
        "python": sys.executable,
        "words": list(map(str, words)),
        "imports": imports,
        "blocked": blocked,
        "path": path,
        "tests": os.getpid(),
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    }
    (directory / "settings.json").write_text(json.dumps(settings))
    stand_in = directory / "python"
    command = shlex.join(map(str, [sys.executable, "-I", "-S", CLIENT, directory]))
    stand_in.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    stand_in.chmod(0o700)
    return stand_in
