"""`tfopt monitor -- COMMAND`: the program's output and exit code stay, signals reach it once, and no sample is lost."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tfopt.cli import main
from tfopt.errors import ExportError
from tfopt.hardware import detect

# Counts the interrupts, and waits a while for a second one.
PROGRAM = """
import signal, sys, time
hits = []
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, lambda number, frame: hits.append(signal.Signals(number).name))
print("ready", flush=True)
until = time.monotonic() + 300
while not hits and time.monotonic() < until:
    time.sleep(0.01)
time.sleep(0.3)
print("got", *hits, flush=True)
sys.exit(7)
"""


def test_the_programs_output_and_exit_code_stay_and_all_samples_are_written(tmp_path, capfd):
    out = tmp_path / "load.json"
    words = ["monitor", "--interval", "0.05", "--out", str(out), "--", "sh", "-c", "echo done; sleep 0.5; exit 5"]
    assert main(words) == 5
    shown = capfd.readouterr()
    assert shown.out == "done\n"
    load = json.loads(out.read_text())
    assert shown.err.startswith(f"{load['source']}: {len(load['seconds'])} samples in ")
    assert len(load["seconds"]) >= 3
    if not detect().gpus:
        assert load["series"]["process_memory_bytes"][0] > 0
        assert load["series"]["process_memory_bytes"][-1] is None  # the program has ended
        assert "no NVIDIA GPU can be read: " in shown.err


def test_json_follows_the_output_of_the_program(capfd):
    assert main(["monitor", "--json", "--", "echo", "--json"]) == 0
    first, _, rest = capfd.readouterr().out.partition("\n")
    assert first == "--json"
    assert set(json.loads(rest)) == {"source", "seconds", "series", "unavailable", "notes"}


def test_the_processor_time_of_a_child_that_has_ended_counts(capfd):
    count = "i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done"
    three_processes = f"for n in 1 2 3; do sh -c '{count}'; done"
    assert main(["monitor", "--json", "--interval", "0.1", "--", "sh", "-c", three_processes]) == 0
    series = json.loads(capfd.readouterr().out)["series"]
    if "process_cpu_percent" in series:
        known = [value for value in series["process_cpu_percent"] if value is not None]
        assert all(value > 0 for value in known)  # less time than before would count as none


@pytest.mark.parametrize("out", ["missing/load.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_the_program_runs(out, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["monitor", "--out", out, "--", "touch", "ran"]) == 2
    shown = " ".join(capfd.readouterr().err.split())
    assert f"--out must be a file that can be written. Received: --out {out} (" in shown
    assert "The program has not run." in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("of_program", "code"), [(0, 3), (5, 5)])
def test_a_disk_that_is_full_in_the_end_loses_neither_summary_nor_exit_code(
    of_program, code, tmp_path, capfd, monkeypatch
):
    def fail(path, text):
        raise ExportError("The file could not be written.")

    monkeypatch.setattr("tfopt.atomic.files.write_bytes", fail)
    assert main(["monitor", "--out", str(tmp_path / "load"), "--", "sh", "-c", f"exit {of_program}"]) == code
    shown = capfd.readouterr().err
    assert "samples in" in shown
    assert "tfopt: The file could not be written." in shown


def test_what_is_no_program_is_refused(tmp_path, capfd):
    (tmp_path / "data").write_text("no program")
    assert main(["monitor", "--", "no-such-program"]) == 2
    assert "The command must be a program. Received: no-such-program (" in capfd.readouterr().err
    assert main(["monitor", "--", str(tmp_path / "data")]) == 2
    assert "Permission denied" in capfd.readouterr().err
    assert main(["monitor", "--interval", "0", "--", "true"]) == 2
    assert "--interval must be a number of seconds above 0" in capfd.readouterr().err


def start(program=PROGRAM, **options):
    command = [sys.executable, "-m", "tfopt", "monitor", "--interval", "0.1", "--", sys.executable, "-S", "-c", program]
    return subprocess.Popen(command, start_new_session=True, text=True, **options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_tfopt_reaches_the_program(number):
    with start(stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    assert out == f"got {number.name}\n"
    assert process.returncode == 7
    assert "samples in" in err


def test_ctrl_c_in_a_terminal_reaches_the_program_once():
    terminal, end = os.openpty()
    own = f"import os, sys; os.open({os.ttyname(end)!r}, os.O_RDWR); os.execvp(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-m", "tfopt", "monitor", "--", sys.executable, "-S", "-c", PROGRAM]
    # A session that opens a terminal has it as its own, so that Ctrl-C comes from the terminal.
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", own, *command], stdin=end, stdout=end, stderr=end, start_new_session=True
    )
    os.close(end)
    with os.fdopen(terminal, "r+b", buffering=0) as screen:
        shown = b""
        while b"ready" not in shown:
            shown += screen.read(1024)
        screen.write(b"\x03")
        while b"samples in" not in shown:
            shown += screen.read(1024)
        assert process.wait(300) == 7
    assert b"got SIGINT\r\n" in shown


def test_a_program_that_a_signal_ends_has_its_code():
    with start("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", stderr=subprocess.PIPE) as process:
        assert "samples in" in process.communicate(timeout=300)[1]
    assert process.returncode == 128 + 9
