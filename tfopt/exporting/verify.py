"""Reloads an artifact in a fresh process, compares it with its source and its float baseline, and times it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.data.batches import iterate_batches
from tfopt.errors import ArtifactError, ConfigError
from tfopt.exporting.atomic import MARK
from tfopt.exporting.process import SavedModelProcess, alternate
from tfopt.exporting.saved_model import CHECKED_VALUES, MANIFEST_FORMAT, check_inputs
from tfopt.hardware import detect
from tfopt.report import Receipt

# How far outputs may lie from those recorded at export, as a ratio of norms: another processor sums in another order,
# and in int8 a sum that falls on the edge of a step may round to the next one.
TOLERANCE = {"float32": 1e-3, "int8": 5e-2}


def verify(
    artifact: str | Path,
    *,
    baseline: str | Path | None = None,
    data: Any = None,
    batch_size: int = 1,
    seconds: float = 0.3,
) -> Receipt:
    """Measures an exported artifact in a fresh process that imports only TensorFlow.

    Args:
        artifact: A directory that `tfopt.export` wrote.
        baseline: The float artifact to compare with; None means the one that the manifest names, if it is there.
        data: Labelled examples for the accuracy: (inputs, labels) arrays, or batches of such. Labels are class numbers.
        batch_size: Examples per timed call.
        seconds: How long artifact and baseline are each timed per round; they alternate for five rounds.
    Returns: A receipt; `receipt.ok` tells whether all was well, `receipt.problems` what was not.
    Raises:
        ArtifactError: The directory is not an artifact, or TensorFlow cannot serve it.
        ConfigError: The data holds no examples, no labels, or examples that do not fit the artifact's inputs.
    Example:
        >>> import keras, tempfile
        >>> from tfopt.exporting.saved_model import export
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> receipt = verify(export(model, tempfile.mkdtemp() + "/tiny").path, seconds=0.01)
        >>> receipt.ok, receipt.weight_count
        (True, 8)
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1. Received: batch_size={batch_size}.")
    path = Path(artifact)
    manifest = read_manifest(path)
    problems = _damaged_files(path, manifest)
    if problems:
        raise ArtifactError(f"{problems[0]} Export {path} again.")
    other, reason = _baseline(path, manifest, baseline)
    unavailable = {"speedup": reason, "agreement": reason, "baseline_accuracy": reason} if reason else {}
    with ExitStack() as stack:
        process = stack.enter_context(SavedModelProcess(path))
        against = stack.enter_context(SavedModelProcess(other)) if other else None
        loaded = process.loaded
        if loaded["imported"]:
            problems.append(f"The process had imported {', '.join(loaded['imported'])}.")
        signature = manifest["signature"]
        if sorted(loaded["inputs"]) != sorted(signature["inputs"]):
            problems.append(f"The signature takes {sorted(loaded['inputs'])}, the manifest says otherwise.")

        inputs = check_inputs(signature["inputs"], manifest["check"])
        parity = _parity(process.predict(inputs), manifest, problems)
        accuracy, agreement, baseline_accuracy = _accuracy(process, against, data, unavailable)

        fixed = next((spec["shape"][0] for spec in signature["inputs"].values() if spec["shape"]), None)
        batch_size = fixed or batch_size
        timed = {name: np.repeat(value[:1], batch_size, axis=0) for name, value in inputs.items()}
        times = alternate([process, *([against] if against else [])], timed, seconds)
    median = float(np.median(times[0]))
    return Receipt(
        artifact=str(artifact),
        precision=manifest["precision"],
        baseline=None if other is None else str(other),
        parity_max_abs_error=parity[0],
        parity_relative_error=parity[1],
        agreement=agreement,
        accuracy=accuracy,
        baseline_accuracy=baseline_accuracy,
        bytes_on_disk=sum(file.stat().st_size for file in _files(path)),
        gzip_bytes=_gzip_bytes(path),
        weight_count=loaded["weights"],
        zero_count=loaded["zeros"],
        batch_size=batch_size,
        latency_ms_median=median,
        latency_ms_p99=float(np.percentile(times[0], 99)),
        speedup=float(np.median(times[1])) / median if against else None,
        kernels=loaded["kernels"],
        tensorflow_version=loaded["tensorflow"],
        device=_device(loaded["devices"]),
        unavailable=unavailable,
        problems=problems,
    )


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


def _damaged_files(path: Path, manifest: dict[str, Any]) -> list[str]:
    problems = []
    for name, recorded in manifest["files"].items():
        file = path / name
        if not file.is_file():
            problems.append(f"The artifact must be complete. Received: {file}, which is missing.")
        elif hashlib.sha256(file.read_bytes()).hexdigest() != recorded["sha256"]:
            problems.append(f"The artifact must be as it was written. Received: {file}, which has changed.")
    return problems


def _baseline(path: Path, manifest: dict[str, Any], given: str | Path | None) -> tuple[Path | None, str]:
    """Returns the baseline's directory, or None and the reason."""
    if given is not None:
        read_manifest(Path(given))
        return Path(given), ""
    if manifest["baseline"] is None:
        return None, "it has no float baseline"
    found = Path(os.path.normpath(path / manifest["baseline"]))
    return (found, "") if (found / MARK).is_file() else (None, f"its baseline {found} is not there")


def _parity(
    outputs: dict[str, np.ndarray], manifest: dict[str, Any], problems: list[str]
) -> tuple[float | None, float | None]:
    """Returns the largest and the relative difference to the source model's outputs, adding what is wrong."""
    values = np.concatenate([outputs[name].reshape(-1)[:CHECKED_VALUES] for name in manifest["check"]["source"]])
    source, artifact = (
        np.concatenate([np.asarray(sample, np.float64) for sample in manifest["check"][kind].values()])
        for kind in ("source", "artifact")
    )
    if not np.isfinite(values).all():
        problems.append("The outputs hold NaN or infinity.")
        return None, None
    reproduced = _relative(values, artifact)
    tolerance = TOLERANCE[manifest["precision"]]
    if reproduced > tolerance:
        problems.append(
            f"The outputs differ from those recorded at export by {reproduced:.1e} of their norm; at most "
            f"{tolerance:.0e} is due to rounding. This machine's kernels compute something else."
        )
    return float(np.abs(values - source).max()), _relative(values, source)


def _relative(values: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(values - reference) / max(float(np.linalg.norm(reference)), 1e-12))


def _accuracy(
    process: SavedModelProcess, against: SavedModelProcess | None, data: Any, unavailable: dict[str, str]
) -> tuple[float | None, float | None, float | None]:
    """Returns accuracy, agreement with the baseline and the baseline's accuracy; why not, where there is none."""
    if data is None:
        unavailable.update(dict.fromkeys(("accuracy", "agreement", "baseline_accuracy"), "no labelled data given"))
        return None, None, None
    names = list(process.loaded["inputs"])
    batches = list(iterate_batches(data, inputs=len(names)))
    if not batches or any(labels is None for _, labels in batches):
        raise ConfigError("data must be labelled examples, (inputs, labels). Received: no examples, or no labels.")
    inputs = _join([values for values, _ in batches], process.loaded["inputs"])
    labels = np.concatenate([labels.reshape(len(labels), -1) for _, labels in batches if labels is not None])
    if len(labels) != len(next(iter(inputs.values()))):
        raise ConfigError(
            "data must have one label per example. "
            f"Received: {len(next(iter(inputs.values())))} examples and {len(labels)} labels."
        )
    classes = labels.argmax(axis=1) if labels.shape[1] > 1 else labels[:, 0]
    own = _classes(process, inputs)
    if against is None:
        return float(np.mean(own == classes)), None, None
    theirs = _classes(against, inputs)
    return float(np.mean(own == classes)), float(np.mean(own == theirs)), float(np.mean(theirs == classes))


def _join(batches: list[Any], specs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns all batches as one array per input of the artifact."""
    joined = {}
    for position, (name, spec) in enumerate(specs.items()):
        try:
            parts = [_part(values, name, position) for values in batches]
            joined[name] = np.concatenate(parts).astype(spec["dtype"])
        except (LookupError, ValueError) as error:
            raise ConfigError(f"data must give the inputs {list(specs)}. Received: no {name!r} ({error}).") from error
        shape = joined[name].shape
        wanted = spec["shape"] or [None] * len(shape)
        if len(shape) != len(wanted) or any(size not in (None, own) for size, own in zip(wanted, shape, strict=True)):
            raise ConfigError(
                f"data must have the shape of input {name!r}, {tuple(wanted)}. Received: examples of shape {shape}."
            )
    return joined


def _part(values: Any, name: str, position: int) -> np.ndarray:
    if isinstance(values, dict):
        return np.asarray(values[name])
    return np.asarray(values[position] if isinstance(values, (tuple, list)) else [values][position])


def _classes(process: SavedModelProcess, inputs: dict[str, np.ndarray]) -> np.ndarray:
    outputs = next(iter(process.predict(inputs).values()))
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        raise ConfigError(
            f"data can be given for classifiers only, whose first output is [batch, classes]. "
            f"Received: {process.path} with an output of shape {outputs.shape}. Leave data out."
        )
    return np.asarray(outputs.argmax(axis=1))


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def _gzip_bytes(path: Path) -> int:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in _files(path):
            archive.add(file, arcname=file.relative_to(path))
    return buffer.getbuffer().nbytes


def _device(devices: list[str]) -> str:
    hardware = detect()
    return hardware.gpus[0].name if "GPU" in devices and hardware.gpus else hardware.cpu_model or "CPU"


__all__ = ["read_manifest", "verify"]
