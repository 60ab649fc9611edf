"""The curves of a measurement of sensitivity, as a table, as a plot, and as a config that prunes by them.

In such a config, what costs the least score for each weight that it removes goes first. The loss of score of all layers
together is taken for the sum of their single losses. Of each curve the convex hull from below counts, so that its first
part is the cheapest. Then the cheapest parts of all curves, taken one after the other, have the least sum that removes
so much.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfopt.atomic.own_files import check_replaceable, write_own
from tfopt.errors import ConfigError
from tfopt.pruning.config import PruningConfig, StructuredPruningConfig
from tfopt.report.formatting import is_share, score_label, show_score
from tfopt.report.sheet import Sheet, Shown, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The kinds of plots, and the name under which each holds the program that wrote it.
PLOTS = {".svg": "Creator", ".png": "Software", ".pdf": "Creator"}
WRITER = "tfopt.Sensitivity"


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Shown):
    """The score of a model against the share that is pruned of each layer or group alone.

    Attributes:
        score: Name of the score.
        higher_is_better: Whether higher scores are better.
        baseline: Score of the model as it is.
        shares: Shares of zeros, or of removed channels, in rising order.
        curves: For each layer or group by its name, the score at each share.
        config: The config whose pruning was measured.

    Example:
        >>> print(Sensitivity(
        ...     score="accuracy", higher_is_better=True, baseline=0.9, shares=(0.5, 0.9),
        ...     curves={"conv": (0.89, 0.8), "dense": (0.9, 0.88)}, config=PruningConfig(),
        ... ))
        accuracy 90.00%; with a share of one layer pruned:
                   50%      90%
        conv    89.00%   80.00%
        dense   90.00%   88.00%
    """

    score: str
    higher_is_better: bool
    baseline: float
    shares: tuple[float, ...]
    curves: Mapping[str, tuple[float, ...]]
    config: PruningConfig | StructuredPruningConfig
    sizes: Mapping[str, float] = field(default_factory=dict, repr=False)
    cost: Callable[[Mapping[str, float]], float] | None = field(default=None, repr=False, compare=False)

    @property
    def losses(self) -> dict[str, tuple[float, ...]]:
        """How much worse than the baseline each score is; negative where it is better."""
        sign = 1 if self.higher_is_better else -1
        return {name: tuple(sign * (self.baseline - score) for score in curve) for name, curve in self.curves.items()}

    def allocate(
        self,
        *,
        target_sparsity: float | None = None,
        target_flops: float | None = None,
        budget: float | None = None,
    ) -> Any:
        """Returns a config with a share for each layer or group: insensitive and large ones are pruned more.

        The losses of score of the single layers are added, and the shares with the smallest sum are chosen. Between
        measured shares the curves are straight lines. The sum is an estimate: what several layers lose together can be
        more. A loss function tells layers apart better than an accuracy does.

        Args:
            target_sparsity: Share of zeros over all layers, for curves of zeros.
            target_flops: Share of the multiply-adds that may be left, for curves of channels.
            budget: Largest sum of losses, for example 0.01 for a point of accuracy. Without a target, as much is pruned
                as it allows.

        Raises:
            ConfigError: Neither or the wrong target is given, or the target cannot be met within the budget or the
                measured shares.

        Example:
            >>> found = Sensitivity(
            ...     score="accuracy", higher_is_better=True, baseline=0.9, shares=(0.5, 0.9),
            ...     curves={"a": (0.9, 0.8), "b": (0.8, 0.1)}, config=PruningConfig(), sizes={"a": 100, "b": 100},
            ... )
            >>> found.allocate(target_sparsity=0.5).sparsities
            {'a': 0.5, 'b': 0.5}
        """
        zeros = isinstance(self.config, PruningConfig)
        own, wrong = ("target_sparsity", target_flops) if zeros else ("target_flops", target_sparsity)
        target = target_sparsity if zeros else target_flops
        if wrong is not None or (target is None and budget is None):
            raise ConfigError(
                f"{own} or budget must be given for curves of {'zeros' if zeros else 'channels'}. Received: "
                f"target_sparsity={target_sparsity}, target_flops={target_flops}, budget={budget}. "
                f"Pass for example {own}=0.5."
            )
        for name, value in ((own, target), ("budget", budget)):
            if value is not None and not 0 < value < (1 if name == own else float("inf")):
                raise ConfigError(f"{name} must be a share above 0. Received: {name}={value:g}.")
        wanted = float("inf") if target is None else target if zeros else 1 - target
        sizes = self.sizes or {name: self._removed({name: self.shares[-1]}) for name in self.curves}
        most = float("inf") if budget is None else budget
        described = "" if target is None else f"{own}={target:g}"
        chosen = cheapest(self.losses, self.shares, sizes, self._removed, wanted, most, described)
        if isinstance(self.config, StructuredPruningConfig):
            return self.config.with_ratios(chosen)
        return replace(self.config, target_sparsity=self._removed(chosen), sparsities=chosen, scope="layer")

    def plot(self, path: str | Path) -> Path:
        """Draws the curves into a file, the most sensitive in colour, and returns its path.

        Raises:
            ConfigError: The name does not end in .svg, .png or .pdf, or belongs to a file that tfopt did not write.
            ExportError: The file cannot be written. An earlier file stays as it is.
        """
        path = Path(path)
        if path.suffix not in PLOTS:
            raise ConfigError(f"path must end in {', '.join(PLOTS)}. Received: path={str(path)!r}.")
        check_replaceable(path, _is_plot)
        content = io.BytesIO()
        draw(self).savefig(content, format=path.suffix[1:], dpi=150, metadata={PLOTS[path.suffix]: WRITER})
        write_own(path, content.getvalue(), _is_plot)
        return path

    def _sheet(self) -> Sheet:
        title = f"{self.score} {show_score(self.score, self.baseline)}; with a share of one layer pruned:"
        rows = [(name, *(show_score(self.score, score) for score in curve)) for name, curve in self.curves.items()]
        head = ("", *(f"{share:.0%}" for share in self.shares))
        return Sheet(title=title, tables=[Table(head=head, rows=rows, figures=range(1, len(head)), folded="")])

    def _removed(self, shares: Mapping[str, float]) -> float:
        """Returns the share of all zeros, or of the multiply-adds that leave."""
        if self.cost is not None:
            return 1 - self.cost(shares)
        sizes = [self.sizes[name] for name in shares]
        return float(np.dot(list(shares.values()), sizes) / sum(sizes))


def _is_plot(content: bytes) -> bool:
    return WRITER.encode() in content


HALVINGS = 40

Shares = dict[str, float]


class Segment(NamedTuple):
    """A straight part of the hull of one curve: from a share to another, at a loss of score, in all and per weight."""

    price: float  # loss of score for each weight that is removed
    begin: float
    end: float
    loss: float  # loss of score from begin to end
    name: str

    def at(self, fraction: float) -> Shares:
        return {self.name: round(self.begin + fraction * (self.end - self.begin), 6)}


def cheapest(
    losses: Mapping[str, Sequence[float]],
    shares: Sequence[float],
    sizes: Mapping[str, float],
    removed: Callable[[Shares], float],
    wanted: float,
    budget: float,
    target: str,
) -> Shares:
    """Returns shares with the least sum of losses for which `removed` is at least `wanted`, or that the budget allows.

    The losses of score are those of each layer at each of the measured shares; `sizes` says how much the whole of a
    layer is. `removed` is a function from shares to the part of the model that they remove. `wanted` is infinite to
    spend the whole budget. The target is text for the error.

    Example:
        >>> sizes = {"a": 100, "b": 100}
        >>> cheapest({"a": (0.1,), "b": (0.2,)}, (0.5,), sizes, lambda found: sum(found.values()) / 2, 0.4, 1.0, "")
        {'a': 0.5, 'b': 0.3}
    """
    segments = [each for name, curve in losses.items() for each in hull(name, curve, shares, sizes[name])]
    found, spent = dict.fromkeys(losses, 0.0), 0.0
    for segment in sorted(segments, key=lambda each: (each.price, each.begin)):
        affordable = 1.0 if segment.loss <= budget - spent else (budget - spent) / segment.loss
        whole = found | segment.at(affordable)
        if removed(whole) >= wanted:
            least, most = 0.0, affordable  # only so much of it as is needed
            for _ in range(HALVINGS):
                middle = (least + most) / 2
                enough = removed(found | segment.at(middle)) >= wanted
                least, most = (least, middle) if enough else (middle, most)
            return found | segment.at(most)
        found, spent = whole, spent + affordable * segment.loss
        if affordable < 1:
            break
    if wanted == float("inf"):
        return found
    limit = f"budget={budget:g}" if budget < float("inf") else f"the largest measured share {max(shares):g}"
    raise ConfigError(
        f"The target must be reachable. Received: {target}, and {limit} allows no more than {removed(found):.3f} to be "
        "removed. Set a weaker target or a larger budget, or measure larger shares."
    )


def hull(name: str, curve: Sequence[float], shares: Sequence[float], size: float) -> list[Segment]:
    """Returns the segments of the convex hull of a curve from below. A loss below zero counts as zero.

    Example:
        >>> [(each.end, each.loss) for each in hull("a", (0.3, 0.2, 0.6), (0.25, 0.5, 0.75), 10)]
        [(0.5, 0.2), (0.75, 0.4)]
    """
    points = [(0.0, 0.0)]
    for point in zip(shares, (max(0.0, loss) for loss in curve), strict=True):
        while len(points) > 1 and _slope(points[-2], points[-1]) >= _slope(points[-1], point):
            points.pop()
        points.append(point)
    segments = []
    for one, other in itertools.pairwise(points):
        price = max(0.0, _slope(one, other)) / max(size, 1e-12)
        loss = round(max(0.0, other[1] - one[1]), 9)
        segments.append(Segment(price=price, begin=one[0], end=other[0], loss=loss, name=name))
    return segments


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


# Readable on white, also for readers who see few colours.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY = "#b5b8bc"


def draw(found: Sensitivity) -> Figure:
    """Returns a figure with one line per layer. Without pyplot, so that no window opens and no backend is chosen."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes: Any = figure.add_subplot()
    coloured = sorted(found.losses, key=lambda name: -sum(found.losses[name]))[: len(COLOURS)]
    others = [name for name in found.curves if name not in coloured]
    lines = {name: ((0, *found.shares), (found.baseline, *curve)) for name, curve in found.curves.items()}
    for number, name in enumerate(others):
        label = f"{len(others)} other{'s' if len(others) > 1 else ''}" if number == 0 else None
        axes.plot(*lines[name], color=GREY, linewidth=1, label=label, zorder=1)
    for name, colour in zip(coloured, COLOURS, strict=False):
        axes.plot(*lines[name], color=colour, linewidth=2, marker="o", markersize=4, label=name)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    if is_share(found.score):
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("Pruned share of this layer alone")
    axes.set_ylabel(score_label(found.score))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e6e8", linewidth=0.8)
    axes.set_axisbelow(True)
    drawn, labels = axes.get_legend_handles_labels()
    first = bool(others)  # the others were drawn first, below
    drawn, labels = drawn[first:] + drawn[:first], labels[first:] + labels[:first]
    axes.legend(drawn, labels, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), title="Most sensitive first")
    return figure
