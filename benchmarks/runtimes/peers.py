"""The other runtimes: their packages, their environments and their worker processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tfopt.exporting import SavedModelProcess
from tfopt.exporting.formats import FORMATS, SAVED_MODEL

BENCHMARKS = Path(__file__).parents[1]
# The key is the name of the worker's module.
REQUIREMENTS = {
    "inc": ("neural-compressor-tf==3.10", "tensorflow==2.21.0"),
    "litert": ("ai-edge-litert==2.3.0", "ai-edge-quantizer==0.10.0", "tensorflow==2.21.0"),
    "onnxruntime": ("onnxruntime==1.31.1", "onnx==1.23.2", "tf2onnx==1.17.0", "sympy==1.14.0", "tensorflow==2.21.0"),
    "openvino": ("openvino==2026.4.1", "nncf==3.4.0"),
}


class ConversionError(Exception):
    """A runtime cannot be installed, or does not accept the model."""


def environment(runtime: str, cache: Path) -> Path:
    """Returns the Python of a runtime's virtual environment. Creates it unless one with the same packages exists."""
    directory = cache / runtime
    wanted = "\n".join(REQUIREMENTS[runtime])
    stamp = directory / "installed.txt"  # written last, so that an interrupted installation is repeated
    python = directory / "bin" / "python"
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"installing {', '.join(REQUIREMENTS[runtime])} in {directory}", file=sys.stderr)
        run(sys.executable, "-m", "venv", "--clear", str(directory))
        run(str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *REQUIREMENTS[runtime])
        stamp.write_text(wanted)
    return python


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line or "Error" in line]
        raise ConversionError(errors[0] if errors else f"{' '.join(command)} ended with code {done.returncode}")


def convert(
    runtime: str, cache: Path, source: Path, calibration: Path, target: Path, family: str, batch_size: int
) -> dict[str, str]:
    """Quantizes a float SavedModel for a runtime, in a separate process.

    Returns: The versions of the runtime's packages.
    """
    target.mkdir(parents=True)
    paths = {"source": source, "calibration": calibration, "target": target}
    command = {name: str(path.absolute()) for name, path in paths.items()}
    command |= {"do": "convert", "family": family, "batch_size": batch_size}
    words, settings = worker(runtime, environment(runtime, cache))
    done = subprocess.run(words, input=json.dumps(command), capture_output=True, text=True, check=False, **settings)
    if not done.stdout:
        raise ConversionError(f"exit code {done.returncode}: {' '.join(done.stderr.split()[-30:])}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise ConversionError(answer["error"].splitlines()[0])
    return answer["versions"]


def worker(runtime: str, python: Path) -> tuple[list[str], dict[str, Any]]:
    """Returns the command of a runtime's worker, and the arguments to start it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    # Run as a module: a script's own directory would be first in the path, and it contains onnxruntime.py.
    command = [str(python), "-m", f"runtimes.{runtime}"]
    return command, {"cwd": BENCHMARKS, "env": {"TF_CPP_MIN_LOG_LEVEL": "2", **inherited}}


class PeerProcess(SavedModelProcess):
    """A runtime's worker in the runtime's own environment, with the methods of tfopt's SavedModelProcess."""

    def __init__(self, runtime: str, python: Path, path: Path, threads: int) -> None:
        super().__init__(path)
        self.runtime, self.python, self.threads = runtime, python, threads
        self.format = FORMATS[SAVED_MODEL]  # its worker takes the directory

    def _command(self) -> tuple[list[str], dict[str, Any]]:
        return worker(self.runtime, self.python)

    def _options(self) -> dict[str, Any]:
        return {"threads": self.threads}
