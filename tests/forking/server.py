"""Forks programs from a process that has imported TensorFlow, but has started none of its devices and threads.

Argument: a directory with settings.json, which `stand_in.py` describes. It serves until the tests' process is gone.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path


def serve(listener, is_needed):
    """Forks a process for every client that connects."""
    attending = set()
    while is_needed():
        attending -= {process for process in attending if os.waitpid(process, os.WNOHANG)[0]}
        if select.select([listener], [], [], 1.0)[0]:
            connection, _ = listener.accept()
            process = os.fork()
            if process == 0:
                listener.close()
                attend(connection)
            attending.add(process)
            connection.close()


def attend(connection):
    """Forks one client's program, ends it when the client is gone, and tells the client how it ended."""
    content, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while not content.endswith(b"\n"):
        content += connection.recv(1 << 16)
    program = os.fork()
    if program == 0:
        connection.close()
        run(json.loads(content), files)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(program)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(program, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with suppress(BrokenPipeError):  # the client is gone
        connection.sendall(json.dumps(code).encode() + b"\n")
    os._exit(0)


def run(request, files):
    """Runs a program, `-c code` or a script, and ends this process as the interpreter would."""
    code = 1
    try:
        with suppress(PermissionError):  # the client is in a session of its own
            os.setpgid(0, request["group"])
        for target, file in enumerate(files):
            os.dup2(file, target)
            os.close(file)
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        option, *rest = request["words"]
        code = execute(rest if option == "-I" else request["words"])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def execute(words):
    """Returns the exit code."""
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001 - the interpreter, too, prints any exception
        traceback.print_exc()
        return 1
    return 0


def main():
    directory = Path(sys.argv[1])
    settings = json.loads((directory / "settings.json").read_text())
    sys.path[:] = settings["path"]
    sys.modules.update(dict.fromkeys(settings["blocked"]))
    for module in settings["imports"]:
        importlib.import_module(module)
    gc.freeze()  # a collection in a forked process does not touch, and so copy, what is shared
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "binding"))
        listener.listen()
        (directory / "binding").rename(directory / "socket")  # it appears when it can be connected to
        serve(listener, lambda: (directory / "settings.json").exists() and Path(f"/proc/{settings['tests']}").exists())


if __name__ == "__main__":
    main()
