"""The measurements of an exported artifact, and the comparison of two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tfopt.report.formatting import is_share, score_label, show_score, speed_verdict
from tfopt.report.record import Record, shown_or_reason
from tfopt.report.serving import ServingTimes
from tfopt.report.sheet import PROBLEM, Sheet, Shown, Table, pairs

INT8_KERNELS = (  # of TensorFlow, of ONNX Runtime, of OpenVINO, and of LiteRT
    *("_FusedQuantizedConv2D", "_FusedQuantizedDepthwiseConv2D", "_QuantizedMatMul"),
    *("QLinearConv", "QLinearMatMul", "QGemm", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat"),
    *("Convolution_int8", "Deconvolution_int8", "FullyConnected_int8", "MatMul_int8"),
    *("CONV_2D_INT8", "DEPTHWISE_CONV_2D_INT8", "FULLY_CONNECTED_INT8"),
)
CONVERSIONS = (
    *("QuantizeV2", "Dequantize", "QuantizedMaxPool", "QuantizeLinear", "DequantizeLinear"),
    *("QUANTIZE", "DEQUANTIZE"),
)
MARKED_LOSS = 0.01
"""Reports mark an artifact that loses more than this: one point of a share such as accuracy, 1% of another score."""


@dataclass(frozen=True, kw_only=True)
class Receipt(Record, Shown):
    """The measurements of an exported artifact, taken in a fresh process that imports only its runtime.

    Attributes:
        artifact: Directory of the artifact.
        precision: "float32", "int8" or another precision of ExportConfig.
        compute: The type of its products that are not in int8.
        signature: The signature that was called.
        baseline: Directory of the float artifact for the comparison, if there is one.
        parity_max_abs_error: Largest difference between the outputs and those of the source model at export.
        parity_relative_error: The same difference as a share of the outputs' scale: of the root mean square of the
            source's outputs, and for probabilities of that of sure decisions. 0.01 is a hundredth.
        parity_inputs: The inputs of this comparison: examples that were not calibrated on, or random ones.
        agreement: Share of examples with the same prediction from artifact and baseline, 0 to 1. If an example has
            several pixels, steps or labels, the share of these.
        accuracy: Share of labelled examples with the right prediction, 0 to 1. If an example has several pixels, steps
            or labels, the share of these.
        baseline_accuracy: The accuracy of the baseline.
        scores: Scores on the labelled examples, by the name of the metric. With several outputs the name of the output
            comes first, as in "mask_accuracy".
        baseline_scores: The scores of the baseline.
        higher_is_better: Whether higher scores are better.
        bytes_on_disk: Sum of the sizes of all files.
        gzip_bytes: Size of the same files as a .tar.gz. Pruning makes this size smaller.
        weight_count: Number of weights in matrix products and convolutions.
        zero_count: Number of these weights that are exactly zero.
        batch_size: Number of examples in each timed call.
        latency_ms_median: Median time of a call.
        latency_ms_p99: 99th percentile of the times of the same calls.
        load_ms: Time to load the artifact in a fresh process, which has imported TensorFlow. None in older receipts.
        first_call_ms: Time of the first call in that process, on the check's inputs. It optimizes the graph too.
        memory_peak_bytes: Peak memory of that process after the first call, TensorFlow's own share included.
        speedup: Median latency of the baseline divided by that of the artifact, measured alternately. Above 1 the
            artifact is faster.
        speedup_range: Smallest and largest ratio of a single round. A difference within this range is noise.
        serving: The times on several numbers of threads, which `tfopt.verify` measured or else the export. None if
            neither was asked to.
        kernels: Number of times that each computing op occurs in the executed graph.
        runtime: Name and version of what ran the artifact. Empty in older receipts, where it is TensorFlow.
        tensorflow_version: Version of the TensorFlow that ran the artifact, or that wrote it for another runtime.
        device: The processor or GPU that ran the artifact.
        unavailable: For each attribute above that is None, the reason.
        notes: What the export noted: of the calibration data, and of weights that became 0.
        problems: Problems that the check found; empty if it found none.
    """

    artifact: str
    precision: str
    compute: str = "float32"
    signature: str = "serving_default"
    baseline: str | None = None
    parity_max_abs_error: float | None = None
    parity_relative_error: float | None = None
    parity_inputs: str = "random inputs"
    agreement: float | None = None
    accuracy: float | None = None
    baseline_accuracy: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    baseline_scores: Mapping[str, float] = field(default_factory=dict)
    higher_is_better: bool = True
    bytes_on_disk: int
    gzip_bytes: int
    weight_count: int
    zero_count: int
    batch_size: int
    latency_ms_median: float
    latency_ms_p99: float
    load_ms: float | None = None
    first_call_ms: float | None = None
    memory_peak_bytes: int | None = None
    speedup: float | None = None
    speedup_range: tuple[float, float] | None = None
    serving: ServingTimes | None = None
    kernels: Mapping[str, int] = field(default_factory=dict)
    runtime: str = ""
    tensorflow_version: str
    device: str
    unavailable: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    problems: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether the check found no problem."""
        return not self.problems

    @property
    def computes(self) -> str:
        """What it computes in, for example "int8 in 3 of 20 products", "bfloat16", or "float32, weights in int8"."""
        stored = self.precision.removesuffix("_weight_only")
        int8 = sum(count for name, count in self.kernels.items() if name in INT8_KERNELS)
        others = sum(count for name, count in self.kernels.items() if name not in CONVERSIONS) - int8
        if self.precision == "int8" and (int8 or not self.kernels):
            rest = "" if self.compute == "float32" else f", and {self.compute}"
            return f"int8 in {int8} of {int8 + others} products{rest}" if others else "int8"
        return self.compute if stored in ("float32", self.compute) else f"{self.compute}, weights in {stored}"

    @property
    def sparsity(self) -> float:
        """Share of the weights that are exactly zero, 0 to 1."""
        return self.zero_count / self.weight_count if self.weight_count else 0.0

    @property
    def speed(self) -> str:
        """The speed against the baseline with the verdict, for example "0.72x (slower)"."""
        verdict = self.verdict
        if self.speedup is not None and verdict == "about even" and not 0.95 <= self.speedup < 1.05:
            verdict = "about even: the rounds disagree"
        return self.show("speedup", "{:.2f}x") + (f" ({verdict})" if verdict else "")

    @property
    def _cold_start(self) -> str:
        if self.load_ms is None:
            return self.show("load_ms")
        times = f"load {self.load_ms:,.0f} ms, first call {self.show('first_call_ms', '{:,.0f} ms')}"
        return f"{times}, peak memory {self.show('memory_peak_bytes', '{:,} bytes')}"

    @property
    def _in_tensorflow(self) -> bool:
        return not self.runtime or self.runtime.startswith("TensorFlow")

    @property
    def _serving_rows(self) -> dict[str, str]:
        if self.serving is not None:
            return self.serving.rows()
        return {"threads": self.show("serving")} if "serving" in self.unavailable else {}

    @property
    def verdict(self) -> str:
        """The speed against the baseline in words. Only a difference of over 5% that every round shows counts."""
        if self.speedup is None:
            return ""
        return speed_verdict(self.speedup, *(self.speedup_range or (self.speedup, self.speedup)))

    def score(self, name: str) -> float | None:
        """Returns a score by name, or None if there is none. "accuracy" is the accuracy of a classifier of any kind."""
        return self.accuracy if name == "accuracy" and self.accuracy is not None else self.scores.get(name)

    def baseline_score(self, name: str) -> float | None:
        """Returns a score of the baseline by name, or None if there is none."""
        own = self.baseline_accuracy if name == "accuracy" else None
        return self.baseline_scores.get(name) if own is None else own

    def show_score(self, name: str) -> str:
        """Returns a score as text, or "unavailable (reason)"."""
        value = self.score(name)
        return self.show("accuracy") if value is None else show_score(name, value)

    def show(self, attribute: str, form: str = "{:.4g}") -> str:
        """Returns an attribute as text, or "unavailable (reason)" if its value is unknown."""
        return shown_or_reason(self, attribute, form)

    def rows(self) -> dict[str, str]:
        """Returns the figures as text, by what they are."""
        scores = {}
        for name in score_names([self]):
            baseline = self.baseline_score(name)
            beside = "" if baseline is None or self.score(name) is None else f" (baseline {show_score(name, baseline)})"
            scores[score_label(name).lower()] = self.show_score(name) + beside
        return {
            "precision": self.computes
            + ("" if self.signature == "serving_default" else f", signature {self.signature}"),
            **scores,
            "parity (relative error)": self.show("parity_relative_error", f"{{:.2%}} on {self.parity_inputs}"),
            "agreement with baseline": self.show("agreement", "{:.2%}"),
            "bytes on disk": f"{self.bytes_on_disk:,}",
            "gzip bytes": f"{self.gzip_bytes:,}",
            "zeros": f"{self.zero_count:,} of {self.weight_count:,} weights ({self.sparsity:.1%})",
            "latency": f"{self.latency_ms_median:.3f} ms median, {self.latency_ms_p99:.3f} ms p99"
            f" (batch {self.batch_size})",
            "cold start": self._cold_start,
            "speed against baseline": self.speed,
            **self._serving_rows,
            "kernels": ", ".join(f"{count} {name}" for name, count in self.kernels.items()) or "none",
            "device": f"{self.device}, {self.runtime or f'TensorFlow {self.tensorflow_version}'}",
        }

    def _sheet(self) -> Sheet:
        own = self.serving if self.serving and (self.serving.format == "saved_model") == self._in_tensorflow else None
        rows = [("advice", advice) for advice in own.advice] if own else []
        rows += [("note", note) for note in self.notes] + [(PROBLEM, problem) for problem in self.problems]
        return Sheet(title=self.artifact, tables=[pairs(self.rows()), Table(rows=rows)])


def score_names(receipts: Iterable[Receipt]) -> list[str]:
    """Returns the names of the scores that reports show: "accuracy" for classifiers of one output.

    Example:
        >>> score_names([])
        ['accuracy']
    """
    found = [
        name for receipt in receipts for name in (["accuracy"] if receipt.accuracy is not None else receipt.scores)
    ]
    return list(dict.fromkeys(found)) or ["accuracy"]


def score_change(name: str, first: Receipt, other: Receipt) -> str:
    """Returns the difference of a score to the first artifact's: in points, or in per cent of the first.

    Where lower scores are better, it says what the sign means.

    Example:
        >>> from dataclasses import replace
        >>> one = Receipt(
        ...     artifact="a", precision="float32", scores={"mean_iou": 0.9}, bytes_on_disk=1, gzip_bytes=1,
        ...     weight_count=1, zero_count=0, batch_size=1, latency_ms_median=1, latency_ms_p99=1,
        ...     tensorflow_version="", device="",
        ... )
        >>> score_change("mean_iou", one, replace(one, scores={"mean_iou": 0.88}))
        '-2.00 pt'
        >>> error = replace(one, scores={"mean_absolute_error": 0.5}, higher_is_better=False)
        >>> score_change("mean_absolute_error", error, replace(error, scores={"mean_absolute_error": 0.27}))
        '-46.00% (better)'
    """
    before, after = first.score(name), other.score(name)
    if before is None or after is None:
        return ""
    if is_share(name):
        change = f"{100 * (after - before):+.2f} pt"
    else:
        change = f"{(after - before) / abs(before):+.2%}" if before else f"{after - before:+.4g}"
    if first.higher_is_better or after == before:
        return change
    return f"{change} ({'better' if after < before else 'worse'})"


def lost_score(name: str, first: Receipt, other: Receipt) -> bool:
    """Returns whether an artifact scores worse than the first by over a point of a share, or 1% of another score."""
    before, after = first.score(name), other.score(name)
    if before is None or after is None:
        return False
    loss = before - after if first.higher_is_better else after - before
    return round(loss if is_share(name) else loss / (abs(before) or 1.0), 9) > MARKED_LOSS
