"""Two logical CPU devices, so that distributed code is tested anywhere, and a skip with a reason for GPU tests.

`pytest tests/gpu --rehearse` runs the GPU tests on a machine without a GPU, as far as they go: a test may fail because
the GPU is missing, but not by a slip of its own. So the first hour on a card is not spent on typing errors.
"""

import collections
import gc
import math
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["TFOPT_CACHE_DIR"] = ""  # what the user has measured changes no test

import pytest
import tensorflow as tf
from forking.fresh_python import FreshPython, write_interpreter
from hypothesis import Phase, settings

sys.modules["openvino_telemetry"] = None  # tests import OpenVINO too, which would fork this process to report it
started = time.monotonic()
# Minutes after which no other test begins: CI ends on a slow machine too, and its log lists what was left out.
BUDGET_MIN = float(os.environ.get("TEST_BUDGET_MINUTES", "inf"))
# A wrong rule fails each time. Beside much other work, one of three measurements in a few milliseconds may be off.
TIMED_RERUNS = 3
# Seconds between two searches of all objects for garbage, and the time of the last.
SEARCH_S = 240
LARGE_PRIME = 1_000_003  # two commits that follow each other begin far apart
searched = started

# Folders and files whose tests depend on the numbers and the speed of single graphs no more than the rest of them does:
# data, files, state, what is reported, our step beside Keras' own. TensorFlow's graph optimizers, a sixth of a test's
# time, are off there.
TESTS = Path(__file__).parent
UNOPTIMIZED = [
    TESTS / each
    for each in (
        *("advisor", "clustering", "data", "distillation", "models", "pruning"),
        *("reporting", "runner", "scripts", "tasks"),
        *("training/checkpointing", "training/distributed", "training/pipeline_parallel", "training/step"),
        *("training/test_counted_losses.py", "training/test_losses.py", "training/test_steps_per_epoch.py"),
    )
]


# Shrinking a failure takes minutes where each example traces a model.
settings.register_profile("no shrinking", phases=[Phase.explicit, Phase.reuse, Phase.generate])
settings.load_profile("no shrinking")


def pytest_addoption(parser):
    parser.addoption("--rehearse", action="store_true", help="run the GPU tests without a GPU, as far as they go")
    parser.addoption("--by-turns", action="store_true", help="of the cases of one_in(n) run one in n")


def pytest_configure(config):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    gc.set_threshold(20_000, 50, 1_000)  # a traced graph has many objects, and _garbage searches after each test


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Looks for no examples in the docstrings of the tests, which have none."""
    return [each for each in (yield) if type(each) is pytest.Module]


def pytest_collection_modifyitems(config, items):
    if config.getoption("by_turns", default=False):
        _take_turns(config, items)
    for item in items:
        if item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.flaky(reruns=TIMED_RERUNS, only_rerun=["AssertionError"]))
    if tf.config.list_physical_devices("GPU"):
        return
    without = pytest.mark.skip(reason="TensorFlow sees no GPU on this machine")
    if config.getoption("rehearse", default=False):
        # What a test that needs a GPU raises without one. A NameError, a TypeError and the like are its own.
        missing = (AssertionError, tf.errors.OpError, IndexError, pytest.fail.Exception)
        without = pytest.mark.xfail(raises=missing, reason="a rehearsal without a GPU", strict=False)
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(without)


def _take_turns(config, items):
    """Chooses other cases of `one_in` at each commit and, if the time is limited, begins with another file.

    So a slow machine does not leave out the same tests always.
    """
    count = ["git", "rev-list", "--count", "HEAD"]
    commits = subprocess.run(count, cwd=TESTS, capture_output=True, text=True, check=False).stdout
    if not items or not commits:
        return
    turn, places, chosen, others = int(commits), collections.Counter(), [], []
    for item in items:
        marker = item.get_closest_marker("one_in")
        is_due = marker is None or (turn + places[item.function]) % marker.args[0] == 0
        (chosen if is_due else others).append(item)
        if marker is not None:
            places[item.function] += 1
    config.hook.pytest_deselected(items=others)
    begin = 0
    if chosen and math.isfinite(BUDGET_MIN):
        first = chosen[turn * LARGE_PRIME % len(chosen)].path
        begin = next(number for number, item in enumerate(chosen) if item.path == first)
    items[:] = chosen[begin:] + chosen[:begin]


def pytest_runtest_setup():
    if time.monotonic() - started > 60 * BUDGET_MIN:
        pytest.skip(f"the budget of {BUDGET_MIN:g} minutes is over on this machine")


@pytest.fixture(scope="session")
def two_replicas():
    """The strategy over both CPU devices. It must be the only one: TensorFlow mixes up the collectives of two."""
    from tfopt import TrainingConfig, plan

    strategy = plan(TrainingConfig(strategy="mirrored")).strategy
    return strategy if strategy.num_replicas_in_sync == 2 else tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(autouse=True)
def _keras_state():
    """Fixed seeds, and a check that no test (so nothing that tfopt does) leaves a dtype policy behind."""
    import keras

    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy().name
    yield
    assert keras.config.dtype_policy().name == before


@pytest.fixture(autouse=True)
def _graph_optimizers(request):
    off = any(each in UNOPTIMIZED for each in (request.path, *request.path.parents))
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": off})


@pytest.fixture(autouse=True)
def _garbage():
    """Frees what the test before has left, and keeps the rest, two million objects in the end, from being searched.

    An iterator of tf.data whose cancellation its tuning thread misses is freed only when that thread wakes up. The
    older the iterator, the longer the thread sleeps, up to a minute. So none may grow old.
    """
    global searched
    if time.monotonic() - searched > SEARCH_S:
        gc.unfreeze()
        searched = time.monotonic()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def fresh_python(tmp_path_factory):
    """Runs a program in a process that has used neither TensorFlow nor Keras. See forking/fresh_python.py."""
    if sys.platform != "linux":  # the forks need its pidfd_open
        return FreshPython(dict.fromkeys(("nothing", "tensorflow", "keras", "tfopt"), sys.executable))
    from forking.briefly import program

    from tfopt.exporting.verification.tensorflow_only import BLOCKED

    shared, tests = tmp_path_factory.getbasetemp(), os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one server for all workers
        shared, tests = shared.parent, os.getppid()
    keras = write_interpreter(shared / "keras", ["tensorflow", "keras"], tests=tests)
    known = {
        "nothing": sys.executable,
        "tensorflow": write_interpreter(shared / "tensorflow", ["tensorflow"], BLOCKED, tests=tests),
        "keras": keras,
        "tfopt": shared / "tfopt" / "python",
    }
    write_interpreter(shared / "tfopt", ["tfopt.*"], tests=tests, base=keras, prepare=program(TESTS, known))
    return FreshPython(known)


@pytest.fixture(scope="session", autouse=True)
def _no_import_is_waited_for_and_times_are_brief(fresh_python):
    from forking.briefly import work_briefly

    work_briefly(fresh_python.interpreters)
