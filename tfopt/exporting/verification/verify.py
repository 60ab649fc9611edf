"""Reloads an artifact in a fresh process, compares it with its source and its float baseline, and times it."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.errors import ArtifactError, ConfigError, unknown_name
from tfopt.exporting.manifest import (
    ARTIFACT,
    FIRST_FORMAT,
    SOURCE,
    Manifest,
    TensorRecord,
    read_intact_manifest,
)
from tfopt.exporting.parity import are_numbers, compare, draw_inputs
from tfopt.exporting.signatures import DEFAULT, FLOAT
from tfopt.exporting.verification.accuracy import Scores, labelled_examples, not_scored
from tfopt.exporting.verification.baseline import find_baseline, input_names, output_names
from tfopt.exporting.verification.instructions import missing_instructions
from tfopt.exporting.verification.process import MissingKernelError, SavedModelProcess, alternate
from tfopt.hardware import detect
from tfopt.quantization.config import Metric, check_metric
from tfopt.quantization.metrics import Scorer
from tfopt.report import Receipt

# How far outputs may lie from those recorded at export, as a ratio of norms: another processor sums in another order,
# and in int8 a sum that falls on the edge of a step may round to the next one.
FLOAT_TOLERANCE, INT8_TOLERANCE = 1e-3, 5e-2


def verify(
    artifact: str | Path,
    *,
    baseline: str | Path | None = None,
    data: Any = None,
    metric: str | Metric = "accuracy",
    batch_size: int = 1,
    seconds: float = 0.3,
    signature: str | None = None,
) -> Receipt:
    """Measures an exported artifact in a fresh process that imports only TensorFlow.

    Args:
        artifact: A directory that `tfopt.export` wrote.
        baseline: The float artifact to compare with; None means the one that the manifest names, if it is there.
        data: Labelled examples for the accuracy: (inputs, labels) arrays, or batches of such. With several outputs the
            labels are a dict by output name.
        metric: What the examples are scored by. "accuracy" takes classifiers of every kind: class numbers or one-hot
            labels, one output for two classes, several labels for each example, a class for each pixel or step.
            "categorical_accuracy", "binary_accuracy" (of probabilities) and "binary_accuracy_from_logits" say which
            kind it is. For all else, a function (labels, outputs) -> float.
        batch_size: Examples per timed call.
        seconds: How long artifact and baseline are each timed per round; they alternate for five rounds.
        signature: Which of the artifact's signatures to call; None means "serving_default", or "serving_float" where
            TensorFlow lacks the kernels of the former. The receipt names the one called.
    Returns: A receipt; `receipt.ok` tells whether all was well, `receipt.problems` what was not.
    Raises:
        ArtifactError: The directory, or that of the baseline, is not an artifact as it was written, or TensorFlow
            cannot serve it; the message names the kernel that is missing.
        ConfigError: There is no such signature or metric, the baseline is no float artifact of the same inputs and
            outputs, or the data holds no examples, no labels, or such as do not fit.
    Example:
        >>> import keras, tempfile
        >>> from tfopt.exporting.saved_model import export
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> receipt = verify(export(model, tempfile.mkdtemp() + "/tiny").path, seconds=0.01)
        >>> receipt.ok, receipt.weight_count
        (True, 8)
    """
    return verify_together(
        [artifact],
        baseline=baseline,
        data=data,
        metric=metric,
        batch_size=batch_size,
        seconds=seconds,
        signature=signature,
    )[0]


def verify_together(
    artifacts: Sequence[str | Path],
    *,
    baseline: str | Path | None = None,
    data: Any = None,
    metric: str | Metric = "accuracy",
    batch_size: int = 1,
    seconds: float = 0.3,
    signature: str | None = None,
) -> list[Receipt]:
    """Measures several artifacts of one model as `verify` does, timed in the same turns: their latencies compare.

    Args:
        artifacts: Their directories; all take the same inputs.
        baseline, data, metric, batch_size, seconds, signature: As in `verify`.
    Returns: A receipt for each, in the same order.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1. Received: batch_size={batch_size}.")
    check_metric(metric)
    manifests = {Path(artifact): read_intact_manifest(Path(artifact)) for artifact in artifacts}
    for path, manifest in manifests.items():
        _check_signature(path, manifest, signature)
    baselines = {path: find_baseline(path, manifest, baseline) for path, manifest in manifests.items()}
    against = {found: read_intact_manifest(found, "baseline") for found, _ in baselines.values() if found is not None}
    known = manifests | against
    first = next(iter(manifests.values())).signature
    renamed = {path: input_names(first.inputs, path, manifest) for path, manifest in against.items()}
    examples = None if data is None else labelled_examples(data, first.inputs)
    names = {path: output_names(first.outputs, path, manifest) for path, manifest in known.items()} if examples else {}
    with ExitStack() as stack:
        processes = {path: _serve(stack, path, manifest, signature) for path, manifest in manifests.items()}
        for path, manifest in against.items():
            if path not in manifests:
                processes[path] = _serve(stack, path, manifest, None)
                processes[path].renamed = renamed[path]
        scores = None
        if examples is not None:
            given = {path: process.predict(examples.inputs) for path, process in processes.items()}
            outputs = {path: {name: given[path][own] for name, own in names[path].items()} for path in processes}
            ops = {name: spec.op for name, spec in first.outputs.items()}
            exact = outputs[next(iter(against or manifests))]
            scores = Scores.measure(Scorer(metric, examples.labels, exact, ops), outputs)
        checked = {path: _check(process, known[path]) for path, process in processes.items()}
        counted = {path: processes[path].count_weights() for path in manifests}
        timed = _one_batch(next(iter(manifests.values())), batch_size)
        milliseconds = dict(zip(processes, alternate(list(processes.values()), timed, seconds), strict=True))
    calls = {path: np.concatenate(rounds) for path, rounds in milliseconds.items()}
    medians = {path: float(np.median(times)) for path, times in calls.items()}
    receipts = []
    for path, manifest in manifests.items():
        loaded, (parity, problems) = processes[path].loaded, checked[path]
        other, no_baseline = baselines[path]
        if other is not None and other != path:
            problems = [*problems, *(f"Of the baseline: {problem}" for problem in checked[other][1])]
        absent = ("baseline", "speedup", "speedup_range")
        receipts.append(
            Receipt(
                artifact=str(path),
                precision=manifest.precision,
                signature=processes[path].signature,
                baseline=None if other is None else str(other),
                parity_max_abs_error=parity[0],
                parity_relative_error=parity[1],
                agreement=scores.agreement(path, other) if scores else None,
                accuracy=scores.accuracy(path) if scores else None,
                baseline_accuracy=scores.accuracy(other) if scores else None,
                scores=scores.by_name(path) if scores else {},
                baseline_scores=scores.by_name(other) if scores else {},
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
                unavailable=(dict.fromkeys(absent, no_baseline) if other is None else {})
                | not_scored(scores, no_baseline),
                problems=problems,
            )
        )
    return receipts


def _check_signature(path: Path, manifest: Manifest, signature: str | None) -> None:
    if signature is not None and signature not in manifest.signatures:
        raise ConfigError(
            f"{unknown_name('signature', signature, manifest.signatures)} These are the signatures of {path}."
        )


def _serve(stack: ExitStack, path: Path, manifest: Manifest, signature: str | None) -> SavedModelProcess:
    """Starts a process whose TensorFlow has every kernel of the signature that it calls."""
    inputs = draw_inputs(manifest.signature.inputs, manifest.check)
    try:
        with ExitStack() as tried:
            process = tried.enter_context(SavedModelProcess(path, signature or DEFAULT))
            _check_graph(process, manifest)
            process.predict(inputs)
            stack.push(tried.pop_all())
    except MissingKernelError as error:
        if signature is None and FLOAT in manifest.signatures:
            process = stack.enter_context(SavedModelProcess(path, FLOAT))
            _check_graph(process, manifest)
            return process
        raise ArtifactError(
            f"TensorFlow must have the kernels that the artifact needs: {manifest.requires}. Received: {path} on a "
            f"TensorFlow without {error.op}. Serve it on such a machine, or export it with float_fallback=True and "
            f"call the signature {FLOAT!r}."
        ) from error
    return process


def _check_graph(process: SavedModelProcess, manifest: Manifest) -> None:
    """Raises ArtifactError unless the graph takes and gives what the manifest says."""
    for kind in ("inputs", "outputs"):
        said: dict[str, TensorRecord] = getattr(manifest.signature, kind)
        loaded = {name: TensorRecord.of(spec) for name, spec in process.loaded[kind].items()}
        alike = said.keys() == loaded.keys() and all(spec.fits(loaded[name]) for name, spec in said.items())
        if kind == "inputs":  # shapes of outputs TensorFlow may know better when it has loaded the graph
            alike = alike and all(spec.shape == loaded[name].shape for name, spec in said.items())
        if not alike:
            wanted, received = (
                ", ".join(f"{name} {spec}" for name, spec in sorted(specs.items())) for specs in (said, loaded)
            )
            raise ArtifactError(
                f"The graph's {kind} must be those that its manifest says: {wanted}. Received: {process.path}, whose "
                f"{kind} are {received}. Export it again."
            )


def _ratios(baseline: list[list[float]], artifact: list[list[float]]) -> tuple[float, float]:
    """Returns the least and the greatest ratio of the medians of one round."""
    ratios = [float(np.median(one) / np.median(other)) for one, other in zip(baseline, artifact, strict=True)]
    return min(ratios), max(ratios)


def _check(process: SavedModelProcess, manifest: Manifest) -> tuple[tuple[float | None, float | None], list[str]]:
    """Returns (largest, relative) difference to the source model's outputs, and what is wrong."""
    problems = []
    if process.loaded["imported"]:
        problems.append(f"The process had imported {', '.join(process.loaded['imported'])}.")
    missing = missing_instructions(manifest, process.signature)
    if missing is not None:
        problems.append(missing)
    inputs = draw_inputs(manifest.signature.inputs, manifest.check)
    # The check's inputs have this artifact's own names, whatever it calls those of another.
    outputs = process.predict({_given_as(process, name): value for name, value in inputs.items()})
    recorded, first = manifest.check.outputs, manifest.check.format == FIRST_FORMAT
    called = ARTIFACT if process.signature == DEFAULT else process.signature
    if not are_numbers(outputs, recorded[called]):
        return (None, None), [*problems, "The outputs hold NaN or infinity."]
    _, reproduced = compare(outputs, recorded[called], first)
    in_int8 = manifest.precision == "int8" and process.signature == DEFAULT
    tolerance = INT8_TOLERANCE if in_int8 else FLOAT_TOLERANCE
    if not reproduced <= tolerance:
        problems.append(
            f"The outputs differ from those recorded at export by {reproduced:.1e} of their norm; at most "
            f"{tolerance:.0e} is due to rounding. This machine's kernels compute something else."
        )
    return compare(outputs, recorded[SOURCE], first), problems


def _given_as(process: SavedModelProcess, name: str) -> str:
    """Returns the name under which to give a process an input that it calls `name`."""
    return next((given for given, own in process.renamed.items() if own == name), name)


def _one_batch(manifest: Manifest, batch_size: int) -> dict[str, np.ndarray]:
    """Returns inputs of the batch size asked for, or of the one that the signature fixes."""
    specs = manifest.signature.inputs
    fixed = next((spec.shape[0] for spec in specs.values() if spec.shape), None)
    inputs = draw_inputs(specs, manifest.check)
    return {name: np.repeat(value[:1], fixed or batch_size, axis=0) for name, value in inputs.items()}


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
