"""A model that takes part in a benchmark: its format, its processes, its inputs, its times and why it failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.atomic.directories import MARK
from tfopt.errors import ArtifactError, TfoptError
from tfopt.exporting.formats import FORMATS, SAVED_MODEL, check_one_model, format_of, has_model
from tfopt.exporting.manifest import CheckRecord, Manifest, TensorRecord, read_intact_manifest
from tfopt.exporting.parity import draw_batch
from tfopt.exporting.verification.inputs import (
    OPEN_SIZE,
    alike,
    batch_of,
    drawn_from,
    matched_names,
    renamed,
    with_open_size,
    with_sizes,
)
from tfopt.exporting.verification.process import RuntimeProcess, runs
from tfopt.exporting.verification.scoring import NO_DATA, Scores
from tfopt.exporting.verification.sizes import bytes_on_disk, gzip_bytes
from tfopt.graph.keras_file import load_keras
from tfopt.report.benchmark import BenchmarkedModel, CallTimes
from tfopt.report.ranking import share_of

KERAS = "keras"


@dataclass(eq=False)
class Candidate:
    """A model that takes part. Its fields are filled in their order.

    Attributes:
        served: What its processes load: the path itself, or what Keras' export has written.
        check: How its inputs are drawn; None if they are given.
        calls_ms: The milliseconds of each call in each round, by batch size and number of threads.
    """

    path: Path
    name: str
    trusted: bool
    failure: str = ""
    served: Path = field(init=False)
    format: str = ""
    manifest: Manifest | None = None
    processes: dict[int, RuntimeProcess] = field(default_factory=dict)
    specs: dict[str, TensorRecord] = field(default_factory=dict)
    given: dict[str, np.ndarray] = field(default_factory=dict)
    check: CheckRecord | None = None
    batches: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    has_nan: bool = False
    cold_start: Mapping[str, float | None] = field(default_factory=dict)
    scores: Scores | None = None
    calls_ms: dict[tuple[int, int], list[list[float]]] = field(default_factory=dict)

    @contextlib.contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Notes an error of the block as the failure of this model."""
        try:
            yield
        except (TfoptError, OSError) as error:
            self.failure = " ".join(str(error).split())
        except (MemoryError, OverflowError, ValueError) as error:  # of arrays, such as inputs of very large sizes
            self.failure = " ".join(f"{type(error).__name__}: {error}".split())

    @property
    def loaded(self) -> dict[str, Any]:
        return next(iter(self.processes.values())).loaded

    @property
    def is_float(self) -> bool:
        """Whether its weights are known to be floating-point numbers."""
        return self.format == KERAS if self.manifest is None else self.manifest.is_float

    @property
    def fixed_batch_size(self) -> int | None:
        """The number of examples that each of its calls must have; None where it is open."""
        return next((spec.shape[0] for spec in self.specs.values() if spec.shape), None)

    @property
    def drawn(self) -> dict[str, TensorRecord]:
        """The specs of its inputs with the sizes that are timed."""
        shapes = {name: value.shape for name, value in self.given.items()} if self.check is None else self.check.shapes
        return with_sizes(self.specs, shapes)

    def open(self, target: Path) -> None:
        """Finds out the format. A .keras file is exported to `target`."""
        if self.path.suffix == ".keras" and self.path.is_file():
            self.format, self.served = KERAS, target
            _export_with_keras(self.path, target, self.trusted)
            return
        suffixes = [Path(each.file).suffix for each in FORMATS.values() if Path(each.file).suffix != ".pb"]
        if not (has_model(self.path) if self.path.is_dir() else self.path.suffix in suffixes):
            raise ArtifactError(
                f"A model must be the directory of an artifact or a SavedModel, or a file with the ending .keras, "
                f"{', '.join(suffixes)}. Received: {self.path}, which is none of these. Export the model first."
            )
        check_one_model(self.path)
        found = format_of(self.path)
        found.check_packages()
        self.format, self.served = found.name, self.path
        if (self.path / MARK).is_file():
            self.manifest = read_intact_manifest(self.path)

    def start(self, stack: ExitStack, threads: Sequence[int]) -> None:
        """Starts a process for each number of threads. They end with the stack, or here if one cannot start."""
        with ExitStack() as tried:
            for count in threads:
                process = runs(self.served)(self.served, trusted=self.trusted, threads=count or None)
                self.processes[count] = tried.enter_context(process)
            stack.push(tried.pop_all())
        if self.manifest is not None:
            self.specs = self.manifest.signature.inputs  # in the model's order
        else:
            self.specs = {name: _record(name, spec) for name, spec in self.loaded["inputs"].items()}

    @property
    def outputs(self) -> list[str]:
        """The outputs that are scored, in the model's order; a loaded SavedModel keeps none."""
        if self.manifest is not None:
            return list(self.manifest.compared_outputs)
        names = list(self.loaded["outputs"])
        return sorted(names) if self.format in (KERAS, SAVED_MODEL) else names

    def choose_inputs(
        self, others: Sequence[Candidate], given: Mapping[str, np.ndarray], open_size: int | None
    ) -> None:
        """Takes the given inputs, those of its manifest, those of another model with such inputs, or draws some."""
        if not self.specs:
            raise ArtifactError(f"A model must have an input to be measured. Received: {self.path} without one.")
        if given:
            of_given = {
                name: TensorRecord(shape=(None, *value.shape[1:]), dtype=tf.as_dtype(value.dtype).name)
                for name, value in given.items()
            }
            names = self._names_of(of_given, "inputs")
            self.given = {names[name]: value for name, value in given.items()}
            return
        if self.manifest is not None:
            self.check = self.manifest.check
        else:
            self.check = next(filter(None, map(self._as_for, others)), None) or drawn_from(
                self.specs, open_size or OPEN_SIZE
            )
        if open_size is not None:
            self.check = with_open_size(self.check, self.specs, open_size)

    def _as_for(self, other: Candidate) -> CheckRecord | None:
        if other.check is None:
            return None
        names = matched_names(other.drawn, self.specs, alike)
        return None if names is None else renamed(other.check, names)

    def _names_of(self, specs: Mapping[str, TensorRecord], what: str) -> dict[str, str]:
        names = matched_names(specs, self.specs, alike)
        if names is None:
            takes, has = (", ".join(f"{name} {spec}" for name, spec in each.items()) for each in (self.specs, specs))
            raise ArtifactError(f"{what} must be those that the model takes, {takes}. Received: {has}.")
        return names

    def make_batches(self, batch_sizes: Sequence[int]) -> None:
        """Makes the batches of inputs, and calls the model for the first time."""
        fixed = self.fixed_batch_size
        for size in batch_sizes:
            if fixed not in (None, size):
                self.skipped[size] = f"its batch size is fixed to {fixed}"
            elif self.check is None:
                self.batches[size] = batch_of(self.given, self.specs, size)
            else:
                self.batches[size] = draw_batch(self.specs, self.check, size)
        if not self.batches:
            raise ArtifactError(
                f"The batch size must be the one that the model is fixed to, {fixed}. Received: "
                f"{', '.join(map(str, batch_sizes))}. Add {fixed} to batch_sizes (--batch-sizes)."
            )
        process = next(iter(self.processes.values()))
        size, batch = next(iter(self.batches.items()))
        outputs = process.predict(batch, size)
        self.has_nan = any(value.dtype.kind == "f" and bool(np.isnan(value).any()) for value in outputs.values())
        self.cold_start = process.cold_start()

    def predict(self, inputs: Mapping[str, np.ndarray], baseline: Candidate) -> dict[str, np.ndarray]:
        """Returns the outputs on the baseline's inputs, by the baseline's names; in its order where names differ."""
        names = self._names_of(baseline.specs, "data")
        fed = {names[name]: value.astype(self.specs[names[name]].numpy_dtype) for name, value in inputs.items()}
        for name, value in inputs.items():
            if value.dtype.kind in "iu" and not np.array_equal(fed[names[name]], value):
                raise ArtifactError(
                    f"data must be numbers that the input holds, {self.specs[names[name]]}. Received: {value.min()} to "
                    f"{value.max()} for {name!r}. Score this model by itself."
                )
        outputs = next(iter(self.processes.values())).predict(fed)
        own, wanted = self.outputs, baseline.outputs
        if len(wanted) != len(own):
            raise ArtifactError(f"The outputs must be as many as the baseline's, {wanted}. Received: {own}.")
        given = wanted if set(own) == set(wanted) else own
        return {name: outputs[mine] for name, mine in zip(wanted, given, strict=True)}

    def time(self, size: int, threads: int, seconds: float, pause: float) -> list[float]:
        """Returns the milliseconds of each call of one round, which begins after a pause; none after a failure."""
        found: list[float] = []
        if not self.failure:
            time.sleep(pause)
            with self.noting_failure():
                found = self.processes[threads].time_calls(self.batches[size], seconds)
        return found

    @property
    def times(self) -> tuple[CallTimes, ...]:
        """The times of its calls, by batch size and number of threads."""
        return tuple(_times(*sizes, rounds) for sizes, rounds in self.calls_ms.items())

    def row(self, batch_sizes: Sequence[int], baseline: Candidate | None, higher_is_better: bool) -> BenchmarkedModel:
        """Returns its record. `baseline` is the model with which its scores are compared, if there are any."""
        if not self.failure:
            with self.noting_failure():
                return self._measured(batch_sizes, baseline, higher_is_better)
        return BenchmarkedModel(
            name=self.name, path=str(self.path), format=self.format, precision=self._precision, failure=self.failure
        )

    @property
    def _precision(self) -> str | None:
        return None if self.manifest is None else self.manifest.precision

    def _measured(
        self, batch_sizes: Sequence[int], baseline: Candidate | None, higher_is_better: bool
    ) -> BenchmarkedModel:
        size = bytes_on_disk(self.served)
        if not size:
            raise ArtifactError(
                f"The files of a model must stay until it is measured. Received: {self.path}, which is gone. Keep them."
            )
        memory = self.cold_start["memory_peak_bytes"]
        absent = {} if memory is not None else {"memory_peak_bytes": "read from Linux only"}
        share = None if baseline is None else self._share(baseline, higher_is_better)
        if baseline is None:
            absent["score_share"] = NO_DATA
        elif share is None:
            reason = "could not be measured" if baseline.failure else "has no score above 0"
            absent["score_share"] = f"the baseline {reason}"
        return BenchmarkedModel(
            name=self.name,
            path=str(self.path),
            format=self.format,
            precision=self._precision,
            runtime=self.loaded["runtime"],
            bytes_on_disk=size,
            gzip_bytes=gzip_bytes(self.served),
            load_ms=self.cold_start["load_ms"],
            first_call_ms=self.cold_start["first_call_ms"],
            memory_peak_bytes=None if memory is None else int(memory),
            scores=self.scores.by_name if self.scores else {},
            score_share=share,
            times=self.times,
            skipped={batch: self.skipped[batch] for batch in batch_sizes if batch in self.skipped},
            unavailable=absent,
        )

    def _share(self, baseline: Candidate, higher: bool) -> float | None:
        if self.scores is None or baseline.scores is None:
            return None
        against = baseline.scores.by_name
        shares = [share_of(self.scores.by_name[name], against[name], higher) for name in against]
        known = [share for share in shares if share is not None]
        return min(known) if len(known) == len(shares) else None


def _record(name: str, spec: Mapping[str, Any]) -> TensorRecord:
    try:
        return TensorRecord.of(tf.TensorSpec(**spec))
    except TypeError as error:  # a dtype that TensorFlow does not have, as ONNX' sequences
        raise ArtifactError(f"Every input must be a tensor. Received: input {name!r} of {spec['dtype']}.") from error


def _export_with_keras(file: Path, target: Path, trusted: bool) -> None:
    """Exports a .keras file as a user of Keras does."""
    model = load_keras(file, trusted)
    try:
        model.export(str(target), verbose=False)
    except Exception as error:  # whatever the layers raise
        raise ArtifactError(
            f"A .keras file must be one that Keras can export. Received: {file} ({type(error).__name__}: {error})."
        ) from error


def _times(batch_size: int, threads: int, rounds: Sequence[Sequence[float]]) -> CallTimes:
    calls = np.concatenate(rounds)
    return CallTimes(
        batch_size=batch_size,
        threads=threads,
        calls=len(calls),
        latency_ms_median=float(np.median(calls)),
        latency_ms_p90=float(np.percentile(calls, 90)),
        latency_ms_p99=float(np.percentile(calls, 99)),
        examples_per_s=float(1e3 * batch_size / np.mean(calls)),
        round_ms=tuple(float(np.median(each)) for each in rounds),
    )
