"""Reloads an artifact in a fresh process, compares it with its source and its float baseline, and times it."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.errors import ArtifactError, ConfigError
from tfopt.exporting.accuracy import labelled_examples
from tfopt.exporting.atomic import MARK
from tfopt.exporting.instructions import missing_instructions
from tfopt.exporting.manifest import CHECKED_VALUES, check_inputs, read_intact_manifest, read_manifest
from tfopt.exporting.process import MissingKernelError, SavedModelProcess, alternate
from tfopt.exporting.signatures import DEFAULT, FLOAT
from tfopt.hardware import detect
from tfopt.report import Receipt

# How far outputs may lie from those recorded at export, as a ratio of norms: another processor sums in another order,
# and in int8 a sum that falls on the edge of a step may round to the next one.
FLOAT_TOLERANCE, INT8_TOLERANCE = 1e-3, 5e-2
NO_DATA = "no labelled data given"


def verify(
    artifact: str | Path,
    *,
    baseline: str | Path | None = None,
    data: Any = None,
    batch_size: int = 1,
    seconds: float = 0.3,
    signature: str | None = None,
) -> Receipt:
    """Measures an exported artifact in a fresh process that imports only TensorFlow.

    Args:
        artifact: A directory that `tfopt.export` wrote.
        baseline: The float artifact to compare with; None means the one that the manifest names, if it is there.
        data: Labelled examples for the accuracy: (inputs, labels) arrays, or batches of such. Labels are class numbers.
        batch_size: Examples per timed call.
        seconds: How long artifact and baseline are each timed per round; they alternate for five rounds.
        signature: Which of the artifact's signatures to call; None means "serving_default", or "serving_float" where
            TensorFlow lacks the kernels of the former. The receipt names the one called.
    Returns: A receipt; `receipt.ok` tells whether all was well, `receipt.problems` what was not.
    Raises:
        ArtifactError: The directory is not an artifact, or TensorFlow cannot serve it; the message names the kernel
            that is missing.
        ConfigError: The data holds no examples, no labels, or examples that do not fit the artifact's inputs.
    Example:
        >>> import keras, tempfile
        >>> from tfopt.exporting.saved_model import export
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> receipt = verify(export(model, tempfile.mkdtemp() + "/tiny").path, seconds=0.01)
        >>> receipt.ok, receipt.weight_count
        (True, 8)
    """
    return verify_together(
        [artifact], baseline=baseline, data=data, batch_size=batch_size, seconds=seconds, signature=signature
    )[0]


def verify_together(
    artifacts: Sequence[str | Path],
    *,
    baseline: str | Path | None = None,
    data: Any = None,
    batch_size: int = 1,
    seconds: float = 0.3,
    signature: str | None = None,
) -> list[Receipt]:
    """Measures several artifacts of one model as `verify` does, timed in the same turns: their latencies compare.

    Args:
        artifacts: Their directories; all take the same inputs.
        baseline, data, batch_size, seconds, signature: As in `verify`.
    Returns: A receipt for each, in the same order.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1. Received: batch_size={batch_size}.")
    manifests = {Path(artifact): read_intact_manifest(Path(artifact)) for artifact in artifacts}
    baselines = {path: _baseline(path, manifest, baseline) for path, manifest in manifests.items()}
    against = [found for found, _ in baselines.values() if found is not None]
    with ExitStack() as stack:
        processes = {path: _serve(stack, path, manifest, signature) for path, manifest in manifests.items()}
        processes |= {path: stack.enter_context(SavedModelProcess(path)) for path in against if path not in manifests}
        first = next(iter(processes.values()))
        for path in set(against).difference(manifests):
            processes[path].renamed = _renamed(first.loaded["inputs"], processes[path])
        # In the model's order, by which a tuple of inputs is read: a loaded SavedModel has them in any.
        specs = {name: first.loaded["inputs"][name] for name in next(iter(manifests.values()))["signature"]["inputs"]}
        examples = None if data is None else labelled_examples(data, specs)
        classes = {path: examples.predict(process) for path, process in processes.items()} if examples else {}
        checked = {path: _check(processes[path], manifest) for path, manifest in manifests.items()}
        counted = {path: processes[path].count_weights() for path in manifests}
        timed = _one_batch(next(iter(manifests.values())), batch_size)
        milliseconds = dict(zip(processes, alternate(list(processes.values()), timed, seconds), strict=True))
    calls = {path: np.concatenate(rounds) for path, rounds in milliseconds.items()}
    medians = {path: float(np.median(times)) for path, times in calls.items()}
    receipts = []
    for path, manifest in manifests.items():
        loaded, (parity, problems) = processes[path].loaded, checked[path]
        other, no_baseline = baselines[path]
        absent = ("baseline", "speedup", "speedup_range")
        unavailable = dict.fromkeys(absent, no_baseline) if other is None else {}
        for name in ("agreement", "baseline_accuracy"):
            if other is None or examples is None:
                unavailable[name] = no_baseline or NO_DATA
        if examples is None:
            unavailable["accuracy"] = NO_DATA
        receipts.append(
            Receipt(
                artifact=str(path),
                precision=manifest["precision"],
                signature=processes[path].signature,
                baseline=None if other is None else str(other),
                parity_max_abs_error=parity[0],
                parity_relative_error=parity[1],
                agreement=float(np.mean(classes[path] == classes[other])) if examples and other else None,
                accuracy=float(np.mean(classes[path] == examples.classes)) if examples else None,
                baseline_accuracy=float(np.mean(classes[other] == examples.classes)) if examples and other else None,
                bytes_on_disk=sum(file.stat().st_size for file in _files(path)),
                gzip_bytes=_gzip_bytes(path),
                weight_count=counted[path]["weights"],
                zero_count=counted[path]["zeros"],
                batch_size=len(next(iter(timed.values()))),
                latency_ms_median=medians[path],
                latency_ms_p99=float(np.percentile(calls[path], 99)),
                speedup=medians[other] / medians[path] if other else None,
                speedup_range=_ratios(milliseconds[other], milliseconds[path]) if other else None,
                kernels=loaded["kernels"],
                tensorflow_version=loaded["tensorflow"],
                device=_device(loaded["devices"]),
                unavailable=unavailable,
                problems=problems,
            )
        )
    return receipts


def _serve(stack: ExitStack, path: Path, manifest: dict[str, Any], signature: str | None) -> SavedModelProcess:
    """Starts a process whose TensorFlow has every kernel of the signature that it calls."""
    inputs = check_inputs(manifest["signature"]["inputs"], manifest["check"])
    try:
        process = stack.enter_context(SavedModelProcess(path, signature or DEFAULT))
        process.predict(inputs)
    except MissingKernelError as error:
        if signature is None and FLOAT in manifest.get("signatures", ()):
            process.close()
            return stack.enter_context(SavedModelProcess(path, FLOAT))
        raise ArtifactError(
            f"TensorFlow must have the kernels that the artifact needs: {manifest['requires']}. Received: {path} on a "
            f"TensorFlow without {error.op}. Serve it on such a machine, or export it with float_fallback=True and "
            f"call the signature {FLOAT!r}."
        ) from error
    return process


def _ratios(baseline: list[list[float]], artifact: list[list[float]]) -> tuple[float, float]:
    """Returns the least and the greatest ratio of the medians of one round."""
    ratios = [float(np.median(one) / np.median(other)) for one, other in zip(baseline, artifact, strict=True)]
    return min(ratios), max(ratios)


def _check(process: SavedModelProcess, manifest: dict[str, Any]) -> tuple[tuple[float | None, float | None], list[str]]:
    """Returns (largest, relative) difference to the source model's outputs, and what is wrong."""
    problems = []
    if process.loaded["imported"]:
        problems.append(f"The process had imported {', '.join(process.loaded['imported'])}.")
    missing = missing_instructions(manifest, process.signature)
    if missing is not None:
        problems.append(missing)
    wanted = manifest["signature"]["inputs"]
    if sorted(process.loaded["inputs"]) != sorted(wanted):
        problems.append(f"The signature takes {sorted(process.loaded['inputs'])}, the manifest says otherwise.")
    outputs = process.predict(check_inputs(wanted, manifest["check"]))
    return _parity(outputs, manifest, process.signature, problems), problems


def _one_batch(manifest: dict[str, Any], batch_size: int) -> dict[str, np.ndarray]:
    """Returns inputs of the batch size asked for, or of the one that the signature fixes."""
    specs = manifest["signature"]["inputs"]
    fixed = next((spec["shape"][0] for spec in specs.values() if spec["shape"]), None)
    inputs = check_inputs(specs, manifest["check"])
    return {name: np.repeat(value[:1], fixed or batch_size, axis=0) for name, value in inputs.items()}


def _renamed(inputs: Mapping[str, Any], baseline: SavedModelProcess) -> dict[str, str]:
    """Returns what the baseline calls the artifact's inputs: Keras numbers unnamed ones anew in every process.

    Raises:
        ConfigError: They cannot be told apart by their shapes and types, or are other inputs.
    """
    others = baseline.loaded["inputs"]
    if inputs.keys() == others.keys():
        return {}
    if len(inputs) == len(others) == 1:
        return dict(zip(inputs, others, strict=True))
    pairs = {name: [other for other, spec in others.items() if spec == inputs[name]] for name in inputs}
    if len(inputs) != len(others) or any(len(found) != 1 for found in pairs.values()):
        raise ConfigError(
            f"baseline must take the artifact's inputs, {sorted(inputs)}. Received: {baseline.path}, which takes "
            f"{sorted(others)}. Name the inputs of both models alike, as keras.Input(..., name='image') does."
        )
    return {name: found[0] for name, found in pairs.items()}


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
    outputs: dict[str, np.ndarray], manifest: dict[str, Any], signature: str, problems: list[str]
) -> tuple[float | None, float | None]:
    """Returns the largest and the relative difference to the source model's outputs, adding what is wrong."""
    values = np.concatenate([outputs[name].reshape(-1)[:CHECKED_VALUES] for name in manifest["check"]["source"]])
    source, artifact = (
        np.concatenate([np.asarray(sample, np.float64) for sample in manifest["check"][kind].values()])
        for kind in ("source", "artifact" if signature == DEFAULT else signature)
    )
    if not np.isfinite(values).all():
        problems.append("The outputs hold NaN or infinity.")
        return None, None
    reproduced = _relative(values, artifact)
    in_int8 = manifest["precision"] == "int8" and signature == DEFAULT
    tolerance = INT8_TOLERANCE if in_int8 else FLOAT_TOLERANCE
    if reproduced > tolerance:
        problems.append(
            f"The outputs differ from those recorded at export by {reproduced:.1e} of their norm; at most "
            f"{tolerance:.0e} is due to rounding. This machine's kernels compute something else."
        )
    return float(np.abs(values - source).max()), _relative(values, source)


def _relative(values: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(values - reference) / max(float(np.linalg.norm(reference)), 1e-12))


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
