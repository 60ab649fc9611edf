"""The manifest beside an artifact: what it is, what it needs, its files' digests, and what it computed at export."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.data.batches import iterate_batches
from tfopt.errors import ArtifactError, UnsupportedModelError
from tfopt.exporting.atomic import MARK
from tfopt.exporting.instructions import kernels_that_need_vnni
from tfopt.exporting.signatures import DEFAULT, FLOAT
from tfopt.graph import FrozenGraph

MANIFEST_FORMAT = 1
CHECKED_EXAMPLES = 2
CHECKED_VALUES = 64
OPEN_SIZE = 64  # of an axis that the model leaves open and no example shows


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns an artifact's manifest.

    Raises:
        ArtifactError: There is none, or it cannot be read.
    """
    try:
        manifest: dict[str, Any] = json.loads((path / MARK).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(
            f"artifact must be a directory that tfopt.export wrote. Received: {path}, which holds no {MARK}."
        ) from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"The manifest must be readable JSON. Received: {path / MARK} ({error}).") from error
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT or "tfopt" not in manifest:
        raise ArtifactError(
            f"The manifest must be one that tfopt.export wrote, of format {MANIFEST_FORMAT}. "
            f"Received: {path / MARK}, which is another. Export {path} again."
        )
    return manifest


def read_intact_manifest(path: Path) -> dict[str, Any]:
    """Returns an artifact's manifest, all the files that it lists being as they were written.

    Raises:
        ArtifactError: There is no manifest, or a file is missing or has changed.
    """
    manifest = read_manifest(path)
    problems = _damaged_files(path, manifest)
    if problems:
        raise ArtifactError(f"{problems[0]} Export {path} again.")
    return manifest


def _damaged_files(path: Path, manifest: dict[str, Any]) -> list[str]:
    problems = []
    for name, recorded in manifest["files"].items():
        file = path / name
        if not file.is_file():
            problems.append(f"The artifact must be complete. Received: {file}, which is missing.")
        elif hashlib.sha256(file.read_bytes()).hexdigest() != recorded["sha256"]:
            problems.append(f"The artifact must be as it was written. Received: {file}, which has changed.")
    return problems


def requirements(graphs: Mapping[str, FrozenGraph]) -> str:
    """Returns what an artifact needs to be served."""
    needs = "TensorFlow"
    kernels = special_kernels(graphs[DEFAULT])
    if kernels:
        needs += f" with oneDNN's int8 kernels, as in its builds for x86-64 ({', '.join(kernels)})"
        right = bool(kernels_that_need_vnni(graphs[DEFAULT]))
        needs += f"; int8 instructions (VNNI, AMX) for {'right results' if right else 'speed'}"
        if FLOAT in graphs:
            needs += f". Signature {FLOAT!r} needs TensorFlow only"
    return needs


def special_kernels(graph: FrozenGraph) -> list[str]:
    """Returns the ops of a graph that not every build of TensorFlow has kernels for."""
    return sorted({node.op for node in graph.graph_def.node if node.op.startswith("_")})


def describe(spec: tf.TensorSpec) -> dict[str, Any]:
    """Returns a TensorSpec as plain values; an open size is None."""
    return {"shape": spec.shape.as_list() if spec.shape.rank is not None else None, "dtype": spec.dtype.name}


def digests(directory: Path) -> dict[str, dict[str, Any]]:
    """Returns size and SHA-256 of every file below a directory."""
    return {
        path.relative_to(directory).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def check_inputs(inputs: Mapping[str, Mapping[str, Any]], check: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the inputs of the check, the same in every process: seeded, uniform over the range of real inputs."""
    generator = np.random.default_rng(0)
    values = {}
    for name, spec in inputs.items():
        low, high = check["ranges"][name]
        values[name] = generator.uniform(low, high, check["shapes"][name]).astype(np.dtype(spec["dtype"]))
    return values


def record_check(source: FrozenGraph, graphs: Mapping[str, FrozenGraph], data: Any) -> dict[str, Any]:
    """Records what the source and the artifact's graphs give on the same inputs, for verify to compare with."""
    graph = graphs[DEFAULT]
    specs = {name: describe(spec) for name, spec in graph.inputs.items()}
    check = {
        "ranges": {name: [0.0, 1.0] for name in specs},
        "shapes": {name: [size or OPEN_SIZE for size in (spec["shape"] or [None])] for name, spec in specs.items()},
    }
    batch = None if data is None else next(iterate_batches(data, inputs=len(specs)), None)
    if batch is not None:
        fed = {name: value.numpy() for name, value in graph.feed(batch[0]).items()}
        check["ranges"] = {name: [float(value.min()), float(value.max())] for name, value in fed.items()}
        check["shapes"] = {name: list(value.shape) for name, value in fed.items()}
    for name, shape in check["shapes"].items():
        shape[:1] = [(specs[name]["shape"] or [None])[0] or CHECKED_EXAMPLES]
    inputs = check_inputs(specs, check)
    try:
        outputs = {"source": source.predict(inputs), "artifact": graph.predict(inputs)}
        outputs |= {name: other.predict(inputs) for name, other in graphs.items() if name != DEFAULT}
    except tf.errors.OpError as error:
        raise UnsupportedModelError(
            f"The model must run on inputs of the shapes {check['shapes']}. Received: {graph.name!r}, which fails "
            f"({str(error).splitlines()[0]}). Pass calibration_data with examples of a size that it takes."
        ) from error
    return check | {kind: {name: _sample(value) for name, value in values.items()} for kind, values in outputs.items()}


def _sample(values: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in values.reshape(-1)[:CHECKED_VALUES].astype(np.float64)]
