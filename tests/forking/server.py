"""Forks programs from a process that has imported TensorFlow, but has started none of its devices and threads.

Argument: a directory with settings.json, which `fresh_python.py` writes. It serves until the tests' process is gone.
"""

import atexit
import gc
import importlib
import importlib.util
import io
import json
import os
import pkgutil
import random
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType


def serve(listener, directory, is_needed):
    """Forks a process for every client that connects."""
    attending = set()
    while is_needed():
        attending -= {process for process in attending if os.waitpid(process, os.WNOHANG)[0]}
        if select.select([listener], [], [], 1.0)[0]:
            connection, _ = listener.accept()
            process = os.fork()
            if process == 0:
                listener.close()
                attend(connection, directory)
            attending.add(process)
            connection.close()


def attend(connection, directory):
    """Forks one client's program, ends it when the client is gone, and tells the client how it ended."""
    client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    content, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while not content.endswith(b"\n"):
        part = connection.recv(1 << 16)
        if not part:  # the client was killed before it had asked for anything
            (directory / f"program-{client}").unlink(missing_ok=True)
            os._exit(0)
        content += part
    request = json.loads(content)
    program = os.fork()
    if program == 0:
        connection.close()
        run(request, files)
    for file in files:
        os.close(file)
    leads = join_group(program, request["group"])
    ended = os.pidfd_open(program)
    with suppress(ConnectionError):  # the client is gone
        connection.sendall(json.dumps({"process": program, "leads_group": leads}).encode() + b"\n")
    if ended not in select.select([ended, connection], [], [])[0]:
        with suppress(ProcessLookupError):
            (os.killpg if leads else os.kill)(program, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    (directory / f"program-{client}").unlink(missing_ok=True)
    with suppress(ConnectionError):
        connection.sendall(json.dumps(code).encode() + b"\n")
    os._exit(0)


def join_group(program, group):
    """Puts a program into a group, 0 for its own. Returns whether it leads one: it cannot join that of a session."""
    try:
        os.setpgid(program, group)
    except PermissionError:
        os.setpgid(program, 0)
        return True
    return group == 0


def run(request, files):
    """Runs a program, `-c code`, `-m module` or a script, and ends this process as the interpreter would."""
    code = 1
    try:
        join_group(0, request["group"])
        for target, file in enumerate(files):
            os.dup2(file, target)
            os.close(file)
        os.chdir(request["directory"])
        set_environment(request["environment"], isolated=request["words"][0] == "-I")
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        code = execute(request["words"])
        threading._shutdown()  # waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def set_environment(environment, *, isolated):
    """Sets the variables, and what the interpreter has read of them at its start."""
    if not isolated and environment.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
        sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    if environment.get("PYTHONUNBUFFERED"):
        sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(environment)


def execute(words):
    """Returns the exit code."""
    try:
        program = prepare(words)
        exec(program, sys.modules["__main__"].__dict__)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code & 0xFF if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:  # noqa: BLE001 - the interpreter, too, prints any exception
        sys.excepthook(type(error), error.with_traceback(error.__traceback__.tb_next), error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def prepare(words):
    """Makes sys.argv, sys.path and an empty module __main__ for the program, and returns its code."""
    isolated = words[0] == "-I"
    name, *rest = words[isolated:]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if not isolated:
        places = {"-c": "", "-m": str(Path.cwd())}
        sys.path.insert(0, places[name] if name in places else str(Path(name).resolve().parent))
    if name == "-c":
        source, file = rest.pop(0), "<string>"
    elif name == "-m":
        spec = importlib.util.find_spec(rest.pop(0))
        if spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{spec.name}.__main__")
        source, file = spec.loader.get_source(spec.name), spec.origin
        main.__spec__, main.__package__, main.__file__ = spec, spec.parent, file
        name = file
    else:
        source, file = Path(name).read_bytes(), str(Path(name).absolute())
        main.__file__ = file
    sys.argv = [name, *rest]
    return compile(source, file, "exec")


def import_all(name):
    """Imports a module, or all those of a package: "package.*"."""
    package = importlib.import_module(name.removesuffix(".*"))
    if name.endswith(".*"):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.endswith((".__main__", "_only", ".served")):  # these are scripts
                importlib.import_module(module.name)


def main():
    directory = Path(sys.argv[1])
    here = str(Path(__file__).parent)  # it is on the path if another server has forked this one
    sys.path[:] = [place for place in sys.path if place != here]
    settings = json.loads((directory / "settings.json").read_text())
    sys.modules.update(dict.fromkeys(settings["blocked"]))
    for name in settings["imports"]:
        import_all(name)
    exec(settings["prepare"], {})
    gc.freeze()  # a collection in a forked process does not touch, and so copy, what is shared
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "binding"))
        listener.listen(64)
        (directory / "binding").rename(directory / "socket")  # it appears when it can be connected to
        needed = (directory / "settings.json", Path(f"/proc/{settings['tests']}"))
        serve(listener, directory, lambda: all(path.exists() for path in needed))


if __name__ == "__main__":
    main()
