"""A forked program behaves as one that was started: its streams, its end, and what it can import."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stand_in import write_stand_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pidfd_open is of Linux")

IS_FORKED = "import sys; forked = 'decimal' in sys.modules; "


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """It forks `-c code`, which finds decimal imported and cannot import fractions."""
    directory = tmp_path_factory.mktemp("stand_in")
    yield write_stand_in(directory, ["-c"], ["decimal"], ["fractions"], sys.path)
    (directory / "settings.json").unlink()


def outcome(python, code, *words, **options):
    done = subprocess.run([python, "-c", IS_FORKED + code, *words], capture_output=True, text=True, **options)
    return done.returncode, done.stdout, done.stderr


def test_streams_words_and_directory_are_the_callers(python, tmp_path):
    code = "import os; print(forked, sys.stdin.read(), sys.argv[1:], os.getcwd()); print('note', file=sys.stderr)"
    expected = (0, f"True given ['a b', '-I'] {tmp_path}\n", "note\n")
    assert outcome(python, code, "a b", "-I", input="given", cwd=tmp_path) == expected


@pytest.mark.parametrize(
    ("code", "returned", "error"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no')", 1, "no"),
        ("import fractions", 1, "ModuleNotFoundError: import of fractions halted; None in sys.modules"),
        ("import os; os.kill(os.getpid(), 11)", -11, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_it_ends_as_the_program_does(python, code, returned, error):
    found, _, errors = outcome(python, code)
    assert found == returned
    assert errors.strip().endswith(error)


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["the process", "its group"])
def test_the_program_ends_with_it(python, kill):
    command = [python, "-c", IS_FORKED + "import os; print(forked, os.getpid(), flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, process_group=0) as process:
        forked, program = process.stdout.readline().split()
        assert forked == "True"
        kill(process.pid, signal.SIGKILL)
        assert process.stdout.read() == ""  # which waits for the program's end
        assert process.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while (left := Path("/proc", program).exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_other_words_or_variables_really_start_the_interpreter(python, monkeypatch):
    started = [python, "-I", "-c", IS_FORKED + "print(forked, sys.flags.isolated)"]
    assert subprocess.run(started, capture_output=True, text=True).stdout == "False 1\n"
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    assert outcome(python, "import os; print(forked, os.environ['TF_ENABLE_ONEDNN_OPTS'])")[1] == "False 0\n"


def test_the_server_that_cannot_start_says_why(tmp_path):
    python = write_stand_in(tmp_path, ["-c"], ["nosuchmodule"], [], sys.path)
    returned, _, error = outcome(python, "")
    assert returned == 1
    assert "nosuchmodule" in error
