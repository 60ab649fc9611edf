"""A pytest plugin: Keras' own tests run under the hook of `tfopt accelerate`, or with ALONE=1 without it."""

import contextlib
import os
import sys
import types

import keras

from tfopt.scripts.accelerate import AccelerateHook
from tfopt.scripts.hook import hooked

_scopes = contextlib.ExitStack()


def pytest_configure():
    # Keras' tests import it whether it is installed or not; after Keras, which must see that it is missing.
    sys.modules.setdefault("jax", types.ModuleType("jax"))
    if "ALONE" not in os.environ:
        _scopes.enter_context(hooked(AccelerateHook()))


def pytest_unconfigure():
    _scopes.close()


assert keras.config.backend() == "tensorflow"
