"""The artifacts that int8_savedmodel.py compares: one model, converted for each runtime, in a reusable folder.

The folder holds the inputs (calibration.npz, held_out.npz) and a directory for each runtime. RUNTIME.json is next to
each directory, written after the conversion. It holds the size and the versions of the tools, or the reason why there
is no artifact.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import numpy as np
from int8_models import Case, make
from runtimes import peers

import tfopt
from tfopt.exporting import SavedModelProcess, formats
from tfopt.exporting.verification.process import RuntimeProcess, runs

FLOAT = "keras_export"
TENSORFLOW = {FLOAT: None, "tfopt_float32": "float32", "tfopt_int8": "int8"}
# The same int8 artifact of tfopt, in a process whose calling thread computes too, as in the other runtimes.
CALLER_THREAD = "tfopt_int8_caller_thread"
CALLER_THREAD_SETTING = {"TF_ONEDNN_THREADPOOL_USE_CALLER_THREAD": "1"}
# The artifacts of TensorFlow again, in processes with one intra-op thread.
ONE_THREAD = {name: f"{name}_one_thread" for name in TENSORFLOW}
SAME_ARTIFACT = {CALLER_THREAD: "tfopt_int8", **{one: name for name, one in ONE_THREAD.items()}}
# tfopt's int8 in the other file formats, each in its own runtime.
FORMATS = {f"tfopt_{name}": name for name in formats.FORMATS if name != formats.SAVED_MODEL}
RUNTIMES = (*TENSORFLOW, *SAME_ARTIFACT, *FORMATS, *peers.REQUIREMENTS)
CALIBRATION_EXAMPLES, HELD_OUT_EXAMPLES = 32, 64


def prepare(
    case: Case, folder: Path, runtimes: Sequence[str], batch_sizes: Sequence[int], cache: Path
) -> dict[str, dict[str, Any]]:
    """Converts a model for each runtime that is not yet in the folder, and returns the records of all runtimes."""
    asked = {"batch_sizes": sorted(batch_sizes)}
    missing = [runtime for runtime in runtimes if not asked.items() <= read_record(folder, runtime).items()]
    model = make(case) if missing else None
    for runtime in missing:
        folder.mkdir(parents=True, exist_ok=True)
        for name, count, seed in (("calibration", CALIBRATION_EXAMPLES, 0), ("held_out", HELD_OUT_EXAMPLES, 1)):
            np.savez(folder / f"{name}.npz", **{model.inputs[0].name: case.inputs(count, seed)})
        print(f"converting {model.name} for {runtime}", file=sys.stderr)
        shutil.rmtree(folder / runtime, ignore_errors=True)
        started = time.perf_counter()
        try:
            record = convert(runtime, model, case.family, folder, batch_sizes, cache)
        except (peers.ConversionError, tfopt.TfoptError) as error:
            record = {"failed": str(error)}
        record["conversion_s"] = round(time.perf_counter() - started, 1)
        (folder / f"{runtime}.json").write_text(json.dumps(asked | record))
    return {runtime: read_record(folder, runtime) for runtime in runtimes}


def convert(
    runtime: str, model: keras.Model, family: str, folder: Path, batch_sizes: Sequence[int], cache: Path
) -> dict[str, Any]:
    """Returns the record of a successful conversion."""
    target = folder / runtime
    if runtime in (*TENSORFLOW, *FORMATS):
        details = export(runtime, model, folder, target)
    elif runtime in SAME_ARTIFACT:
        target.unlink(missing_ok=True)
        target.symlink_to(SAME_ARTIFACT[runtime])
        details = {"versions": {}}
    elif runtime == "inc":
        versions = peers.convert(runtime, cache, folder / FLOAT, folder / "calibration.npz", target, family, 8)
        details = {"versions": versions}
    else:
        for batch_size in batch_sizes:
            source, part = with_static_batch(model, folder, batch_size), target / f"batch_{batch_size}"
            versions = peers.convert(runtime, cache, source, folder / "calibration.npz", part, family, batch_size)
        details = {"versions": versions}
    # A runtime with a static batch size has a separate set of files for each size.
    parts = list(target.glob("batch_*")) or [target]
    return details | {"bytes_on_disk": size(min(parts))}


def export(runtime: str, model: keras.Model, folder: Path, target: Path) -> dict[str, Any]:
    precision = TENSORFLOW.get(runtime, "int8")
    if precision is None:
        model.export(target, verbose=False)
        return {"versions": {name: version(name) for name in ("tensorflow", "keras")}}
    with np.load(folder / "calibration.npz") as arrays:
        (examples,) = (arrays[name] for name in arrays.files)
    config = tfopt.ExportConfig(precision=precision, format=FORMATS.get(runtime, formats.SAVED_MODEL))
    report = tfopt.export(model, target, config, calibration_data=examples).report
    record: dict[str, Any] = {"versions": {"tfopt": version("tfopt")}}
    if report is not None:
        record["nodes"] = {"quantized": len(report.changed), "left_float": len(report.skipped)}
    return record


def with_static_batch(model: keras.Model, folder: Path, batch_size: int) -> Path:
    """Returns Keras' export of the model for one batch size only."""
    path = folder / f"float_batch_{batch_size}"
    if not path.exists():
        spec = keras.InputSpec(shape=(batch_size, *model.input_shape[1:]), dtype=model.inputs[0].dtype)
        model.export(path, verbose=False, input_signature=[spec])
    return path


class CallerThreadProcess(SavedModelProcess):
    """A SavedModel in a process where the calling thread computes a part of each kernel."""

    def _command(self) -> tuple[list[str], dict[str, Any]]:
        words, settings = super()._command()
        return words, settings | {"env": settings["env"] | CALLER_THREAD_SETTING}


def open_process(runtime: str, folder: Path, cache: Path) -> RuntimeProcess:
    if runtime in FORMATS:
        return runs(folder / runtime)(folder / runtime)
    if runtime == CALLER_THREAD:
        return CallerThreadProcess(folder / runtime)
    if runtime in SAME_ARTIFACT:
        return SavedModelProcess(folder / runtime, threads=1)
    # Intel Neural Compressor's artifact is a SavedModel that needs only TensorFlow.
    if runtime in TENSORFLOW or runtime == "inc":
        return SavedModelProcess(folder / runtime)
    threads = os.cpu_count() or 1
    return peers.PeerProcess(runtime, peers.environment(runtime, cache), folder / runtime, threads)


def read_record(folder: Path, runtime: str) -> dict[str, Any]:
    path = folder / f"{runtime}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
