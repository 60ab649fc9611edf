"""Settings of unstructured pruning."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tfopt.errors import ConfigError, unknown_name
from tfopt.flags import BY_NAME
from tfopt.pruning.criteria import CRITERIA, Criterion
from tfopt.pruning.schedules import SCHEDULES

SCOPES = ("layer", "global")


@dataclass(frozen=True, kw_only=True)
class PruningConfig:
    """How many weights to set to zero, which, and when.

    Raises:
        ConfigError: A value is out of range or a name is unknown.

    Example:
        >>> PruningConfig(target_sparsity=0.9, exclude=("head", "*/embedding")).criterion
        'magnitude'
    """

    target_sparsity: float = 0.75
    """Share of zeros in the pruned weights at the end, 0 to 1."""
    criterion: Annotated[str | Criterion, BY_NAME] = "magnitude"
    """Which weights go first: magnitude (the smallest) or random; in Python also a function weights -> scores."""
    scope: Literal["layer", "global"] = "layer"
    """Reach the target in every layer alike, or overall by ranking the weights of all layers together."""
    schedule: Annotated[str | Callable[[int], Any], BY_NAME] = "polynomial"
    """Sparsity over the steps of a fit: polynomial or constant; in Python also a function or a tfmot schedule."""
    initial_sparsity: float = 0.0
    """Sparsity at begin_step, from which the polynomial schedule rises."""
    begin_step: int = 0
    """Training step at which pruning begins."""
    end_step: int | None = None
    """Training step at which the target is reached; by default after two thirds of the fit, the rest is recovery."""
    frequency: int = 10
    """Training steps from one update of the masks to the next."""
    epochs: int = 10
    """Epochs that a recipe fine-tunes for while it prunes."""
    learning_rate: float | None = None
    """Learning rate of a recipe's fine-tuning; by default that of its training."""
    exclude: tuple[str, ...] = ()
    """Names or paths of layers to leave alone, with * and ? as wildcards; a nested model stands for all in it."""

    def __post_init__(self) -> None:
        _check_fraction("target_sparsity", self.target_sparsity)
        _check_fraction("initial_sparsity", self.initial_sparsity)
        if self.initial_sparsity > self.target_sparsity:
            raise ConfigError(
                "initial_sparsity must not exceed target_sparsity. Received: "
                f"initial_sparsity={self.initial_sparsity:g}, target_sparsity={self.target_sparsity:g}. "
                "Sparsity only rises during a fit."
            )
        _check_name("criterion", self.criterion, CRITERIA)
        _check_name("schedule", self.schedule, SCHEDULES)
        if self.scope not in SCOPES:
            raise unknown_name("scope", str(self.scope), SCOPES)
        _check_at_least(0, "begin_step", self.begin_step)
        _check_at_least(1, "frequency", self.frequency)
        _check_at_least(1, "epochs", self.epochs)
        if self.end_step is not None and self.end_step <= self.begin_step:
            raise ConfigError(
                "end_step must be greater than begin_step. "
                f"Received: end_step={self.end_step}, begin_step={self.begin_step}."
            )
        if self.learning_rate is not None and self.learning_rate <= 0:
            raise ConfigError(f"learning_rate must be positive. Received: learning_rate={self.learning_rate:g}.")
        _check_tuple("exclude", self.exclude)
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


def _check_fraction(name: str, value: float) -> None:
    if 0 <= value < 1:
        return
    remedy = f"Sparsity is a fraction; did you mean {value / 100:g}?" if 1 < value < 100 else "Sparsity is a fraction."
    raise ConfigError(f"{name} must be in [0, 1). Received: {name}={value:g}. {remedy}")


def _check_at_least(lowest: int, name: str, value: int) -> None:
    if value < lowest:
        raise ConfigError(f"{name} must be at least {lowest}. Received: {name}={value}.")


def _check_tuple(name: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise ConfigError(f"{name} must be a tuple. Received: {name}={value!r}. Did you mean ({value!r},)?")


def _check_name(kind: str, value: object, known: dict[str, Any]) -> None:
    """Accepts a registered name, or a callable in its place."""
    if isinstance(value, str):
        if value not in known:
            raise unknown_name(kind, value, known)
    elif not callable(value):
        raise ConfigError(f"{kind} must be a name or a callable. Received: {kind}={value!r}.")
