"""Settings of structured pruning."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from tfopt.errors import ConfigError
from tfopt.pruning.config import fraction, is_function
from tfopt.pruning.structured.criteria import CRITERIA
from tfopt.settings.flags import BY_NAME, Shares
from tfopt.settings.validation import Remedy, check_fields, check_name

SHARE = Remedy(functools.partial(fraction, "It is a share"))
Share = Annotated[float, Gt(0), Lt(1), SHARE]
OptionalShare = Annotated[Annotated[float, Gt(0), Lt(1)] | None, SHARE]


@dataclass(frozen=True, kw_only=True)
class StructuredPruningConfig:
    """How many channels a model loses, and which.

    One of ratio, target_flops, target_parameters and target_latency says how many. Without any, ratio is 0.5.

    Raises:
        ConfigError: A value is out of range, a name is unknown, or two targets are given.

    Example:
        >>> StructuredPruningConfig(target_flops=0.5, scope="global").criterion
        'l2'
    """

    ratio: OptionalShare = None
    """Share of the channels to remove: of each group with scope="layer", of all groups together with scope="global"."""
    ratios: Shares = field(default_factory=dict, hash=False)
    """Ratios of single groups, by their names, with * and ? as wildcards; the first that matches counts. The other
    groups lose `ratio`. `tfopt.sensitivity` finds such a table."""
    target_flops: OptionalShare = None
    """Share of the multiply-adds that the smaller model may have."""
    target_parameters: OptionalShare = None
    """Share of the parameters that the smaller model may have."""
    target_latency: OptionalShare = None
    """Share of the time of a call that the smaller model may take, measured on this machine."""
    criterion: Annotated[str | Callable[[Any], Any], BY_NAME] = "l2"
    """Order in which channels are removed: l1 or l2 (the norm of their weights), fpgm (those that others can replace),
    bn_scale (the scale of the batch normalization), taylor (the change of the loss; needs data) or random. In Python
    also a function from the weights of a group, [channels, values], to scores [channels]; the lowest leave first."""
    gradient_batches: Annotated[int, Ge(1)] = 8
    """Number of batches of data that the criterion taylor reads."""
    scope: Literal["layer", "global"] = "layer"
    """Scope of the order: "layer" removes the same share of each group; "global" ranks the channels of all groups
    together, by their score divided by the mean of their group."""
    round_to: Annotated[int, Ge(1)] | None = None
    """Widths stay multiples of this number. By default 16, which the kernels compute at once in int8 and in float32,
    and 8 for groups of fewer than 64 channels. Heads and groups of channels count one by one."""
    max_ratio: Share = 0.9
    """Largest share of the channels that one group loses with scope="global" or a target."""
    widths: bool = False
    """Whether the widths that a layer normalization runs over may shrink too, such as the embedding of a transformer.
    Its statistics change then, so the outputs change even where the removed channels were zero."""
    exclude: tuple[str, ...] = ()
    """Names or paths of layers whose channels are kept, with * and ? as wildcards. The name of a nested model keeps all
    its layers."""
    batch_size: Annotated[int, Ge(1)] = 1
    """Batch size at which target_latency is measured."""
    open_size: Annotated[int, Ge(1)] | None = None
    """Size of the open dimensions besides the batch, such as the length of a sequence, for which multiply-adds are
    counted and calls are timed."""
    rounds: Annotated[int, Ge(1)] = 1
    """Number of times at which channels leave in a fit. A recipe with 1, or with a target of latency, removes them all
    before its fine-tuning."""
    end_step: Annotated[int, Ge(1)] | None = None
    """Training step of the last of several rounds. By default after two thirds of the fit; the model recovers in the
    rest."""
    epochs: Annotated[int, Ge(1)] = 10
    """Number of epochs of a recipe's fine-tuning."""
    learning_rate: Annotated[float, Gt(0), Lt(math.inf)] | None = None
    """Learning rate of a recipe's fine-tuning. By default the learning rate of its training."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_name("criterion", self.criterion, CRITERIA, or_a="a function", accepts=is_function)
        given = {name: value for name, value in self._amounts.items() if value is not None}
        if len(given) > 1:
            received = ", ".join(f"{name}={value:g}" for name, value in given.items())
            raise ConfigError(
                f"Only one of {', '.join(self._amounts)} may be set. Received: {received}. Set the one that counts."
            )

        if self.ratios and (self.target[0] != "ratio" or self.scope != "layer"):
            raise ConfigError(
                "ratios must be empty with a target or with scope='global', which choose the ratios themselves. "
                f"Received: ratios={dict(self.ratios)}, {self.target[0]}={self.target[1]:g}, scope={self.scope!r}. "
                "Set only ratio and ratios."
            )

    @property
    def _amounts(self) -> dict[str, float | None]:
        return {
            "ratio": self.ratio,
            "target_flops": self.target_flops,
            "target_parameters": self.target_parameters,
            "target_latency": self.target_latency,
        }

    def with_ratios(self, ratios: Mapping[str, float]) -> StructuredPruningConfig:
        """Returns these settings with ratios in place of any target."""
        no_targets: dict[str, Any] = dict.fromkeys(self._amounts)
        return replace(self, **no_targets, ratios=dict(ratios), scope="layer")

    @property
    def at_once(self) -> bool:
        """Whether a recipe removes all channels before its fine-tuning."""
        return self.rounds == 1 or self.target_latency is not None

    @property
    def target(self) -> tuple[str, float]:
        """The name and the value of what says how many channels are removed."""
        return next(((name, value) for name, value in self._amounts.items() if value is not None), ("ratio", 0.5))
