"""Runs one artifact in its own process and measures it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfopt.errors import ArtifactError, ConfigError
from tfopt.exporting.config import DEFAULT_SIGNATURE, FLOAT_SIGNATURE
from tfopt.exporting.half.choice import ENDS_THE_PROCESS
from tfopt.exporting.manifest import ARTIFACT, FIRST_FORMAT, SOURCE, Manifest, TensorRecord
from tfopt.exporting.parity import are_numbers, compare, draw_inputs
from tfopt.exporting.verification.process import MissingKernelError, NotServedError, RuntimeProcess, runs
from tfopt.exporting.verification.scoring import Scores
from tfopt.graph.frozen import reason_of
from tfopt.hardware import computes_bfloat16, has_vnni
from tfopt.report import ServingTimes

# The largest difference between the outputs and those recorded at export, as a ratio of norms. Another processor adds
# numbers in another order. In int8, a sum on the edge between two steps may then round to the other step. In a half
# type it may too, and what one kernel computes here, and rounds once, may be several there.
FLOAT_TOLERANCE, INT8_TOLERANCE = 1e-3, 5e-2
LARGE_ERROR = 0.3  # of the outputs' scale; rounding alone, in int8 as in 4 bits, stays well below
AGREEMENT = 0.98  # with this share of equal decisions, a large error is in values that do not matter


@dataclass(eq=False)
class MeasuredArtifact:
    """An artifact or a baseline. Its fields are filled in their order below.

    Attributes:
        baseline: The artifact that it is compared with, if there is one; else `no_baseline` has the reason.
        input_names: This artifact's name of each input, by the name in the first artifact. None means equal names.
        output_names: This artifact's name of each output, likewise.
        scores: Its scores on labelled examples. None without these.
        max_abs_error: The largest difference to the outputs of the source model. None if outputs are not numbers.
        relative_error: The same difference as a share of the outputs' scale.
        milliseconds: The time of each call, for each round.
        serving: Its times on several numbers of threads, if these were asked for; else `no_serving` may have a reason.
    """

    path: Path
    manifest: Manifest
    trusted: bool = False
    baseline: MeasuredArtifact | None = None
    no_baseline: str = ""
    input_names: Mapping[str, str] = field(default_factory=dict)
    output_names: Mapping[str, str] = field(default_factory=dict)
    process: RuntimeProcess = field(init=False)
    scores: Scores | None = None
    max_abs_error: float | None = None
    relative_error: float | None = None
    problems: list[str] = field(default_factory=list)
    weight_count: int = field(init=False)
    zero_count: int = field(init=False)
    kernels: Mapping[str, int] = field(init=False)
    cold_start: Mapping[str, float | None] = field(init=False)
    milliseconds: list[list[float]] = field(init=False)
    serving: ServingTimes | None = None
    no_serving: str = ""

    @property
    def calls_ms(self) -> np.ndarray:
        return np.concatenate(self.milliseconds)

    @property
    def median_ms(self) -> float:
        return float(np.median(self.calls_ms))

    def start(self, stack: ExitStack, signature: str | None) -> None:
        """Starts a process whose TensorFlow has every kernel that the signature needs. It ends with the stack.

        Without a signature it calls the default one, or the float one where kernels are missing.

        Raises:
            ArtifactError: TensorFlow lacks a kernel or cannot run it, or the graph is not as the manifest describes it.
        """
        if self.manifest.compute == "bfloat16" and not computes_bfloat16():
            raise ArtifactError(
                f"The machine must be able to multiply bfloat16. Received: {self.path} where {ENDS_THE_PROCESS}. Unset "
                "the variable, or serve it on another machine."
            )
        inputs = draw_inputs(self.manifest.signature.inputs, self.manifest.check)
        try:
            with ExitStack() as tried:
                self._serve(tried, signature or DEFAULT_SIGNATURE)
                self.process.predict(inputs)
                stack.push(tried.pop_all())
        except MissingKernelError as error:
            if signature is not None or FLOAT_SIGNATURE not in self.manifest.signatures:
                raise ArtifactError(
                    f"TensorFlow must have the kernels that the artifact needs: {self.manifest.requires}. Received: "
                    f"{self.path} on a TensorFlow without {error.op}. Serve it on such a machine, or export it with "
                    f"float_fallback=True and call the signature {FLOAT_SIGNATURE!r}."
                ) from error
            self._serve(stack, FLOAT_SIGNATURE)
        self.process.renamed = self.input_names

    def _serve(self, stack: ExitStack, signature: str) -> None:
        self.process = stack.enter_context(runs(self.path)(self.path, signature, trusted=self.trusted))
        self._check_graph("inputs")
        self._check_graph("outputs")

    def _check_graph(self, kind: str) -> None:
        """Raises ArtifactError unless the graph has the inputs or outputs that the manifest lists."""
        listed: dict[str, TensorRecord] = getattr(self.manifest.signature, kind)
        specs = {name: tf.TensorSpec(**spec) for name, spec in self.process.loaded[kind].items()}
        loaded = {name: TensorRecord.of(spec) for name, spec in specs.items()}
        alike = listed.keys() == loaded.keys() and all(spec.fits(loaded[name]) for name, spec in listed.items())
        if kind == "inputs":  # of outputs, TensorFlow may know more sizes after it has loaded the graph
            alike = alike and all(spec.shape == loaded[name].shape for name, spec in listed.items())
        if not alike:
            wanted, received = (
                ", ".join(f"{name} {spec}" for name, spec in sorted(specs.items())) for specs in (listed, loaded)
            )
            raise ArtifactError(
                f"The graph's {kind} must be those that its manifest lists: {wanted}. Received: {self.path}, whose "
                f"{kind} are {received}. Export it again."
            )

    def predict(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs on labelled examples, by the names in the first artifact."""
        try:
            given = self.process.predict(inputs)
        except NotServedError as error:
            if not error.error.startswith("InvalidArgument"):
                raise
            raise ConfigError(
                f"data must be examples that the artifact can compute with. Received: {reason_of(error.error)}, from "
                f"{self.path}. Remove such examples, or encode them as for the training."
            ) from error
        return {name: given[own] for name, own in self.output_names.items()}

    def compare_outputs(self) -> None:
        """Compares the outputs with those in the manifest, and lists the problems."""
        if self.process.loaded["imported"]:
            self.problems.append(f"The process had imported {', '.join(self.process.loaded['imported'])}.")
        missing = missing_instructions(self.manifest, self.process.signature)
        if missing is not None:
            self.problems.append(missing)
        recorded, first = self.manifest.check.outputs, self.manifest.check.format == FIRST_FORMAT
        called = ARTIFACT if self.process.signature == DEFAULT_SIGNATURE else self.process.signature
        given = {own: name for name, own in self.input_names.items()}  # the names under which the process gets inputs
        inputs = draw_inputs(self.manifest.signature.inputs, self.manifest.check)
        outputs = self.process.predict({given.get(name, name): value for name, value in inputs.items()})
        if not are_numbers(outputs, recorded[called]):
            self.problems.append("The outputs hold NaN or infinity.")
            return
        _, reproduced = compare(outputs, recorded[called], first)
        in_int8 = self.manifest.precision == "int8" and called == ARTIFACT
        tolerance = INT8_TOLERANCE if in_int8 or self.manifest.compute != "float32" else FLOAT_TOLERANCE
        if not reproduced <= tolerance:
            self.problems.append(
                f"The outputs differ from those recorded at export by {reproduced:.1e} of their norm; at most "
                f"{tolerance:.0e} is due to rounding. This machine's kernels compute something else."
            )
        self.max_abs_error, self.relative_error = compare(outputs, recorded[SOURCE], first)
        measured = self.manifest.check.errors.get(called)
        if measured is None:
            return
        self.max_abs_error, self.relative_error = measured.max_abs, measured.relative
        if self.relative_error > LARGE_ERROR and not self._agrees():
            self.problems.append(
                f"The outputs differ from the float model's by {self.relative_error:.0%} of their scale, on "
                f"{self.manifest.check.examples}. {remedy(self.manifest)}"
            )

    def _agrees(self) -> bool:
        return self.scores is not None and self.scores.agreement.get(self.baseline, 0.0) >= AGREEMENT


def remedy(manifest: Manifest) -> str:
    """Returns what to do about outputs that are far from those of the source model."""
    if manifest.precision == "int8":
        return "Calibrate on other data, or keep nodes in float."
    if manifest.compute == "float16":
        return "Export with compute='bfloat16', which has the range of float32, or with compute='float32'."
    if manifest.compute != "float32":
        return "Export with compute='float32'."
    if manifest.precision != "float32":
        return "Store the weights in more bits, or exclude some."
    return "Check that the model computes the same at each call."


def missing_instructions(manifest: Manifest, signature: str) -> str | None:
    """Returns why the results of a signature are wrong on this machine, or None.

    An older manifest does not record whether the artifact needs VNNI. Its int8 weights have 8 bits, so it does.
    """
    needed = manifest.precision == "int8" if manifest.needs_vnni is None else manifest.needs_vnni
    if signature != DEFAULT_SIGNATURE or not needed or has_vnni() is not False:
        return None
    remedy = (
        f"Call the signature {FLOAT_SIGNATURE!r}"
        if FLOAT_SIGNATURE in manifest.signatures
        else "Serve it on such a machine"
    )
    return (
        "The artifact needs VNNI or AMX for right results: its weights use 8 bits, and without these instructions sums "
        "saturate. Received: a processor, or a limit by ONEDNN_MAX_CPU_ISA, without them. "
        f"{remedy}, or export it with QuantizationConfig(reduce_range=True)."
    )
