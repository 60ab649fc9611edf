"""Stands in for the Python interpreter: a program that only needs imported modules is forked, all else is started.

Arguments: a directory with settings.json, which `stand_in.py` describes, then the words for the interpreter.
Another process runs the program, but with the standard streams, the working directory and the process group of this
one. It ends when this one is killed, and this one ends as it did.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SERVER = Path(__file__).with_name("server.py")
READ_LATE = {"_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL"}  # a shell sets these, or a terminal


def can_be_forked(settings, words):
    """Whether these are words for a program that is forked, in the environment that the server has.

    Libraries read many variables when they are imported, so a change of any variable takes a real start.
    """
    found = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    differing = set(found.items()) ^ set(settings["environment"].items())
    return words[: len(settings["words"])] == settings["words"] and {name for name, _ in differing} <= READ_LATE


def connect(directory, python):
    """Returns a connection to the server, which the first caller starts."""
    address = directory / "socket"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            with (directory / "log").open("wb") as log:
                server = subprocess.Popen(
                    [python, "-I", SERVER, directory],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=0,  # else it would be killed with the first program
                )
            while not address.exists():
                if server.poll() is not None:
                    sys.exit((directory / "log").read_text())
                time.sleep(0.01)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address))
    return connection


def main():
    directory, words = Path(sys.argv[1]), sys.argv[2:]
    settings = json.loads((directory / "settings.json").read_text())
    if not can_be_forked(settings, words):
        os.execv(settings["python"], [settings["python"], *words])
    with connect(directory, settings["python"]) as connection:
        request = {"words": words, "directory": str(Path.cwd()), "environment": dict(os.environ), "group": os.getpgrp()}
        socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
        code = json.loads(connection.makefile().readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
