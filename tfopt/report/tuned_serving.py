"""What a server should set for a model, by the measurement of `tfopt.tune_serving`: batch, calls and threads.

An artifact has this record in its manifest.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, MinLen

from tfopt.report.formatting import grouped
from tfopt.report.knee import knee, ratios
from tfopt.report.record import Record
from tfopt.report.serving import ManyRequests, ThreadTimes
from tfopt.timing import estimate

Count = Annotated[int, Ge(1)]  # what is read from a manifest goes into the files of servers
Rates = Mapping[tuple[int, int], Sequence[float]]  # examples in a second of each turn, by batch size and threads


@dataclass(frozen=True, kw_only=True)
class BatchSpeed(Record):
    """The speed of one batch size on the number of threads on which it is fastest.

    Attributes:
        batch_size: Number of examples in each call.
        calls: Number of calls at the same time, so many that all cores have work.
        threads: Number of intra-op threads.
        examples_per_s: Median of the examples that these calls compute in a second.
        least, most: The interval that holds the median of many more turns.
        of_best: Median of its ratio to the fastest batch size, within turns.
    """

    batch_size: Count
    calls: Count
    threads: Count
    examples_per_s: float
    least: float
    most: float
    of_best: float

    @property
    def call_ms(self) -> float:
        """The mean time of a call while all of them run: their number divided by the calls that end in a second."""
        return 1e3 * self.calls * self.batch_size / self.examples_per_s


@dataclass(frozen=True, kw_only=True)
class TunedServing(Record):
    """What a server should set for a model on one device.

    Attributes:
        device: The processor or GPU that was measured.
        on_gpu: Whether it is a GPU.
        cores: Number of the processor's cores that the processes could use.
        format: The format of the model: "saved_model", "onnx", "openvino" or "litert".
        runtime: Name and version of what ran it.
        batch_size: The knee: the smallest batch size within 5% of the fastest.
        calls: Number of calls at the same time. In TensorFlow Serving the inter-op threads.
        threads: Number of intra-op threads.
        curve: The speed of each batch size, the smallest first.
        alone: The time of calls one after the other by threads, of the smallest batch size and of `batch_size`.
        turns: Number of turns of each batch size on each number of threads.
        settings: The lines for each server that reads the format.
    """

    device: str
    on_gpu: bool = False
    cores: Count
    format: str
    runtime: str
    batch_size: Count
    calls: Count
    threads: Count
    curve: Annotated[tuple[BatchSpeed, ...], MinLen(1)]
    alone: Annotated[tuple[ThreadTimes, ...], MinLen(1)]
    turns: int
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def many_requests(self) -> ManyRequests:
        """The way to compute many requests."""
        return ManyRequests(
            calls=self.calls,
            threads=self.threads,
            batch_size=self.batch_size,
            batches_pay=self.batch_size > 1 and len(self.curve) > 1,  # of a fixed size, no batches can be made
            on_gpu=self.on_gpu,
        )

    @property
    def chosen(self) -> BatchSpeed:
        """The speed of `batch_size`."""
        return next(each for each in self.curve if each.batch_size == self.batch_size)

    def elsewhere(self, device: str, cores: int) -> str:
        """Returns in words that the settings were measured on another machine than this one; "" if they were not.

        Example:
            >>> times = ThreadTimes(batch_size=1, threads=(1,), latency_ms_median=(2.0,), best_threads=1)
            >>> found = tuned({(1, 1): [500.0]}, (times,), device="Xeon", cores=1, format="onnx", runtime="ORT")
            >>> found.elsewhere("Xeon", 1), found.elsewhere("Xeon", 8)
            ('', 'measured on Xeon, 1 core, and this is Xeon, 8 cores')
        """
        if (device, cores) == (self.device, self.cores):
            return ""
        return f"measured on {machine_in_words(self.device, self.cores)}, and this is {machine_in_words(device, cores)}"

    def __str__(self) -> str:
        each = " each" if self.calls > 1 else ""
        return (
            f"batches of {self.batch_size}, {_count(self.calls, 'call')} at a time on "
            f"{_count(self.threads, 'thread')}{each}: {grouped(self.chosen.examples_per_s)} examples/s"
        )


def fastest_threads(rates: Rates) -> dict[int, int]:
    """Returns the number of threads on which each batch size is fastest.

    Example:
        >>> fastest_threads({(1, 1): [50.0, 55.0], (1, 2): [40.0, 45.0], (8, 1): [70.0, 70.0], (8, 2): [90.0, 80.0]})
        {1: 1, 8: 2}
    """
    sizes = sorted({size for size, _ in rates})
    return {
        size: max(
            (count for each, count in rates if each == size), key=lambda count: statistics.median(rates[size, count])
        )
        for size in sizes
    }


def by_batch_size(rates: Rates) -> dict[int, Sequence[float]]:
    """Returns the rates of each batch size on the threads on which it is fastest."""
    return {size: rates[size, count] for size, count in fastest_threads(rates).items()}


def tuned(
    rates: Rates,
    alone: Sequence[ThreadTimes],
    *,
    device: str,
    cores: int,
    format: str,
    runtime: str,
    on_gpu: bool = False,
) -> TunedServing:
    """Returns the settings that follow from measured rates."""
    threads, fastest = fastest_threads(rates), by_batch_size(rates)
    shares, size = ratios(fastest), knee(fastest)
    curve = []
    for each, found in fastest.items():
        speed = estimate(found)
        curve.append(
            BatchSpeed(
                batch_size=each,
                calls=calls_on(threads[each], cores),
                threads=threads[each],
                examples_per_s=speed.median,
                least=speed.least,
                most=speed.most,
                of_best=shares[each].median,
            )
        )
    return TunedServing(
        device=device,
        on_gpu=on_gpu,
        cores=cores,
        format=format,
        runtime=runtime,
        batch_size=size,
        calls=calls_on(threads[size], cores),
        threads=threads[size],
        curve=tuple(curve),
        alone=tuple(alone),
        turns=len(fastest[size]),
    )


def calls_on(threads: int, cores: int) -> int:
    """Returns the number of calls at the same time that give all cores work.

    Example:
        >>> calls_on(1, 8), calls_on(3, 8), calls_on(8, 8)
        (8, 2, 1)
    """
    return max(cores // threads, 1)


def machine_in_words(device: str, cores: int) -> str:
    """Returns a processor or GPU, and the number of cores, in words.

    Example:
        >>> machine_in_words("AMD EPYC", 2)
        'AMD EPYC, 2 cores'
    """
    return f"{device}, {_count(cores, 'core')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
