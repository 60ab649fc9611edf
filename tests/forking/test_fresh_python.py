"""A forked program behaves as one that was started: its streams, its end, its signals, and what it can import."""

import fcntl
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forking.fresh_python import FreshPython, write_interpreter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pidfd_open is of Linux")

IS_FORKED = "import sys; forked = 'decimal' in sys.modules; "


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Its programs find decimal imported and cannot import fractions."""
    directory = tmp_path_factory.mktemp("forking")
    yield FreshPython({"tfopt": write_interpreter(directory, ["decimal"], ["fractions"])})
    (directory / "settings.json").unlink()


def outcome(python, code, *words, **options):
    done = python("-c", IS_FORKED + code, *words, **options)
    return done.returncode, done.stdout, done.stderr


def test_streams_words_and_directory_are_the_callers(python, tmp_path):
    code = "import os; print(forked, sys.stdin.read(), sys.argv, os.getcwd()); print('note', file=sys.stderr)"
    expected = (0, f"True given ['-c', 'a b', '-I'] {tmp_path}\n", "note\n")
    assert outcome(python, code, "a b", "-I", input="given", cwd=tmp_path) == expected


SCRIPT = """
import atexit, sys, threading, time
import beside, __main__
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print(__name__, __main__.__dict__ is globals(), __file__, sys.argv, sys.path[0], beside.NAME, flush=True)
"""


@pytest.mark.parametrize("words", [["script.py"], ["-m", "script"], ["-m", "package"]], ids=" ".join)
def test_a_script_or_module_runs_as_in_the_interpreter_also_to_its_end(python, tmp_path, words):
    (tmp_path / "package").mkdir()
    for file in ("script.py", "package/__main__.py"):
        (tmp_path / file).write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    found = python(*words, "word", cwd=tmp_path)
    started = subprocess.run([sys.executable, *words, "word"], cwd=tmp_path, capture_output=True, text=True)
    assert "__main__ True" in started.stdout
    assert (found.returncode, found.stdout, found.stderr) == (0, started.stdout, "")


@pytest.mark.parametrize(
    ("code", "returned", "error"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no')", 1, "no"),
        ("import fractions", 1, "ModuleNotFoundError: import of fractions halted; None in sys.modules"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
        ("import os; os.kill(os.getpid(), 11)", -11, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_it_ends_as_the_program_does(python, code, returned, error):
    found, _, errors = outcome(python, code)
    assert found == returned
    assert errors.strip().endswith(error)
    assert "server.py" not in errors


WAITS = "import os; print(forked, os.getpid(), flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
    ("kill", "options"),
    [(os.kill, {}), *itertools.product((os.kill, os.killpg), ({"process_group": 0}, {"start_new_session": True}))],
)
def test_the_program_ends_with_it(python, kill, options):
    with python.running("-c", IS_FORKED + WAITS, stdin=-1, **options) as process:
        forked, program = process.stdout.readline().split()
        assert forked == "True"
        kill(process.pid, signal.SIGKILL)
        assert process.stdout.read() == ""  # which waits for the program's end
        assert process.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 120
    while (left := Path("/proc", program).exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


HOLDS = """
import fcntl
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
heavy = b"x" * (1 << 28)  # the kernel frees it before it gives the lock back
print(forked, flush=True)
sys.stdin.read()
"""


def test_a_killed_program_has_given_back_its_locks(python, tmp_path):
    for _ in range(2):
        with python.running("-c", IS_FORKED + HOLDS, tmp_path / "lock", stdin=-1) as process:
            assert process.stdout.readline() == "True\n"
            python.kill(process)
            with (tmp_path / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it raises BlockingIOError


HANDLES = """
import signal
signal.signal(signal.SIGTERM, lambda *_: print("got it", flush=True))
print(forked, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["the process", "its group", "a session's"])
def test_a_signal_reaches_the_program_once(python, how):
    options = {"the process": {}, "its group": {"process_group": 0}, "a session's": {"start_new_session": True}}[how]
    with python.running("-c", IS_FORKED + HANDLES, stdin=-1, **options) as process:
        assert process.stdout.readline() == "True\n"
        (os.killpg if options else os.kill)(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "got it\n"
        assert process.communicate() == ("", None)
        assert process.returncode == 0


def test_a_signal_that_is_not_handled_ends_it(python):
    with python.running("-c", IS_FORKED + WAITS, stdin=-1) as process:
        process.stdout.readline()
        process.terminate()
        assert process.wait() == -signal.SIGTERM


def test_random_numbers_differ_from_process_to_process(python):
    code = "import random; print(random.random())"
    assert outcome(python, code)[1] != outcome(python, code)[1]


def test_other_options_or_variables_really_start_the_interpreter(python, monkeypatch):
    assert python("-B", "-c", IS_FORKED + "print(forked, sys.flags.dont_write_bytecode)").stdout == "False 1\n"
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    assert outcome(python, "import os; print(forked, os.environ['TF_ENABLE_ONEDNN_OPTS'])")[1] == "False 0\n"


def test_variables_that_the_interpreter_reads_at_its_start_count_in_a_fork(python, tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    code = "import os, beside, tempfile; print(forked, beside.NAME, tempfile.gettempdir()); os._exit(0)"
    variables = {"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    assert outcome(python, code, env={**os.environ, **variables}) == (0, f"True beside {tmp_path}\n", "")


def test_the_server_of_another_interpreter_imports_for_both(python, tmp_path):
    more = FreshPython({"tfopt": write_interpreter(tmp_path / "m", ["colorsys"], base=python.interpreters["tfopt"])})
    code = "print(forked, 'colorsys' in sys.modules, sys.argv, [each for each in sys.path if 'forking' in each])"
    assert outcome(more, code, "word") == (0, "True True ['-c', 'word'] []\n", "")
    (tmp_path / "m" / "settings.json").unlink()


def test_the_server_that_cannot_start_says_why(tmp_path):
    python = FreshPython({"tfopt": write_interpreter(tmp_path / "fresh", ["nosuchmodule"])})
    returned, _, error = outcome(python, "")
    assert returned == 1
    assert "nosuchmodule" in error


STATE = """
import sys
modules = set(sys.modules)
import tensorflow as tf
from tensorflow.python.eager import context
assert not context.context()._initialized
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
assert len(tf.config.list_logical_devices("CPU")) == 2
present = {name for name in modules if sys.modules[name]}
print(*sorted({"keras", "tensorflow", "tfopt", "tfopt.cli", "tf_keras"} & present))
"""


@pytest.mark.parametrize(
    ("imported", "found"), [("tensorflow", "tensorflow"), ("tfopt", "keras tensorflow tfopt tfopt.cli")]
)
def test_a_program_finds_imported_what_it_was_promised_and_no_device_started(fresh_python, imported, found):
    assert fresh_python("-c", STATE, imported=imported, check=True).stdout.split() == found.split()
