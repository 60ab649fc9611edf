"""The tests look for large effects, so short experiments are enough."""

import pytest

from tfopt.diagnosis import experiments, input_time


@pytest.fixture(autouse=True)
def short_experiments(monkeypatch):
    monkeypatch.setattr(experiments, "SECONDS", 0.2)
    monkeypatch.setattr(input_time, "SECONDS", 0.3)
