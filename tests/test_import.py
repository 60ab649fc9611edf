"""What importing tfopt loads and touches, and that every public name is documented."""

import importlib
import importlib.util
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import tfopt

SLOW = ("tensorflow", "keras", "tf_keras", "tensorflow_model_optimization", "matplotlib", "sklearn", "pydantic", "tyro")
PUBLIC = sorted(tfopt.__all__)


def test_importing_tfopt_loads_nothing_slow_and_prints_nothing(fresh_python):
    done = fresh_python("-X", "importtime", "-c", "import tfopt", check=True)
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "tfopt" in imported
    assert not imported & set(SLOW)
    assert done.stdout == ""
    assert all(line.startswith("import time:") for line in done.stderr.splitlines())


STATE = """
import os, random, sys, threading, warnings
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

def state():
    return {
        "policy": keras.config.dtype_policy().name,
        "floatx": keras.config.floatx(),
        "numpy": repr(np.random.get_state()),
        "numpy errors": np.geterr(),
        "python": random.getstate(),
        "filters": list(warnings.filters),
        "environment": dict(os.environ),
        "context": context.context()._initialized,
        "seed": context.global_seed(),
        "soft placement": tf.config.get_soft_device_placement(),
        "devices": tf.config.get_visible_devices(),
    }

import pydantic, tyro, rich, jinja2, psutil, pynvml, tomli_w  # what is theirs is not ours
before = state()
for name in ("CI", "TF_BUILD", "JENKINS_URL"):  # packages that report their use do not in CI
    os.environ.pop(name, None)
before["environment"], threads = dict(os.environ), threading.active_count()
forbidden, seen = {"os.fork", "subprocess.Popen", "socket.connect", "socket.getaddrinfo"}, []
sys.addaudithook(lambda event, arguments: seen.append((event, arguments)) if event in forbidden else None)
import pkgutil, importlib, tfopt
from tfopt import *
for module in pkgutil.walk_packages(tfopt.__path__, "tfopt."):
    importlib.import_module(module.name)
tfopt.Recipe(name="x", training=tfopt.TrainingConfig(optimizer="adamw"), pruning=tfopt.PruningConfig()).to_toml()
tfopt.plan()
after = state()
assert before["context"] is False
for name in before:
    assert before[name] == after[name], (name, before[name], after[name])
assert threading.active_count() == threads, threading.enumerate()
assert not seen, seen
# The devices can still be configured, which TensorFlow refuses once it has started.
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
print(*{name.split(".")[0] for name in sys.modules})
"""


def test_importing_everything_and_planning_changes_no_global_state_and_starts_no_device_thread_or_process(fresh_python):
    loaded = fresh_python("-c", STATE, imported="keras", check=True).stdout.split()
    assert "tensorflow" in loaded
    # Only a tf_keras model or a schedule of theirs needs these.
    assert not set(loaded) & {"tensorflow_model_optimization", "tf_keras"}


def test_star_import_gives_every_name():
    names = {}
    exec("from tfopt import *", names)
    assert set(tfopt.__all__) <= set(names)
    assert len(set(tfopt.__all__)) == len(tfopt.__all__)
    assert set(tfopt.__all__) <= set(dir(tfopt))


@pytest.mark.parametrize("package", ["data", "exporting", "pruning", "quantization", "training"])
def test_a_function_is_not_hidden_by_the_module_it_stands_in(package):
    """`from tfopt.training import plan` is the function, also when tfopt/training/plan.py was imported before."""
    found = importlib.import_module(f"tfopt.{package}")
    for module in pkgutil.iter_modules(found.__path__):
        importlib.import_module(f"tfopt.{package}.{module.name}")
    assert found.__all__
    assert not [name for name in found.__all__ if isinstance(getattr(found, name), ModuleType)]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nosuch"):
        _ = tfopt.nosuch


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring(name):
    value = getattr(tfopt, name)
    first = (inspect.getdoc(value) or "").split("\n\n")[0]
    assert first.endswith((".", ":")), first
    assert not first.startswith(f"{name}("), "a dataclass without a docstring of its own"


def has_example(value):
    """Records that only passes return need none: there is nothing for a user to call."""
    return inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, Exception))


RETURNED = {
    "RunResult",
    "Artifact",
    "BatchSizeReport",
    "CachedTeacher",
    "CompressedModel",
    "CompressionReport",
    "FlopCount",
    "Inspection",
    "ModelCost",
    "Plan",
    "PublishedVersion",
    "QuantizedModel",
    "Receipt",
    "TrainingMemory",
    "TuneReport",
}


@pytest.mark.parametrize(
    "name", [name for name in PUBLIC if has_example(getattr(tfopt, name)) and name not in RETURNED]
)
def test_every_public_function_and_class_has_an_example(name):
    docstring = inspect.getdoc(getattr(tfopt, name)) or ""
    assert "Example:" in docstring
    assert ">>>" in docstring


@pytest.mark.parametrize("registry", ["models.BUILDERS", "data.SOURCES"])
def test_what_is_registered_is_documented_with_an_example(registry):
    package, name = registry.split(".")
    for function in getattr(getattr(tfopt, package), name).values():
        assert ">>>" in inspect.getdoc(function)


def test_the_stub_is_what_type_checkers_read():
    spec = importlib.util.find_spec("tfopt")
    assert Path(spec.origin).with_suffix(".pyi").is_file()
    assert Path(spec.origin).with_name("py.typed").is_file()
