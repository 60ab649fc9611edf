"""The curves of a measurement of sensitivity, as a table, as a plot, and as a config that prunes by them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.atomic.own_files import check_replaceable, write_own
from tfopt.errors import ConfigError
from tfopt.pruning.config import PruningConfig
from tfopt.pruning.sensitivity.allocation import cheapest
from tfopt.pruning.sensitivity.plot import draw
from tfopt.pruning.structured.config import StructuredPruningConfig
from tfopt.report.formatting import show_score
from tfopt.report.sheet import Sheet, Shown, Table

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
        figure = draw(self.score, self.baseline, self.shares, self.curves, self.losses)
        content = io.BytesIO()
        figure.savefig(content, format=path.suffix[1:], dpi=150, metadata={PLOTS[path.suffix]: WRITER})
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
