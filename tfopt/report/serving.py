"""The times of an artifact on several numbers of threads, and what a server should be told for it.

A runtime splits a kernel over threads. Their number is a setting of the process that serves; no file of a model holds
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tfopt.report.formatting import grouped, speed_verdict
from tfopt.report.record import Record


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """How the runtime of a format is told its threads: texts for numbers of threads and of calls at the same time.

    Attributes:
        default: What it does without being told.
        default_threads: The number of threads of that. None is one for each core.
        single: For calls one after the other.
        parallel: For calls at the same time. `all` is the number of the threads of all calls.
        batches: What joins requests to batches.
    """

    default: str
    default_threads: int | None = None
    single: str
    parallel: str
    batches: str


SETTINGS = {
    "saved_model": _Settings(
        default="TensorFlow's default, all cores",
        single="tensorflow_model_server --tensorflow_intra_op_parallelism={threads}; in Python "
        "tf.config.threading.set_intra_op_parallelism_threads({threads}) before the first op",
        parallel="--tensorflow_intra_op_parallelism={threads} --tensorflow_inter_op_parallelism={calls}",
        batches="--enable_batching",
    ),
    "onnx": _Settings(
        default="ONNX Runtime's default, all cores",
        single="SessionOptions.intra_op_num_threads = {threads}",
        parallel="SessionOptions.intra_op_num_threads = {threads}; session.run in {calls} threads",
        batches="dynamic_batching in Triton's config.pbtxt",
    ),
    "openvino": _Settings(
        default="OpenVINO's default, all cores",
        single="compile_model(..., {{'NUM_STREAMS': 1, 'INFERENCE_NUM_THREADS': {threads}}}), or the same in "
        "--plugin_config of its Model Server",
        parallel="{{'NUM_STREAMS': {calls}, 'INFERENCE_NUM_THREADS': {all}}}, and an infer request for each",
        batches="in the program that calls it",
    ),
    "litert": _Settings(
        default="LiteRT's default, one thread",
        default_threads=1,
        single="Interpreter(path, num_threads={threads})",
        parallel="an Interpreter(path, num_threads={threads}) for each of {calls} threads",
        batches="in the program that calls it",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ThreadTimes(Record):
    """The time of a call on several numbers of intra-op threads, measured in turns.

    Attributes:
        batch_size: Number of examples in each call.
        threads: The numbers of threads, ascending.
        latency_ms_median: Median time of a call, for each number of threads.
        best_threads: The fastest number of threads. None if another number is about as fast.
    """

    batch_size: int
    threads: tuple[int, ...]
    latency_ms_median: tuple[float, ...]
    best_threads: int | None

    def __str__(self) -> str:
        found = zip(self.threads, self.latency_ms_median, strict=True)
        times = ", ".join(f"{milliseconds:.3f} ms on {count}" for count, milliseconds in found)
        return f"{f'best on {self.best_threads}' if self.best_threads else 'about even'}: {times}"


@dataclass(frozen=True, kw_only=True)
class ManyRequests:
    """How a server computes many requests: the calls at the same time, the threads of each, and its examples.

    Attributes:
        batches_pay: Whether the server should join requests to batches.
        on_gpu: Whether that was measured on a GPU.
    """

    calls: int
    threads: int
    batch_size: int
    batches_pay: bool = False
    on_gpu: bool = False


def flags(model_format: str, best: ManyRequests) -> str:
    """Returns how the runtime of a format is told the calls at the same time and the threads.

    Example:
        >>> flags("saved_model", ManyRequests(calls=2, threads=1, batch_size=1))
        '--tensorflow_intra_op_parallelism=1 --tensorflow_inter_op_parallelism=2'
    """
    settings = SETTINGS[model_format]
    text = settings.parallel if best.calls > 1 else settings.single
    return text.format(threads=best.threads, calls=best.calls, all=best.threads * best.calls)


@dataclass(frozen=True, kw_only=True)
class ServingTimes(Record):
    """The times of an artifact by batch size and threads, and the examples that it computes in a second.

    Attributes:
        device: The processor that measured them.
        cores: Number of its cores that the process could use.
        calls: The times of calls that are made one after the other, by ascending batch size.
        parallel_calls: Number of calls that are made at the same time, each of the smallest batch size.
        parallel_threads: Number of intra-op threads of the process that computes these calls.
        parallel_examples_per_s: Examples that these calls compute in a second.
        batch_examples_per_s: Examples that calls of the largest batch size compute in a second, one after the other on
            the largest number of threads.
        parallel_speedup: Ratio of the two. Above 1, the calls at the same time compute more.
        parallel_speedup_range: Smallest and largest ratio of a single round. A difference within this range is noise.
        format: The format of the artifact: "saved_model", "onnx", "openvino" or "litert".
    Example:
        >>> found = ServingTimes(
        ...     device="AMD EPYC", cores=2,
        ...     calls=(ThreadTimes(batch_size=1, threads=(1, 2), latency_ms_median=(7.0, 10.0), best_threads=1),),
        ...     parallel_calls=2, parallel_threads=1, parallel_examples_per_s=240.0, batch_examples_per_s=200.0,
        ...     parallel_speedup=1.2, parallel_speedup_range=(1.1, 1.3),
        ... )
        >>> found.best_threads(1)
        1
        >>> print(found.rows()["threads, batch 1"])
        best on 1: 7.000 ms on 1, 10.000 ms on 2
        >>> print(found.advice[0])
        batch 1: tensorflow_model_server --tensorflow_intra_op_parallelism=1; in Python ...
    """

    device: str
    cores: int
    calls: tuple[ThreadTimes, ...]
    parallel_calls: int
    parallel_threads: int
    parallel_examples_per_s: float
    batch_examples_per_s: float
    parallel_speedup: float
    parallel_speedup_range: tuple[float, float]
    format: str = "saved_model"

    def best_threads(self, batch_size: int) -> int | None:
        """Returns the fastest number of threads for a batch size; None if it was not measured or none is faster."""
        return next((each.best_threads for each in self.calls if each.batch_size == batch_size), None)

    @property
    def batches_pay(self) -> bool:
        """Whether large batches compute more examples in a second than small calls at the same time."""
        return self._verdict == "slower"

    @property
    def many_requests(self) -> ManyRequests:
        """The way to compute many requests: small calls at the same time, unless batches pay."""
        if self.batches_pay:
            last = self.calls[-1]
            return ManyRequests(calls=1, threads=last.threads[-1], batch_size=last.batch_size, batches_pay=True)
        return ManyRequests(
            calls=self.parallel_calls, threads=self.parallel_threads, batch_size=self.calls[0].batch_size
        )

    def rows(self) -> dict[str, str]:
        """Returns the figures as text, by what they are."""
        parallel = f"{grouped(self.parallel_examples_per_s)} examples/s in {self._parallel}"
        batched = f"{grouped(self.batch_examples_per_s)} examples/s in {self._batched}"
        return {
            **{f"threads, batch {each.batch_size}": str(each) for each in self.calls},
            "throughput": f"{parallel}, {batched} ({self._verdict})",
            "threads measured on": f"{self.device}, {self.cores} cores",
        }

    @property
    def advice(self) -> list[str]:
        """What a server should be told, in sentences with the settings of the format's runtime."""
        return [*self._of_single_calls(), self._of_many_requests()] if self.format in SETTINGS else []

    def _of_single_calls(self) -> Iterator[str]:
        settings = SETTINGS[self.format]
        for best in sorted({each.best_threads for each in self.calls if each.best_threads}):
            sizes = " and ".join(str(each.batch_size) for each in self.calls if each.best_threads == best)
            if best == (settings.default_threads or self.cores):
                yield f"batch {sizes}: leave the threads at {settings.default}"
            else:
                yield f"batch {sizes}: {settings.single.format(threads=best)}"

    def _of_many_requests(self) -> str:
        best = self.many_requests
        if self.batches_pay:
            return f"many requests: join them to batches of {best.batch_size} ({SETTINGS[self.format].batches})"
        gain = "more examples than" if self._verdict == "faster" else "about as many examples as"
        return f"many requests: {self._parallel} ({flags(self.format, best)}) compute {gain} {self._batched}"

    @property
    def _verdict(self) -> str:
        return speed_verdict(self.parallel_speedup, *self.parallel_speedup_range)

    @property
    def _parallel(self) -> str:
        batch_size = self.calls[0].batch_size
        return f"{self.parallel_calls} calls at a time of batch {batch_size} on {_threads(self.parallel_threads)} each"

    @property
    def _batched(self) -> str:
        return f"calls of batch {self.calls[-1].batch_size} on {_threads(self.calls[-1].threads[-1])}"


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"
