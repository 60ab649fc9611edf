"""`dcgmi dmon` as a program on PATH that prints what DCGM's prints, and ends or fails as it does."""

import contextlib
import os
import time
from pathlib import Path

import psutil
import pytest

from tfopt.profiling.monitoring.readers import Dcgm

ROWS = """\
echo "#Entity   SMACT        TENSO"
echo "ID"
echo "GPU 0     0.250        0.125"
echo "GPU 1     N/A          N/A"
echo "GPU-I 0   0.500        0.500"
"""


@pytest.fixture
def dcgmi(tmp_path, monkeypatch):
    """Returns a function that puts a program of the given lines on PATH as dcgmi. It runs in the folder returned."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def write(lines):
        (tmp_path / "dcgmi").write_text(lines)
        (tmp_path / "dcgmi").chmod(0o755)
        return tmp_path

    return write


@pytest.fixture
def started():
    opened = []

    def start(interval_s=0.05):
        opened.append(Dcgm(interval_s))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def wait_for(condition):
    for _ in range(12_000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_the_last_row_of_each_gpu_is_read(dcgmi, started):
    folder = dcgmi(f'#!/bin/sh\necho "$@" > words\n{ROWS}sleep 60\n')
    dcgm = started()
    assert wait_for(lambda: dcgm.last(0)["sm_active_percent"] is not None)
    assert dcgm.last(0) == {"sm_active_percent": 25.0, "tensor_active_percent": 12.5}
    assert dcgm.last(1) == dcgm.last(7) == dcgm.last(None) == {"sm_active_percent": None, "tensor_active_percent": None}
    assert (folder / "words").read_text() == "dmon -e 1002,1004 -d 100\n"
    assert dcgm.reason is None


def test_it_ends_with_all_that_it_has_started(dcgmi, started):
    folder = dcgmi(f"#!/bin/sh\nsleep 60 &\necho $! > child\n{ROWS}wait\n")  # the child too holds the pipe open
    files = files_held()
    dcgm = started()
    assert wait_for(lambda: dcgm.last(0)["sm_active_percent"] is not None)
    child = int((folder / "child").read_text())
    dcgm.close()
    assert wait_for(lambda: not is_running(child))
    assert not dcgm._thread.is_alive()
    assert files_held() == files


def test_values_end_with_the_program_and_its_last_words_are_the_reason(dcgmi, started):
    dcgmi(f"#!/bin/sh\n{ROWS}echo 'Error: the host engine   went away' >&2\nexit 7\n")
    dcgm = started()
    assert wait_for(lambda: dcgm.reason is not None)
    assert dcgm.reason == "dcgmi ended with code 7: Error: the host engine went away"
    assert dcgm.last(0) == {"sm_active_percent": None, "tensor_active_percent": None}


def test_a_row_of_long_ago_is_not_the_present(dcgmi, started):
    dcgmi(f"#!/bin/sh\n{ROWS}sleep 60\n")
    dcgm = started()
    assert wait_for(lambda: dcgm.last(0)["sm_active_percent"] is not None)
    dcgm._stale_s = 0.0
    assert dcgm.last(0)["sm_active_percent"] is None


def test_without_dcgmi_or_with_one_that_cannot_start_there_is_a_reason(dcgmi, started, monkeypatch):
    dcgmi("no program at all")  # the system refuses it: Exec format error
    broken = started()
    assert broken.reason.startswith("dcgmi cannot be started: [Errno 8]")
    assert broken.last(0) == {}
    monkeypatch.setenv("PATH", "/nowhere")
    assert started().reason == "dcgmi is not installed"


def files_held():
    return {file.name for file in Path("/proc/self/fd").iterdir()}


def is_running(number):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    return False
