"""A limit for each test on a GPU: one whose compilation takes minutes must not take the others' time there.

The process ends with the place where it was. With `-n 1` another one goes on with the other tests.
"""

import faulthandler
import os
import sys

import pytest

LIMIT_S = float(os.environ.get("GPU_TEST_LIMIT_S", "240"))


@pytest.fixture(autouse=True)
def _ends_in_time():
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()
