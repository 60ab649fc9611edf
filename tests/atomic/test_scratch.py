"""Temporary directories end with their process, or with the next one."""

import contextlib
import os
import signal
import tempfile
import time

import pytest

from tfopt.atomic.scratch import PREFIX, scratch_directory
from tfopt.errors import ExportError
from tfopt.terminal import notices_hidden


@pytest.fixture
def parent(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_removed_at_the_end_also_after_an_error(parent):
    with contextlib.suppress(ValueError), scratch_directory() as directory:
        (directory / "inner").mkdir()
        assert directory.parent == parent
        raise ValueError
    assert not list(parent.iterdir())


def test_those_of_killed_processes_are_removed_and_those_in_use_are_not(parent):
    process = os.fork()
    if process == 0:
        with scratch_directory() as directory:
            (directory / "file").write_text("left")
            time.sleep(60)
        os._exit(0)
    while not list(parent.glob(f"{PREFIX}*/file")):
        time.sleep(0.01)
    [used] = parent.iterdir()
    (parent / f"{PREFIX}of-another-name").mkdir()
    with scratch_directory():
        assert used.exists()
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    with scratch_directory() as directory:
        assert {each.name for each in parent.iterdir()} == {directory.name, f"{PREFIX}of-another-name"}


def test_a_directory_that_cannot_be_made_is_told_in_words(parent):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(parent / "missing"))
        with pytest.raises(ExportError, match=r"temporary files must be writable.*Set TMPDIR"), scratch_directory():
            pass
        with notices_hidden():  # shows them then
            pass
