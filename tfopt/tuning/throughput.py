"""The speed of the batches that fit: examples per second of powers of two, timed in turns in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tfopt.report import Record
from tfopt.report.knee import contenders, is_decided, knee, ratios, undecided
from tfopt.timing import estimate, in_turns

MORE_TURNS = 2  # times as many, of the sizes that may be the knee


@dataclass(frozen=True, kw_only=True)
class Speed(Record):
    """The speed of one batch size.

    Attributes:
        global_batch_size: Number of examples of a step.
        examples_per_s: Median of the examples in a second.
        least, most: The interval that holds the median of many more turns.
        step_ms: Median time of a step.
        of_best: Median of its ratio to the fastest size, within turns.
    """

    global_batch_size: int
    examples_per_s: float
    least: float
    most: float
    step_ms: float
    of_best: float


@dataclass(frozen=True, kw_only=True)
class ThroughputReport(Record):
    """The curve of the speeds, and its knee.

    Attributes:
        curve: The speed of each batch size, the smallest first.
        knee: The smallest batch size within 5% of the best.
        turns: Number of turns. Sizes that are clearly slower have fewer.
        undecided: Other sizes that more turns may show to be the knee. Between workers none is named.
    """

    curve: tuple[Speed, ...]
    knee: int
    turns: int
    undecided: tuple[int, ...] = ()

    @property
    def best(self) -> Speed:
        return max(self.curve, key=lambda each: each.examples_per_s)


def sizes_to_time(largest: int) -> list[int]:
    """Returns the batches on each replica whose speed is measured: powers of two, and the largest that fits.

    Example:
        >>> sizes_to_time(24), sizes_to_time(18), sizes_to_time(1)
        ([1, 2, 4, 8, 16, 24], [1, 2, 4, 8, 16], [1])
    """
    powers = [2**power for power in range(largest.bit_length())]
    return powers if largest < 1.25 * powers[-1] else [*powers, largest]


def time_sizes(
    sides: Mapping[int, Callable[[], float]], turns: int, is_late: Callable[[], bool], *, decides: bool = True
) -> dict[int, list[float]]:
    """Returns the speed of each batch size in each turn.

    Where `turns` do not tell the knee, the sizes that may be it get more; those that are clearly slower do not.

    Args:
        sides: By size, what times it once.
        turns: Largest number of turns of all sizes.
        is_late: Whether no further turn may begin.
        decides: Whether turns end when the knee is known, and go on where it is not.
    Example:
        >>> time_sizes({8: lambda: 50.0, 16: lambda: 100.0}, turns=12, is_late=lambda: False)[16]
        [100.0, 100.0, 100.0, 100.0, 100.0, 100.0]
    """
    rates: dict[int, list[float]] = {size: [] for size in sides}

    def with_more(sizes: Sequence[int], most: int) -> dict[int, list[float]]:
        def together(turns: Sequence[Sequence[float]]) -> dict[int, list[float]]:
            later = dict(zip(sizes, zip(*turns, strict=True), strict=True))
            return {size: [*earlier, *later.get(size, ())] for size, earlier in rates.items()}

        def is_enough(turns: Sequence[Sequence[float]]) -> bool:
            return is_late() or (decides and is_decided(together(turns)))

        found = in_turns([sides[size] for size in sizes], most, is_enough)
        return together(list(zip(*found, strict=True)))

    rates = with_more(list(sides), turns)
    if decides and not is_late() and not is_decided(rates):
        rates = with_more(contenders(rates), MORE_TURNS * turns)
    return rates


def throughput_of(rates: Mapping[int, Sequence[float]]) -> ThroughputReport:
    """Returns the curve of measured speeds, by the global batch size.

    Example:
        >>> found = throughput_of({8: [50.0, 55.0], 16: [100.0, 100.0]})
        >>> found.knee, found.curve[0].step_ms == 1e3 * 8 / 52.5
        (16, True)
    """
    shares = ratios(rates)
    curve = []
    for size, found in sorted(rates.items()):
        speed = estimate(found)
        curve.append(
            Speed(
                global_batch_size=size,
                examples_per_s=speed.median,
                least=speed.least,
                most=speed.most,
                step_ms=1e3 * size / speed.median,
                of_best=shares[size].median,
            )
        )
    return ThroughputReport(
        curve=tuple(curve),
        knee=knee(rates),
        turns=max(map(len, rates.values())),
        undecided=tuple(undecided(rates)),
    )
