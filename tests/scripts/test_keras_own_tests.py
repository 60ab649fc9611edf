"""Keras' own tests of training pass under the hook of `tfopt accelerate` where they pass alone."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import keras
import pytest

HERE = Path(__file__).parent
KERAS = Path(keras.__file__).parent / "src"
# Those that compile and fit, and how many there are at least.
PARTS = [(("trainers/trainer_test.py",), 60), (("models/model_test.py", "callbacks", "distillation"), 60)]
LEFT_OUT = ("steps", "quantize", "jax", "torch", "grain", "Orbax", "TensorBoard")


def failures(path, tests, **environment):
    """Returns how many of Keras' tests ran, and the names of those that failed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        "-p",
        "keras_under_hook",
    ]
    python = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    ended = subprocess.run(
        [*command, f"--rootdir={KERAS}", f"--junitxml={path}", *tests],
        env={**os.environ, "PYTHONPATH": python, "KERAS_BACKEND": "tensorflow", **environment},
        cwd=path.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode in (0, 1), ended.stdout[-3000:] + ended.stderr[-3000:]
    cases = list(ElementTree.parse(path).iter("testcase"))
    failed = [each for each in cases if each.find("failure") is not None or each.find("error") is not None]
    names = [(each.get("classname").split("."), each.get("name")) for each in failed]
    return len(cases), [f"{KERAS / Path(*words[:-1])}.py::{words[-1]}::{name}" for words, name in names]


@pytest.mark.slow  # some 200 tests of Keras
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("parts", "least"), PARTS)
def test_what_passes_alone_passes_under_the_hook(parts, least, tmp_path):
    # Those with steps_per_execution have no step of tfopt's; quantize knows nothing of fit; the others need packages
    # that the project's files do not install.
    chosen = [*(str(KERAS / name) for name in parts), "-k", f"not {' and not '.join(LEFT_OUT)}"]
    # It asks for a conftest that Keras does not ship.
    chosen.append(f"--ignore={KERAS / 'callbacks' / 'remote_monitor_test.py'}")
    ran, failed = failures(tmp_path / "hooked.xml", chosen)
    assert ran >= least
    also_alone = failures(tmp_path / "alone.xml", failed, ALONE="1")[1] if failed else []
    assert sorted(set(failed) - set(also_alone)) == []
