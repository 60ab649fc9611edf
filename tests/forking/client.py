"""Behaves as the Python interpreter: asks a server to fork the program, or really starts Python.

Arguments: a directory with settings.json, which `fresh_python.py` writes, then the words for the interpreter.
Another process runs the program, but with the standard streams, the working directory and the environment of this
one. It gets the signals that this one gets, ends when this one is killed, and this one ends as it did.
"""

import fcntl
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

SERVER = Path(__file__).with_name("server.py")
READ_LATE = {"_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL"}  # a shell sets these, or a terminal
READ_LATE |= {"http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"}  # these are read at each request
READ_LATE |= {"CUDA_VISIBLE_DEVICES", "TF_CONFIG", "TF_FORCE_GPU_ALLOW_GROWTH"}  # when devices and clusters are made
READ_LATE |= {"PYTHONPATH", "PYTHONUNBUFFERED", "TMPDIR"}  # the server makes up for these
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def can_be_forked(settings, words):
    """Whether these are words for a program that is forked, in the environment that the server has.

    Libraries read many variables when they are imported, so a change of any variable takes a real start.
    """
    found = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    differing = set(found.items()) ^ set(settings["environment"].items())
    program = words[1:] if words[:1] == ["-I"] else words
    names_one = bool(program) and (program[0] in ("-c", "-m") or not program[0].startswith("-"))
    return names_one and {name for name, _ in differing} <= READ_LATE


def connect(directory, settings):
    """Returns a connection to the server, which the first caller starts."""
    address = directory / "socket"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            start_server(directory, settings, address)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address))
    return connection


def start_server(directory, settings, address):
    import subprocess

    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(
            [*settings["starts_server"], SERVER, directory],
            env=settings["environment"],  # not that of the first program
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,  # else it would be killed with the first program
        )
    while not address.exists():
        if server.poll() is not None:
            sys.exit((directory / "log").read_text())
        time.sleep(0.01)


def main():
    directory, words = Path(sys.argv[1]), sys.argv[2:]
    settings = json.loads((directory / "settings.json").read_text())
    if not can_be_forked(settings, words):
        os.execv(settings["python"], [settings["python"], *words])
    with connect(directory, settings) as connection:
        (directory / f"program-{os.getpid()}").touch()  # the server removes it when the program has ended
        # Who leads a group gets what is sent to all of it, and passes it on to all of the program's.
        group = 0 if os.getpgrp() == os.getpid() else os.getpgrp()
        request = {"words": words, "directory": str(Path.cwd()), "environment": dict(os.environ), "group": group}
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until it is known to whom they go
        socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
        answers = connection.makefile()
        program = json.loads(answers.readline())

        def pass_on(number, frame):
            with suppress(ProcessLookupError):
                (os.killpg if program["leads_group"] else os.kill)(program["process"], number)

        for number in PASSED_ON:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        code = json.loads(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
