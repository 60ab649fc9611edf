"""A file that is written appears whole or not at all."""

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

from tfopt.atomic.files import whole_file, write_text
from tfopt.errors import ExportError


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("the report of the run before")
    return path


def test_until_the_end_the_name_holds_what_it_held(report):
    with whole_file(report) as file:
        before = report.stat().st_ino
        file.write(b"half of the new report")
        file.flush()
        assert report.read_text() == "the report of the run before"
    assert report.read_text() == "half of the new report"
    # The old file was not written to: a program that has opened it still reads it whole.
    assert report.stat().st_ino != before
    assert list(report.parent.iterdir()) == [report]


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(report, monkeypatch):
    flushed, fsync = [], os.fsync

    def watched(descriptor):
        flushed.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), report.read_text()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_text(report, "new")
    (first, named_so_far), last = flushed
    assert (first.startswith(f"{report.parent}/.report.html.tfopt-"), named_so_far) == (
        True,
        "the report of the run before",
    )
    assert last == (str(report.parent), "new")


def stopped(path, stop):
    with whole_file(path) as file:
        file.write(b"half")
        raise stop


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")])
def test_what_stops_it_leaves_the_earlier_file_and_nothing_else(stop, report):
    with pytest.raises(type(stop)):
        stopped(report, stop)
    assert report.read_text() == "the report of the run before"
    assert list(report.parent.iterdir()) == [report]


def test_a_full_disk_is_an_error_with_the_bytes_and_leaves_the_earlier_file(report):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then writing raises, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(ExportError, match=r"report.html \(.*File too large.*it takes 5,000 bytes"):
            write_text(report, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert report.read_text() == "the report of the run before"
    assert list(report.parent.iterdir()) == [report]
