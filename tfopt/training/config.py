"""Settings of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import keras
import tensorflow as tf

from tfopt.errors import ConfigError, unknown_name
from tfopt.flags import BY_NAME

PRECISIONS = ("auto", "float32", "mixed_bfloat16", "mixed_float16")
STRATEGIES = ("auto", "none", "mirrored")
# Those that need no other optimizer to wrap.
OPTIMIZERS = tuple(
    name.lower()
    for name, value in vars(keras.optimizers).items()
    if isinstance(value, type) and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
)


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
    """Name of a Keras optimizer; in Python also the object, which then brings its own learning rate."""
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
        if not _is_number(self.learning_rate) or not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate must be positive. Received: learning_rate={self.learning_rate!r}.")
        if not _is_whole(self.seed) or not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed must be a whole number in [0, 2**32). Received: seed={self.seed!r}.")
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", str(self.precision), PRECISIONS)
        name = self.optimizer.lower() if isinstance(self.optimizer, str) else self.optimizer  # Keras takes "Adam" too
        _check_name("optimizer", name, OPTIMIZERS, keras.optimizers.Optimizer)
        _check_name("strategy", self.strategy, STRATEGIES, tf.distribute.Strategy)
        if self.decay not in ("cosine", "constant"):
            raise unknown_name("decay", str(self.decay), ("cosine", "constant"))
        if self.jit_compile != "auto" and not isinstance(self.jit_compile, bool):
            raise ConfigError(f"jit_compile must be 'auto', True or False. Received: jit_compile={self.jit_compile!r}.")


def _at_least_one(name: str, value: Any, *, or_auto: bool = False) -> None:
    if not _is_whole(value) or value < 1:
        rule = "'auto' or a whole number of at least 1" if or_auto else "a whole number of at least 1"
        raise ConfigError(f"{name} must be {rule}. Received: {name}={value!r}.")


def _check_name(kind: str, value: Any, known: tuple[str, ...], accepted: type) -> None:
    if isinstance(value, str):
        if value not in known:
            raise unknown_name(kind, value, known)
    elif not isinstance(value, accepted):
        raise ConfigError(f"{kind} must be a name or an instance of {accepted.__name__}. Received: {kind}={value!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
