"""A limit for each test on a GPU, its fixtures included: one that compiles for minutes must not take the others' time.

The process ends, and the place where it was is in tfopt-gpu-tests-PID.txt, in the directory for temporary files. With
`-n 1` another process goes on with the other tests.
"""

import faulthandler
import os
import tempfile
from pathlib import Path

import pytest

from tfopt.training.xla import leave_convolutions_unfused

leave_convolutions_unfused()  # for the networks that Keras alone compiles
HERE = Path(__file__).parent
LIMIT_S = float(os.environ.get("GPU_TEST_LIMIT_S", "240"))
PLACE = Path(tempfile.gettempdir(), f"tfopt-gpu-tests-{os.getpid()}.txt")
PLACE.unlink(missing_ok=True)  # of an earlier process with this number


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if HERE not in item.path.parents:  # pytest calls this hook of every conftest.py, whichever test it runs
        return (yield)
    with PLACE.open("w") as file:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=file)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            PLACE.unlink()
