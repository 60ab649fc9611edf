"""Bytes and speed of artifacts that store pruned weights without their zeros, against the dense artifact.

    python benchmarks/sparse_export.py

ResNet-50 has random weights and is pruned in one pass: the bytes and the times depend on the zeros alone. Each artifact
is loaded in a process of its own. The processes are timed in turns. "first_call_s" is the time from the start of the
process to the end of its first call, in which the weights are decoded.

Results go to benchmarks/results/sparse_export.json. It takes ten minutes on two cores.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tyro

import tfopt
from tfopt.atomic.files import write_text
from tfopt.exporting import SavedModelProcess
from tfopt.exporting.verification.process import alternate
from tfopt.hardware import detect

PRUNED = {
    "50%": tfopt.PruningConfig(target_sparsity=0.5),
    "2:4": tfopt.PruningConfig(target_sparsity=0.5, pattern="2:4"),
    "75%": tfopt.PruningConfig(target_sparsity=0.75),
    "90%": tfopt.PruningConfig(target_sparsity=0.9),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    batch_size: int = 1
    """Examples per timed call."""
    rounds: int = 8
    """Number of timing rounds."""
    seconds: float = 0.5
    """Timing per artifact and round, in seconds."""
    out: Path = Path(__file__).parent / "results" / "sparse_export.json"
    """Path of the results file."""


def main(options: Options) -> None:
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None)
    weights = model.get_weights()
    images = np.random.default_rng(0).random((options.batch_size, 224, 224, 3), dtype=np.float32)
    results: dict[str, Any] = {"model": "resnet50", "device": f"{detect().processor}, {detect().logical_cores} cores"}
    with tempfile.TemporaryDirectory() as directory:
        for name, config in PRUNED.items():
            copy = keras.applications.ResNet50(weights=None)
            copy.set_weights(weights)
            tfopt.prune(copy, config)
            dense, sparse = Path(directory, "dense"), Path(directory, "sparse")
            tfopt.export(copy, dense)
            tfopt.export(copy, sparse, tfopt.ExportConfig(sparse_weights=True))
            results[name] = measure(dense, sparse, images, options)
            print(name, results[name], flush=True)
    write_text(options.out, json.dumps(results, indent=2) + "\n")


def measure(dense: Path, sparse: Path, images: np.ndarray, options: Options) -> dict[str, Any]:
    paths = {"dense": dense, "sparse": sparse}
    first = {name: min(first_call(path, images) for _ in range(3)) for name, path in paths.items()}
    with ExitStack() as stack:
        processes = [stack.enter_context(SavedModelProcess(path)) for path in paths.values()]
        (key,) = processes[0].loaded["inputs"]
        outputs = [next(iter(process.predict({key: images}).values())) for process in processes]
        times = alternate(processes, {key: images}, options.seconds, options.rounds)
    ratios = [float(np.median(one) / np.median(other)) for one, other in zip(*times, strict=True)]
    return {
        "bytes": {name: size(path) for name, path in paths.items()},
        "gzip_bytes": {name: compressed(path) for name, path in paths.items()},
        "largest_difference": float(np.abs(outputs[0] - outputs[1]).max()),
        "first_call_s": {name: round(seconds, 2) for name, seconds in first.items()},
        "speed_against_dense": {
            "median": round(float(np.median(ratios)), 3),
            "low": round(min(ratios), 3),
            "high": round(max(ratios), 3),
        },
    }


def first_call(path: Path, images: np.ndarray) -> float:
    """Returns the seconds from the start of a process to the end of its first call."""
    start = time.perf_counter()
    with SavedModelProcess(path) as process:
        (key,) = process.loaded["inputs"]
        process.predict({key: images})
        return time.perf_counter() - start


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def compressed(path: Path) -> int:
    """Returns the size of a directory as a .tar.gz."""
    with tempfile.NamedTemporaryFile(suffix=".tar.gz") as file:
        with tarfile.open(file.name, "w:gz") as archive:
            archive.add(path, arcname="artifact")
        return Path(file.name).stat().st_size


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
