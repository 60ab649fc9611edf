"""Runs Python against a stand-in for the NVIDIA driver, so that the real pynvml is exercised without a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")


@pytest.fixture(scope="session")
def run_with_fake_nvml(tmp_path_factory, fresh_python):
    """Returns a function that runs a program in a fresh process that finds the stand-in as libnvidia-ml.so.1."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler to build the stand-in for NVIDIA's driver")
    folders = {"new": tmp_path_factory.mktemp("fake_nvml"), "old": tmp_path_factory.mktemp("old_nvml")}
    for name, folder in folders.items():
        age = ["-DOLD_DRIVER"] if name == "old" else []
        library = folder / "libnvidia-ml.so.1"
        subprocess.run([compiler, *age, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, SOURCE], check=True)

    def run(program: str, driver: str = "new", **environment: str) -> subprocess.CompletedProcess:
        inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return fresh_python("-c", program, env={**inherited, "LD_LIBRARY_PATH": str(folders[driver]), **environment})

    return run
