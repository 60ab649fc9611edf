"""Turns every "auto" of a training configuration into a value, with the reason, before anything is built."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfopt import data
from tfopt.errors import ConfigError
from tfopt.hardware import Hardware, detect
from tfopt.report import Decision
from tfopt.training.config import TrainingConfig

# Small models gain most from it (benchmarks/plan_choices.py); more delays callbacks and gains little further.
STEPS_PER_CALL = 10


class HasTraining(Protocol):
    """Anything that carries a training configuration, such as a Recipe."""

    @property
    def training(self) -> TrainingConfig: ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training configuration with every "auto" decided.

    Attributes:
        config: What was asked for.
        precision: Name of the Keras dtype policy.
        jit_compile: Whether XLA compiles the training step.
        strategy: The tf.distribute strategy, or None for one device.
        steps_per_execution: Steps run per call into TensorFlow.
        prefetch: Batches made ready ahead.
        decisions: Each setting with its value and the reason; `print(plan)` shows them.
    """

    config: TrainingConfig
    precision: str
    jit_compile: bool
    strategy: tf.distribute.Strategy | None
    steps_per_execution: int
    prefetch: int
    decisions: tuple[Decision, ...]

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Builds models with the plan's dtype policy and strategy; the policy that was set before is put back."""
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self.precision)
        try:
            with self.strategy.scope() if self.strategy else contextlib.nullcontext():
                yield
        finally:
            keras.config.set_dtype_policy(before)

    def pipeline(self, examples: Any, *, training: bool = True, **options: Any) -> tf.data.Dataset:
        """Batches examples for `fit` (or, with training=False, for `evaluate`).

        Args:
            examples: A tuple of arrays, or a tf.data.Dataset of single examples.
            training: Whether to shuffle and augment.
            options: Further arguments of `tfopt.data.pipeline`.
        """
        return data.pipeline(
            examples,
            batch_size=self.config.global_batch_size,
            training=training,
            seed=self.config.seed,
            prefetch=self.prefetch,
            **options,
        )

    def __str__(self) -> str:
        width = max(len(decision.setting) for decision in self.decisions)
        values = max(len(decision.value) for decision in self.decisions)
        return "\n".join(f"{d.setting:{width}}  {d.value:{values}}  {d.reason}" for d in self.decisions)


def plan(config: TrainingConfig | HasTraining | None = None, hardware: Hardware | None = None) -> Plan:
    """Decides every "auto" and refuses combinations that are known to fail.

    Args:
        config: A training configuration, or a recipe; None means TrainingConfig().
        hardware: What to decide for; None means this machine.
    Raises:
        ConfigError: The settings exclude each other; the message names the remedy.
    Example:
        >>> decided = plan(TrainingConfig(precision="float32", jit_compile=False, steps_per_execution=4))
        >>> decided.steps_per_execution, decided.decisions[0].reason
        (4, 'as asked')
    """
    config = config or TrainingConfig()
    settings = config if isinstance(config, TrainingConfig) else getattr(config, "training", None)
    if not isinstance(settings, TrainingConfig):
        raise ConfigError(f"config must be a TrainingConfig or a Recipe. Received: config={config!r}.")
    machine = hardware or detect()
    strategy, strategy_value, strategy_reason = _strategy(settings, machine)
    precision, precision_reason = _precision(settings, machine)
    jit_compile, jit_reason = _jit_compile(settings, machine, strategy)
    steps, steps_reason = _steps_per_execution(settings, strategy)
    prefetch, prefetch_reason = _prefetch(settings)
    return Plan(
        config=settings,
        precision=precision,
        jit_compile=jit_compile,
        strategy=strategy,
        steps_per_execution=steps,
        prefetch=prefetch,
        decisions=(
            Decision(setting="precision", value=precision, reason=precision_reason),
            Decision(setting="jit_compile", value=str(jit_compile), reason=jit_reason),
            Decision(setting="strategy", value=strategy_value, reason=strategy_reason),
            Decision(setting="steps_per_execution", value=str(steps), reason=steps_reason),
            Decision(setting="prefetch", value=str(prefetch), reason=prefetch_reason),
            _batch(settings, strategy),
        ),
    )


def _precision(config: TrainingConfig, machine: Hardware) -> tuple[str, str]:
    if config.precision != "auto":
        return config.precision, "as asked"
    if not machine.gpus:
        return "float32", "no GPU; half precision gains a CPU little, or slows it down"
    capabilities = [gpu.compute_capability for gpu in machine.gpus]
    if any(capability is None for capability in capabilities):
        return "float32", "the GPU's compute capability is unknown"
    least = min(capability for capability in capabilities if capability is not None)
    name = f"compute capability {least[0]}.{least[1]}"
    if least >= (8, 0):
        return "mixed_bfloat16", f"{name} has bfloat16 tensor cores, and bfloat16 needs no loss scaling"
    if least >= (7, 0):
        return "mixed_float16", f"{name} has float16 tensor cores; the loss is scaled dynamically"
    return "float32", f"{name} has no tensor cores"


def _jit_compile(config: TrainingConfig, machine: Hardware, strategy: Any) -> tuple[bool, str]:
    if config.jit_compile != "auto":
        if config.jit_compile and strategy is not None:
            raise ConfigError(
                "jit_compile and strategy exclude each other: Keras' fit fails under XLA with a distribution strategy "
                f"(keras issue 20763). Received: jit_compile=True, strategy={config.strategy!r}. "
                "Set jit_compile=False or strategy='none'."
            )
        return bool(config.jit_compile), "as asked"
    if not machine.gpus:
        return False, "no GPU; on a CPU XLA slows convolutions down and takes long to start"
    if strategy is not None:
        return False, "Keras' fit fails under XLA with a distribution strategy (keras issue 20763)"
    return True, f"XLA fuses the step's small kernels on {machine.gpus[0].name}"


def _strategy(config: TrainingConfig, machine: Hardware) -> tuple[Any, str, str]:
    if not isinstance(config.strategy, str):
        return config.strategy, type(config.strategy).__name__, "as given"
    if config.strategy == "mirrored":
        strategy = _mirrored()
        return strategy, f"mirrored, {strategy.num_replicas_in_sync} replicas", "as asked"
    if config.strategy == "auto" and len(machine.gpus) > 1:
        strategy = _mirrored()
        return strategy, f"mirrored, {strategy.num_replicas_in_sync} replicas", f"{len(machine.gpus)} GPUs"
    if config.strategy == "none":
        return None, "none", "as asked"
    return None, "none", f"one GPU, {machine.gpus[0].name}" if machine.gpus else "no GPU; one CPU device"


@functools.cache
def _mirrored() -> tf.distribute.MirroredStrategy:
    """One for the whole process: two number their collective operations alike, and TensorFlow mixes these up."""
    return tf.distribute.MirroredStrategy()


def _steps_per_execution(config: TrainingConfig, strategy: Any) -> tuple[int, str]:
    if config.steps_per_execution != "auto":
        if config.steps_per_execution > 1 and strategy is not None:
            raise ConfigError(
                "steps_per_execution must be 1 under a distribution strategy: Keras' fit fails with more. "
                f"Received: steps_per_execution={config.steps_per_execution}, strategy={config.strategy!r}. "
                "Set steps_per_execution=1 or strategy='none'."
            )
        return config.steps_per_execution, "as asked"
    if strategy is not None:
        return 1, "Keras' fit fails with more under a distribution strategy"
    return STEPS_PER_CALL, "fewer returns to Python between steps; callbacks follow every 10 steps"


def _prefetch(config: TrainingConfig) -> tuple[int, str]:
    if config.prefetch != "auto":
        return config.prefetch, "as asked"
    return data.PREFETCH, "enough to overlap input and training; tf.data's autotuner makes the end of an epoch wait"


def _batch(config: TrainingConfig, strategy: Any) -> Decision:
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    size = config.global_batch_size
    if size % replicas:
        lower, upper = size // replicas * replicas, (size // replicas + 1) * replicas
        raise ConfigError(
            f"global_batch_size must be divisible by the number of replicas. "
            f"Received: global_batch_size={size}, {replicas} replicas. "
            f"Use {f'{lower} or {upper}' if lower else upper}."
        )
    reason = "one device" if replicas == 1 else f"{size // replicas} on each of {replicas} replicas"
    return Decision(setting="global_batch_size", value=str(size), reason=f"as asked; {reason}")
