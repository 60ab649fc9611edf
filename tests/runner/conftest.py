"""Runs of tests measure their input for a shorter time."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _short_measurements():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tfopt.runner.work.MEASURED_SECONDS", 0.2)
        yield
