"""The lock of a checkpoint directory, with real processes that are killed and forked."""

import json
import os
import re
import signal
import socket
import textwrap

import pytest

from tfopt.errors import ConfigError, TfoptWarning
from tfopt.training.checkpointing import lock
from tfopt.training.checkpointing.lock import NAME, only_training

HOLD_AND_FORK = """
    import contextlib, importlib.util, os, sys, time
    from pathlib import Path

    # Without tfopt.training, which takes seconds to import.
    spec = importlib.util.spec_from_file_location("lock", sys.argv[2])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.only_training(Path(sys.argv[1])):
        if not os.fork():
            print(os.getpid(), flush=True)  # by the fork: its copy of the lock is closed by then
        time.sleep(60)
"""


def test_a_second_training_is_refused_until_the_first_is_killed(tmp_path, fresh_python):
    words = ["-c", textwrap.dedent(HOLD_AND_FORK), tmp_path, lock.__file__]
    with fresh_python.running(*words, imported="nothing") as holder:
        fork = int(holder.stdout.readline())
        words = f"checkpoint_dir={tmp_path}, where process {holder.pid} on {socket.gethostname()} has been training"
        with pytest.raises(ConfigError, match=re.escape(words)), only_training(tmp_path):
            pass
        holder.kill()
        holder.wait()
        try:
            os.kill(fork, 0)  # a data loader outlives the training, for example
            with only_training(tmp_path):
                assert json.loads((tmp_path / NAME).read_text())["process"] == os.getpid()
        finally:
            os.kill(fork, signal.SIGKILL)


def test_the_lock_ends_with_the_block_also_when_it_raises(tmp_path):
    with pytest.raises(KeyError), only_training(tmp_path):
        raise KeyError
    with only_training(tmp_path), pytest.raises(ConfigError, match="one training at a time"), only_training(tmp_path):
        pass
    with only_training(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(TfoptWarning, match=r"cannot be locked \(.*Function not implemented\)"), only_training(tmp_path):
        pass
