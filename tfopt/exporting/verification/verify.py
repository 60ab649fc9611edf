"""Measures artifacts in fresh processes: their outputs, accuracy, size and speed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Gt, Le

from tfopt.atomic.directories import MARK
from tfopt.errors import ArtifactError, ConfigError, unknown_name
from tfopt.exporting.manifest import (
    NEEDS,
    RANDOM,
    Manifest,
    TensorRecord,
    check_is_artifact,
    read_intact_manifest,
    read_manifest,
)
from tfopt.exporting.parity import draw_batch
from tfopt.exporting.serving_settings import in_words
from tfopt.exporting.verification.inputs import matched_names
from tfopt.exporting.verification.measured import MeasuredArtifact
from tfopt.exporting.verification.process import alternate
from tfopt.exporting.verification.scoring import Scoreboard, chunks, not_scored
from tfopt.exporting.verification.sizes import bytes_on_disk, gzip_bytes
from tfopt.exporting.verification.threads import ThreadCounts, measure_threads
from tfopt.hardware import detect
from tfopt.report import Receipt
from tfopt.report.ranking import share_of
from tfopt.settings.validation import check_value
from tfopt.tasks.scorer import Metric, check_metric
from tfopt.tasks.scores import Score

LARGER_BATCH = 8  # what calls of one example are compared with, if batch_size names no other
OnStep = Callable[[str], None]
Gate = Annotated[float, Gt(0), Le(1)] | None


def verify(
    artifact: str | Path,
    *,
    baseline: str | Path | None = None,
    data: Any = None,
    metric: str | Metric | Score = "accuracy",
    batch_size: int = 1,
    seconds: float = 0.3,
    threads: Sequence[int] = (),
    signature: str | None = None,
    gate: float | None = None,
    trusted: bool = False,
    on_step: OnStep = lambda words: None,
) -> Receipt:
    """Measures an exported artifact in a fresh process that imports only what runs its format, such as TensorFlow.

    Args:
        artifact: A directory that `tfopt.export` wrote.
        baseline: The float artifact to compare with. None means the baseline in the manifest, if it exists.
        data: Labelled examples for the accuracy: (inputs, labels) arrays, or batches of such. With several outputs the
            labels are a dict by output name.
        metric: The measure for the examples. "accuracy" accepts classifiers of every kind: class numbers or one-hot
            labels, one output for two classes, several labels for each example, a class for each pixel or step.
            "categorical_accuracy", "binary_accuracy" (of probabilities) and "binary_accuracy_from_logits" name one
            kind. "mean_iou", "bits_per_byte" and "mean_absolute_error" are for other tasks. For any other measure, pass
            a tfopt.tasks.Score, which is updated batch by batch, or a function (labels, outputs) -> float.
        batch_size: Examples per timed call.
        seconds: How long the artifact and the baseline are each timed in one round. There are five rounds, in which
            they alternate. With 0, each round has three calls.
        threads: Numbers of TensorFlow's intra-op threads to compare, for example (1, 16); one above the number of cores
            means all cores. The receipt then has the best number for calls of one example and of `batch_size` (of 8
            by default), the examples in a second of several calls at the same time, and advice for servers. This
            starts a further process for each number. An empty sequence compares none.
        signature: Which of the artifact's signatures to call. None means "serving_default", or "serving_float" where
            TensorFlow lacks kernels of "serving_default". The receipt names the signature that was called.
        gate: The least share of the baseline's score that the artifact must have, for example 0.99, the rule of MLPerf.
            Less is a problem in the receipt. Where lower scores are better, the baseline's score is divided by it.
        trusted: Whether the artifact may touch files and the network when it runs. Otherwise one that would do so is
            refused before anything of it runs.
        on_step: Is called with a few words when a step begins, for a sign of life: the whole can take minutes.
    Returns: A receipt. `receipt.problems` lists what is wrong, and `receipt.ok` is True if nothing is.
    Raises:
        ArtifactError: The artifact or the baseline has changed since it was written, or TensorFlow cannot serve it. The
            message names the kernel that is missing.
        UnsupportedModelError: The artifact would touch files, the network or Python when it runs.
        ConfigError: batch_size, seconds or threads is out of range, there is no such signature or metric, or the
            baseline is not a float artifact of the same inputs and outputs. Or the data holds no examples or no labels,
            or they do not fit the artifact.
    Example:
        >>> import keras, tempfile
        >>> from tfopt.exporting.export import export
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
        threads=threads,
        signature=signature,
        gate=gate,
        trusted=trusted,
        on_step=on_step,
    )[0]


def verify_together(
    artifacts: Sequence[str | Path],
    *,
    baseline: str | Path | None = None,
    data: Any = None,
    metric: str | Metric | Score = "accuracy",
    batch_size: int = 1,
    seconds: float = 0.3,
    threads: Sequence[int] = (),
    signature: str | None = None,
    gate: float | None = None,
    trusted: bool = False,
    on_step: OnStep = lambda words: None,
) -> list[Receipt]:
    """Measures several artifacts of one model as `verify` does. They are timed in turns, so that latencies compare.

    Args:
        artifacts: Their directories. All take the same inputs.
        baseline, data, metric, batch_size, seconds, threads, signature, gate, trusted, on_step: As in `verify`.
    Returns: A receipt for each, in the same order.
    """
    if batch_size < 1:
        raise ConfigError(
            f"batch_size must be at least 1. Received: batch_size={batch_size}. Pass the examples per call."
        )
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ConfigError(
            f"seconds must be a finite number, at least 0. Received: seconds={seconds}. Pass the time of one round, "
            "for example 0.3."
        )
    counts = check_value("threads", threads, ThreadCounts)
    check_metric(metric)
    check_value("gate", gate, Gate)
    if gate is not None and data is None:
        raise ConfigError(f"gate needs labelled examples. Received: gate={gate} without data. Pass data (--data).")
    measured = [
        MeasuredArtifact(path, read_intact_manifest(path), trusted) for path in dict.fromkeys(map(Path, artifacts))
    ]
    for each in measured:
        known = each.manifest.signatures
        if signature is not None and signature not in known:
            wrong = unknown_name("signature", signature, known)
            raise ConfigError(f"{wrong} These are the signatures of {each.path}.")
    baselines = _find_baselines(measured, baseline, trusted)
    first = measured[0].manifest
    served = [*measured, *(each for each in baselines if each not in measured)]
    for each in served:
        each.input_names = input_names(first.signature.inputs, each.path, each.manifest)
    if data is not None:
        for each in served:
            each.output_names = output_names(first.compared_outputs, each.path, each.manifest)
    with ExitStack() as stack:
        for each in served:
            on_step(f"loading {each.path}")
            each.start(stack, signature if each in measured else None)
        if data is not None:
            _score(served, data, metric, (baselines or measured)[0], on_step)
        for each in served:
            on_step(f"comparing the outputs of {each.path}")
            each.compare_outputs()
        for each in measured:
            counted = each.process.count_weights()
            each.weight_count, each.zero_count = counted["weights"], counted["zeros"]
            each.kernels = each.process.count_kernels()
            each.cold_start = each.process.cold_start()
        batch = draw_batch(first.signature.inputs, first.check, batch_size)
        on_step(f"timing {', '.join(str(each.path) for each in served)}")
        times = alternate([each.process for each in served], batch, seconds)
    for each, rounds in zip(served, times, strict=True):
        each.milliseconds = rounds
    if counts:
        for each in measured:
            on_step(f"timing {each.path} on several numbers of threads")
            each.serving, each.no_serving = measure_threads(
                each.path,
                each.manifest.signature,
                each.manifest.check,
                counts,
                (1, batch_size if batch_size > 1 else LARGER_BATCH),
                seconds=seconds,
                called=each.process.signature,
                trusted=trusted,
            )
    for each in measured:
        each.problems += _below(each, gate)
    receipts = {each.path: _receipt(each, len(next(iter(batch.values())))) for each in measured}
    return [receipts[path] for path in map(Path, artifacts)]


def _score(
    served: Sequence[MeasuredArtifact],
    data: Any,
    metric: str | Metric | Score,
    reference: MeasuredArtifact,
    on_step: OnStep,
) -> None:
    """Scores the artifacts on labelled data, chunk by chunk."""
    first = served[0].manifest
    scoreboard = Scoreboard(metric, {name: spec.op for name, spec in first.compared_outputs.items()})
    done = 0
    for inputs, labels in chunks(data, first.signature.inputs):
        on_step(f"scoring, {done:,} examples done")
        done += len(next(iter(inputs.values())))
        scoreboard.add(labels, {each: each.predict(inputs) for each in served}, reference)
    for artifact, scores in scoreboard.scores().items():
        artifact.scores = scores


def _below(artifact: MeasuredArtifact, gate: float | None) -> list[str]:
    """Returns the scores that are a smaller share of the baseline's than the gate, in words."""
    if gate is None:
        return []
    scores = artifact.scores
    against = None if artifact.baseline is None else artifact.baseline.scores
    if scores is None or not scores.by_name or against is None:
        reason = artifact.no_baseline or (scores.reason if scores else "")
        return [f"No score can be compared for the gate of {gate:.2%}: {reason}."]
    shares = {
        name: share_of(score, against.by_name[name], scores.higher_is_better) for name, score in scores.by_name.items()
    }
    return [
        f"The {name} is {'unknown' if share is None else f'{share:.2%}'} of the baseline's; the gate is {gate:.2%}."
        for name, share in shares.items()
        if share is None or round(share, 9) < gate
    ]


def _find_baselines(
    measured: Sequence[MeasuredArtifact], given: str | Path | None, trusted: bool
) -> list[MeasuredArtifact]:
    """Gives each artifact its baseline, if it has one, and returns the baselines, one record for each path.

    A baseline can be one of the measured artifacts.
    """
    known = {each.path.resolve(): each for each in measured}
    baselines: dict[Path, MeasuredArtifact] = {}
    for each in measured:
        path, each.no_baseline = find_baseline(each.path, each.manifest, given)
        if path is not None:
            place = path.resolve()
            if place not in known:
                known[place] = MeasuredArtifact(path, read_intact_manifest(path, "baseline"), trusted)
            each.baseline = baselines[place] = known[place]
    return list(baselines.values())


def _receipt(artifact: MeasuredArtifact, batch_size: int) -> Receipt:
    baseline, scores = artifact.baseline, artifact.scores
    against = None if baseline is None else baseline.scores
    problems = artifact.problems
    if baseline is not None and baseline is not artifact:
        problems = [*problems, *(f"Of the baseline: {problem}" for problem in baseline.problems)]
    absent = dict.fromkeys(() if baseline else ("baseline", "speedup", "speedup_range"), artifact.no_baseline)
    if artifact.max_abs_error is None:
        absent |= dict.fromkeys(("parity_max_abs_error", "parity_relative_error"), "the outputs hold NaN or infinity")
    if artifact.no_serving:
        absent["serving"] = artifact.no_serving
    memory = artifact.cold_start["memory_peak_bytes"]
    if memory is None:
        absent["memory_peak_bytes"] = "read from Linux only"
    return Receipt(
        artifact=str(artifact.path),
        precision=artifact.manifest.precision,
        compute=artifact.manifest.compute,
        signature=artifact.process.signature,
        baseline=None if baseline is None else str(baseline.path),
        parity_max_abs_error=artifact.max_abs_error,
        parity_relative_error=artifact.relative_error,
        parity_inputs=artifact.manifest.check.examples or RANDOM,
        agreement=scores.agreement.get(baseline) if scores and against else None,
        accuracy=scores.accuracy if scores else None,
        baseline_accuracy=against.accuracy if against else None,
        scores=scores.by_name if scores else {},
        baseline_scores=against.by_name if against else {},
        higher_is_better=scores.higher_is_better if scores else True,
        bytes_on_disk=bytes_on_disk(artifact.path),
        gzip_bytes=gzip_bytes(artifact.path),
        weight_count=artifact.weight_count,
        zero_count=artifact.zero_count,
        batch_size=batch_size,
        latency_ms_median=artifact.median_ms,
        load_ms=artifact.cold_start["load_ms"],
        first_call_ms=artifact.cold_start["first_call_ms"],
        memory_peak_bytes=None if memory is None else int(memory),
        latency_ms_p99=float(np.percentile(artifact.calls_ms, 99)),
        speedup=baseline.median_ms / artifact.median_ms if baseline else None,
        speedup_range=ratio_range(baseline.milliseconds, artifact.milliseconds) if baseline else None,
        serving=artifact.serving or artifact.manifest.serving,
        kernels=artifact.kernels,
        runtime=artifact.process.loaded["runtime"],
        tensorflow_version=artifact.process.loaded.get("tensorflow", artifact.manifest.tensorflow),
        device=detect().device("GPU" in artifact.process.loaded["devices"]),
        unavailable=absent | not_scored(scores, artifact.no_baseline),
        notes=_notes(artifact),
        problems=problems,
    )


def _notes(artifact: MeasuredArtifact) -> list[str]:
    """Returns what the manifest notes: of the calibration data, of weights that became 0, and of serving."""
    report = artifact.manifest.report or {}
    notes = [f"{note['name']}: {note['detail']}" for note in report.get("notes", ())]
    if artifact.manifest.compute in NEEDS:
        notes.append(f"machine: {NEEDS[artifact.manifest.compute]}")
    if artifact.manifest.precision == "int8" and not artifact.manifest.check.held_out:
        notes.append("parity: no examples but the same data as calibration were given")
    if artifact.manifest.tuned is not None:
        notes.append(f"serving: {in_words(artifact.manifest.tuned)}")
    return notes


def ratio_range(baseline: list[list[float]], artifact: list[list[float]]) -> tuple[float, float]:
    """Returns the least and the greatest ratio of the medians of one round."""
    ratios = [float(np.median(one) / np.median(other)) for one, other in zip(baseline, artifact, strict=True)]
    return min(ratios), max(ratios)


def find_baseline(path: Path, manifest: Manifest, given: str | Path | None) -> tuple[Path | None, str]:
    """Returns the baseline's directory, or None and the reason.

    Raises:
        ConfigError: `given` is not a float artifact.
        ArtifactError: The baseline's manifest has changed since it was written.
    """
    if given is not None:
        try:
            check_is_artifact(Path(given))
        except ArtifactError as error:
            raise ConfigError(f"baseline must be an artifact. {error}") from error
        found = read_manifest(Path(given))
        if not found.is_float:
            raise ConfigError(
                f"baseline must be a float artifact. Received: {given}, whose precision is {found.precision}. Pass the "
                "float artifact of the same model."
            )
        return Path(given), ""
    if manifest.baseline is None:
        return None, "it has no float baseline"
    # As at export, links are followed before ".." is. A relative path gives a relative one.
    real = (path.resolve() / manifest.baseline).resolve()
    found_at = real if path.is_absolute() else Path(os.path.relpath(real))
    if not (found_at / MARK).is_file():
        return None, f"its baseline {found_at} does not exist"
    other = read_manifest(found_at)
    return (found_at, "") if other.is_float else (None, f"its baseline {found_at} is not float but {other.precision}")


def input_names(wanted: Mapping[str, TensorRecord], path: Path, manifest: Manifest) -> dict[str, str]:
    """Returns an artifact's name for each of the wanted inputs."""
    own = manifest.signature.inputs
    names = matched_names(wanted, own)
    if names is None:
        takes, given = (", ".join(f"{name} {spec}" for name, spec in specs.items()) for specs in (wanted, own))
        raise ConfigError(
            f"baseline must take the artifact's inputs, {takes}. Received: {path}, which takes {given}. If they are "
            "the same inputs, give them the same names in both models, as keras.Input(..., name='image') does."
        )
    return names


def output_names(wanted: Mapping[str, TensorRecord], path: Path, manifest: Manifest) -> dict[str, str]:
    """Returns an artifact's name for each of the wanted outputs. Where names differ, the order decides."""
    own = manifest.compared_outputs
    if own.keys() == wanted.keys():
        return {name: name for name in wanted}
    if len(own) != len(wanted):
        raise ConfigError(
            f"baseline must give the artifact's outputs, {list(wanted)}. Received: {path}, which gives {list(own)}."
        )
    return dict(zip(wanted, own, strict=True))
