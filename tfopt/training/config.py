"""Settings of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tfopt.errors import ConfigError, unknown_name
from tfopt.flags import BY_NAME

PRECISIONS = ("auto", "float32", "mixed_bfloat16", "mixed_float16")
STRATEGIES = ("auto", "none", "mirrored")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How to train. "auto" is decided by `tfopt.plan`, which gives the reason.

    Raises:
        ConfigError: A value is out of range or a name is unknown.
    Example:
        >>> TrainingConfig(epochs=5, precision="float32").jit_compile
        'auto'
    """

    epochs: int = 30
    """Passes over the training data."""
    global_batch_size: int = 64
    """Examples per step, over all replicas together."""
    optimizer: Annotated[str | Any, BY_NAME] = "adam"
    """Name of a Keras optimizer; in Python also the object."""
    learning_rate: float = 1e-3
    """Learning rate at the start."""
    decay: Literal["cosine", "constant"] = "cosine"
    """How the learning rate changes until the last step: along a half cosine to zero, or not at all."""
    precision: Literal["auto", "float32", "mixed_bfloat16", "mixed_float16"] = "auto"
    """Dtype policy of the layers."""
    jit_compile: Literal["auto"] | bool = "auto"
    """Whether XLA compiles the training step."""
    strategy: Annotated[str | Any, BY_NAME] = "auto"
    """auto, none or mirrored (every visible GPU a replica); in Python also a tf.distribute strategy."""
    steps_per_execution: Literal["auto"] | int = "auto"
    """Steps run per call into TensorFlow; callbacks are called that often only."""
    prefetch: Literal["auto"] | int = "auto"
    """Batches made ready ahead of the step."""
    seed: int = 0
    """Of initial weights, shuffling and dropout."""

    def __post_init__(self) -> None:
        for name in ("epochs", "global_batch_size"):
            _at_least_one(name, getattr(self, name))
        for name in ("steps_per_execution", "prefetch"):
            if getattr(self, name) != "auto":
                _at_least_one(name, getattr(self, name), or_auto=True)
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate must be positive. Received: learning_rate={self.learning_rate!r}.")
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", str(self.precision), PRECISIONS)
        if isinstance(self.strategy, str) and self.strategy not in STRATEGIES:
            raise unknown_name("strategy", self.strategy, STRATEGIES)
        if self.decay not in ("cosine", "constant"):
            raise unknown_name("decay", str(self.decay), ("cosine", "constant"))
        if self.jit_compile not in ("auto", True, False):
            raise ConfigError(f"jit_compile must be 'auto', True or False. Received: jit_compile={self.jit_compile!r}.")


def _at_least_one(name: str, value: Any, *, or_auto: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        rule = "'auto' or a whole number of at least 1" if or_auto else "a whole number of at least 1"
        raise ConfigError(f"{name} must be {rule}. Received: {name}={value!r}.")
