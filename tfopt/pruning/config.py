"""Settings of unstructured pruning."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from tfopt.errors import ConfigError
from tfopt.pruning.criteria import CRITERIA, Criterion
from tfopt.pruning.schedules import SCHEDULES
from tfopt.settings.flags import BY_NAME
from tfopt.settings.validation import Remedy, check_fields, check_name


def _fraction(value: object) -> str:
    meant = f"; did you mean {value / 100:g}?" if isinstance(value, (int, float)) and 1 < value < 100 else "."
    return f"Sparsity is a fraction{meant}"


Sparsity = Annotated[float, Ge(0), Lt(1), Remedy(_fraction)]


@dataclass(frozen=True, kw_only=True)
class PruningConfig:
    """How many weights to set to zero, which, and when.

    Raises:
        ConfigError: A value is out of range or a name is unknown.

    Example:
        >>> PruningConfig(target_sparsity=0.9, exclude=("head", "*/embedding")).criterion
        'magnitude'
    """

    target_sparsity: Sparsity = 0.75
    """Share of zeros in the pruned weights at the end, 0 to 1."""
    criterion: Annotated[str | Criterion, BY_NAME] = "magnitude"
    """Which weights go first: magnitude (the smallest) or random; in Python also a function weights -> scores."""
    scope: Literal["layer", "global"] = "layer"
    """Reach the target in every layer alike, or overall by ranking the weights of all layers together."""
    schedule: Annotated[str | Callable[[int], Any], BY_NAME] = "polynomial"
    """Sparsity over the steps of a fit: polynomial or constant; in Python also a function or a tfmot schedule."""
    initial_sparsity: Sparsity = 0.0
    """Sparsity at begin_step, from which the polynomial schedule rises."""
    begin_step: Annotated[int, Ge(0)] = 0
    """Training step at which pruning begins."""
    end_step: int | None = None
    """Training step at which the target is reached; by default after two thirds of the fit, the rest is recovery."""
    frequency: Annotated[int, Ge(1)] = 10
    """Training steps from one update of the masks to the next."""
    epochs: Annotated[int, Ge(1)] = 10
    """Epochs that a recipe fine-tunes for while it prunes."""
    learning_rate: Annotated[float, Gt(0)] | None = None
    """Learning rate of a recipe's fine-tuning; by default that of its training."""
    exclude: tuple[str, ...] = ()
    """Names or paths of layers to leave alone, with * and ? as wildcards; a nested model stands for all in it."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_name("criterion", self.criterion, CRITERIA, or_a="a callable", accepts=callable)
        check_name("schedule", self.schedule, SCHEDULES, or_a="a callable", accepts=callable)
        if self.initial_sparsity > self.target_sparsity:
            raise ConfigError(
                "initial_sparsity must not exceed target_sparsity. Received: "
                f"initial_sparsity={self.initial_sparsity:g}, target_sparsity={self.target_sparsity:g}. "
                "Sparsity only rises during a fit."
            )
        if self.end_step is not None and self.end_step <= self.begin_step:
            raise ConfigError(
                "end_step must be greater than begin_step. "
                f"Received: end_step={self.end_step}, begin_step={self.begin_step}."
            )
        self._check_end_of_schedule()

    def _check_end_of_schedule(self) -> None:
        """A tfmot schedule brings its own target; two that disagree would end in an untrained jump."""
        end = getattr(self.schedule, "final_sparsity", getattr(self.schedule, "target_sparsity", None))
        if end is not None and end != self.target_sparsity:
            raise ConfigError(
                "target_sparsity must equal the sparsity at which the schedule ends. Received: "
                f"target_sparsity={self.target_sparsity:g}, and the schedule ends at {end:g}. "
                f"Set target_sparsity={end:g}."
            )
