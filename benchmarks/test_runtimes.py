"""The workers of other runtimes take the commands of tfopt's processes, which time them all."""

from __future__ import annotations

from inspect import signature

import pytest
from runtimes.worker import Worker

from tfopt.exporting.verification.served import Runner


@pytest.mark.parametrize("command", ["predict", "time"])
def test_a_worker_takes_the_command(command):
    sent, taken = signature(getattr(Runner, command)), signature(getattr(Worker, f"do_{command}"))
    assert [*taken.parameters] == [*sent.parameters]
