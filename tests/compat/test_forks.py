"""A fork has none of TensorFlow's threads: tfopt refuses one after use, which would wait without end, and no other."""

import os

import pytest
import tensorflow as tf

from tfopt import TrainingConfig, plan
from tfopt.errors import ConfigError
from tfopt.graph import freeze


def in_a_fork(act):
    """Returns the exit code of a fork that calls a function: 0; 3 if it was refused."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            act()
            code = 0
        except ConfigError as error:
            code = 3 if "spawn" in str(error) else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.parametrize("act", [lambda: plan(TrainingConfig()), lambda: freeze("artifact")], ids=["plan", "freeze"])
def test_a_fork_after_use_is_refused(act):
    assert tf.add(1, 1) == 2
    assert in_a_fork(act) == 3


def test_a_fork_before_use_is_not(fresh_python):
    program = """
import os, tfopt, tensorflow as tf
process = os.fork()
tfopt.plan(tfopt.TrainingConfig(precision="float32", jit_compile=False))
assert tf.add(1, 1) == 2
os._exit(os.waitpid(process, 0)[1] if process else 0)
"""
    assert fresh_python("-c", program).returncode == 0
