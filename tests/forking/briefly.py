"""What the tests change in tfopt, in their own process and in forked ones: no import is waited for, times are brief."""

import importlib
import inspect
from unittest.mock import patch

from tfopt.exporting import SavedModelProcess, verify
from tfopt.exporting.verification import process
from tfopt.runner import work
from tfopt.trials import process as trials

measurement = importlib.import_module("tfopt.data.measurement.measure")  # the package has a function of its name
VERIFIED_S = inspect.signature(verify).parameters["seconds"].default  # of each artifact; a recipe has three
time_calls = SavedModelProcess.time_calls


def briefly(served, inputs, seconds, at_least=3):
    return time_calls(served, inputs, 0.02 if seconds == VERIFIED_S else seconds, at_least)


def measure_briefly(*arguments, **options):
    with patch.multiple(measurement, STARTS=0, LEAST_S=0.0, FEWEST_STEPS=2):
        return measurement.measure(*arguments, **options)


def work_briefly(interpreters):
    """Runs artifacts and trials in forks, by the interpreters of `fresh_python`, and measures briefly in a run."""
    process.PYTHON = str(interpreters["tensorflow"])
    trials.PYTHON = str(interpreters["tfopt"])
    SavedModelProcess.time_calls = briefly
    work.MEASURED_SECONDS, work.measure = 0.1, measure_briefly


def work_briefly_in_forks(interpreters):
    """The same in a process that is forked. The workers that it launches are forks too."""
    work_briefly(interpreters)
    importlib.import_module("tfopt.training.distributed.launch").PYTHON = str(interpreters["tfopt"])


def program(tests, interpreters):
    """Returns the program that calls it in the server of such processes."""
    paths = {name: str(path) for name, path in interpreters.items()}
    return (
        f"import sys; sys.path.insert(0, {str(tests)!r}); from forking import briefly; del sys.path[0]\n"
        f"briefly.work_briefly_in_forks({paths!r})\n"
    )
