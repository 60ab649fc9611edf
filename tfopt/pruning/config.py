"""Settings of pruning: of weights, and of whole channels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from tfopt.errors import ConfigError
from tfopt.pruning.criteria import CHANNEL_CRITERIA, CRITERIA, ChannelCriterion, Criterion
from tfopt.pruning.patterns import parse_pattern
from tfopt.pruning.schedules import SCHEDULES
from tfopt.settings.flags import BY_NAME, Layers, Shares
from tfopt.settings.validation import Remedy, check_fields, check_name


def fraction(words: str, value: object) -> str:
    """Returns the remedy for a value out of range that may have been meant in per cent."""
    return words + (f"; did you mean {value / 100:g}?" if isinstance(value, (int, float)) and 1 < value < 100 else ".")


def is_function(value: object) -> bool:
    """Whether a value can be called, and is no class: a class of schedules is not yet a schedule."""
    return callable(value) and not isinstance(value, type)


Sparsity = Annotated[float, Ge(0), Lt(1), Remedy(functools.partial(fraction, "Sparsity is a fraction"))]
SHARE = Remedy(functools.partial(fraction, "It is a share"))
Share = Annotated[float, Gt(0), Lt(1), SHARE]
OptionalShare = Annotated[Annotated[float, Gt(0), Lt(1)] | None, SHARE]


@dataclass(frozen=True, kw_only=True)
class PruningConfig:
    """The share of weights to set to zero, their choice, and the time of pruning.

    Raises:
        ConfigError: A value is out of range or a name is unknown.

    Example:
        >>> PruningConfig(target_sparsity=0.9, exclude=("head", "*/embedding")).criterion
        'magnitude'
    """

    target_sparsity: Sparsity = 0.75
    """Share of zeros in the pruned weights at the end, from 0 to below 1."""
    criterion: Annotated[str | Criterion, BY_NAME] = "magnitude"
    """Order in which weights are pruned: magnitude (the smallest first), random, or by gradients of the loss: taylor,
    snip (before training) or movement (in fine-tuning). In Python also a function from weights, or from weights and
    mean gradients, to scores; the lowest scores are pruned first."""
    pattern: str = "unstructured"
    """Weights that are pruned together: unstructured (each alone), n:m such as 2:4 (n of m successive inputs are kept,
    which fixes target_sparsity at 1 - n/m) or blocks of inputs and outputs such as 4x4."""
    transposable: bool = False
    """Whether n:m holds along the outputs too, so that training can use it in both directions."""
    scope: Literal["layer", "global", "erk"] = "layer"
    """Scope of the target: "layer" reaches it in every layer; "global" ranks the weights of all layers together; "erk"
    makes large kernels sparser than small ones (Erdos-Renyi-Kernel)."""
    schedule: Annotated[str | Callable[[int], Any], BY_NAME] = "polynomial"
    """Sparsity over the steps of a fit: polynomial, exponential, one_cycle, cyclic (which releases weights again) or
    constant. In Python also a function of the step, or a schedule of tfmot."""
    initial_sparsity: Sparsity = 0.0
    """Sparsity at begin_step. The polynomial schedule rises from it."""
    begin_step: Annotated[int, Ge(0)] = 0
    """Training step at which pruning begins."""
    end_step: int | None = None
    """Training step at which the target is reached. By default after two thirds of the fit; the model recovers in the
    rest."""
    frequency: Annotated[int, Ge(1)] = 10
    """Number of training steps between two updates of the masks."""
    gradient_batches: Annotated[int, Ge(1)] = 8
    """Number of batches of data over which gradients are averaged, for a criterion or regrowth that needs them."""
    regrowth: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the kept weights that each update of the masks exchanges: the smallest are dropped, and the pruned ones
    with the largest gradients are kept instead. It falls to zero at end_step."""
    epochs: Annotated[int, Ge(1)] = 10
    """Number of epochs of a recipe's fine-tuning, during which it prunes."""
    learning_rate: Annotated[float, Gt(0), Lt(math.inf)] | None = None
    """Learning rate of a recipe's fine-tuning. By default the learning rate of its training."""
    sparsities: Shares = field(default_factory=dict, hash=False)
    """Sparsities of single layers, by their names, paths or classes, with * and ? as wildcards; the first that matches
    counts. The other layers get target_sparsity. `tfopt.sensitivity` finds such a table."""
    exclude: Layers = ()
    """Names, paths or classes of layers that are not pruned, with * and ? as wildcards. The name of a nested model
    excludes all its layers. In Python also classes, and functions from a layer to True or False."""
    include: Layers = ()
    """Names, paths or classes of the only layers that are pruned. Without any, all are, except depthwise convolutions,
    which must be named."""
    keep_first: bool = False
    """Whether the first layer is not pruned."""
    keep_last: bool = False
    """Whether the last layer is not pruned."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_name("criterion", self.criterion, CRITERIA, or_a="a function", accepts=is_function)
        check_name("schedule", self.schedule, SCHEDULES, or_a="a function", accepts=is_function)
        self._check_pattern()
        if self.initial_sparsity > self.target_sparsity:
            raise ConfigError(
                "initial_sparsity must not exceed target_sparsity. Received: "
                f"initial_sparsity={self.initial_sparsity:g}, target_sparsity={self.target_sparsity:g}. "
                "Sparsity only rises during a fit. Set a smaller initial_sparsity."
            )
        if self.end_step is not None and self.end_step <= self.begin_step:
            raise ConfigError(
                "end_step must be greater than begin_step. "
                f"Received: end_step={self.end_step}, begin_step={self.begin_step}. "
                "Set a larger end_step, or None for two thirds of the fit."
            )
        self._check_end_of_schedule()

    def _check_pattern(self) -> None:
        zeros = parse_pattern(self.pattern, self.transposable).zeros
        if self.regrowth and self.pattern != "unstructured":
            raise ConfigError(
                "regrowth must be 0 with a pattern, because it exchanges single weights. Received: "
                f"regrowth={self.regrowth:g}, pattern={self.pattern!r}. Set regrowth=0, or pattern='unstructured'."
            )
        if self.sparsities and (self.scope != "layer" or zeros != 1):
            raise ConfigError(
                "sparsities must be empty unless scope is 'layer' and the pattern does not fix the sparsity. Received: "
                f"sparsities={dict(self.sparsities)}, scope={self.scope!r}, pattern={self.pattern!r}. "
                "Set scope='layer' and pattern='unstructured', or no sparsities."
            )
        if zeros == 1:
            return
        if not math.isclose(self.target_sparsity, zeros):
            raise ConfigError(
                f"target_sparsity must be {zeros:g} with pattern={self.pattern!r}, which fixes it. Received: "
                f"target_sparsity={self.target_sparsity:g}. Set target_sparsity={zeros:g}."
            )
        if self.scope != "layer":
            raise ConfigError(
                "scope must be 'layer' with a pattern n:m, which gives every layer the same sparsity. Received: "
                f"scope={self.scope!r}, pattern={self.pattern!r}. Set scope='layer'."
            )

    def _check_end_of_schedule(self) -> None:
        """Refuses a tfmot schedule with another target: the sparsity would jump at the end, without training."""
        end = getattr(self.schedule, "final_sparsity", getattr(self.schedule, "target_sparsity", None))
        if end is not None and end != self.target_sparsity:
            raise ConfigError(
                "target_sparsity must equal the sparsity at which the schedule ends. Received: "
                f"target_sparsity={self.target_sparsity:g}, and the schedule ends at {end:g}. "
                f"Set target_sparsity={end:g}."
            )


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
    criterion: Annotated[str | ChannelCriterion, BY_NAME] = "l2"
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
        check_name("criterion", self.criterion, CHANNEL_CRITERIA, or_a="a function", accepts=is_function)
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
        names = ("ratio", "target_flops", "target_parameters", "target_latency")
        return {name: getattr(self, name) for name in names}

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
