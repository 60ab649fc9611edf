"""Decides every "auto" of a training configuration before the model is built, and gives the reasons."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfopt import data
from tfopt.compat.forks import check_not_forked
from tfopt.data import DataConfig, EpochCounter
from tfopt.data.config import pipeline_settings
from tfopt.errors import ConfigError, warn
from tfopt.hardware import Hardware, detect
from tfopt.report import Decision
from tfopt.report.record import decision_table
from tfopt.report.sheet import Sheet, Shown
from tfopt.training import choices
from tfopt.training.config import TrainingConfig
from tfopt.training.distributed.strategy import choose_strategy, is_multi_worker, pipeline_devices
from tfopt.training.memory import remat_scope, set_memory_growth, tensor_float_32
from tfopt.training.optimizers import learning_rate_factor, make_optimizer
from tfopt.training.xla import leave_convolutions_unfused


class HasTraining(Protocol):
    """An object with a training configuration, such as a Recipe."""

    @property
    def training(self) -> TrainingConfig: ...


@dataclass(frozen=True, kw_only=True)
class Plan(Shown):
    """A training configuration with every "auto" decided.

    Attributes:
        config: The training configuration.
        hardware: The machine that the plan is for.
        precision: Name of the Keras dtype policy.
        jit_compile: Whether XLA compiles the training step.
        strategy: The tf.distribute strategy, or None for one device or a pipeline.
        stage_devices: The devices of a pipeline's stages; empty without a pipeline.
        micro_batches: The micro-batches of a pipeline; 1 without a pipeline.
        steps_per_execution: The steps of each call into TensorFlow.
        prefetch: The batches that are loaded in advance.
        tensor_float_32: Whether float32 matrix products may use TensorFloat-32.
        epoch: The number of the epoch. It decides the order of the examples in `pipeline`.
        data: The settings of the examples, if the plan is of a recipe. `pipeline` follows them.
        decisions: Each setting with its value and the reason. `print(plan)` shows them.
    """

    config: TrainingConfig
    hardware: Hardware
    precision: str
    jit_compile: bool
    strategy: tf.distribute.Strategy | None
    stage_devices: tuple[str, ...] = ()
    micro_batches: int = 1
    steps_per_execution: int
    prefetch: int
    tensor_float_32: bool
    decisions: tuple[Decision, ...]
    epoch: EpochCounter = field(default_factory=EpochCounter, repr=False, compare=False)
    data: DataConfig | None = field(default=None, repr=False)

    @property
    def replicas(self) -> int:
        """The number of replicas. Each trains on a part of every batch."""
        return 1 if self.strategy is None else int(self.strategy.num_replicas_in_sync)

    @property
    def per_replica_batch_size(self) -> int:
        """The examples of a step on each replica."""
        return self.config.global_batch_size // self.replicas

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files, if there are several workers."""
        return self.strategy is None or bool(self.strategy.extended.should_checkpoint)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Builds models with the plan's dtype policy and strategy. Afterwards, the earlier policy is set again."""
        with contextlib.ExitStack() as scopes:
            scopes.callback(keras.config.set_dtype_policy, keras.config.dtype_policy())
            keras.config.set_dtype_policy(self.precision)
            if self.strategy is not None:
                scopes.enter_context(self.strategy.scope())
            if self.stage_devices:  # the model may be too large for one device, so it is built in host memory
                scopes.enter_context(tf.device("CPU:0"))
            scopes.enter_context(remat_scope(self.config.remat))
            yield

    def pipeline(self, examples: Any, *, training: bool = True, **options: Any) -> tf.data.Dataset:
        """Batches examples for `fit` or, with training=False, for `evaluate`.

        If `tfopt.compile` compiled the model with this plan, the order of the examples depends only on the seed and on
        the number of the epoch. So a resumed training sees the same examples as one without interruption.

        The plan of a recipe follows the recipe's settings of the data, for the examples of a source: those of the
        pipeline, and the augmentation, unless the recipe asks for it on the device.

        Args:
            examples: `tfopt.data.Examples`, a tuple of arrays, or a tf.data.Dataset of single examples.
            training: Whether to shuffle and augment.
            options: More arguments of `tfopt.data.pipeline`. They come before those of the recipe.
        Warns:
            TfoptWarning: The recipe augments training examples, and this pipeline does not.
        """
        options = {**self._options_of_recipe(examples, training, options), **options}
        settings = {
            "batch_size": self.config.global_batch_size,
            "seed": self.config.seed,
            "prefetch": self.prefetch,
            # If the epoch decides the order, TensorFlow cannot find the files of the dataset.
            "epoch": None if self.config.auto_shard == "file" else self.epoch,
            "auto_shard": self.config.auto_shard,
            "drop_remainder": training and self.config.drop_remainder,
            "repeat": training and self.config.steps_per_epoch is not None,
        }
        if training and options.get("service") is not None:
            _check_service(self)
        return data.pipeline(examples, training=training, **{**settings, **options})

    def _options_of_recipe(self, examples: Any, training: bool, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the recipe's settings of the data as arguments of the pipeline; {} without a recipe."""
        config = self.data
        if config is None:
            return {}
        of_source = isinstance(examples, data.Examples)
        found = pipeline_settings(config) if of_source else {}
        if not config.augments or {"augment", "random_shift"} & given.keys():
            return found
        if of_source and augments_in_pipeline(config):
            return {**found, "augment": config.augmentation(examples)}
        if training:
            what = "on the device" if of_source else "examples of a source, and these are none"
            remedy = (
                "Give tfopt.compile augment=recipe.data.augmentation(examples), and this pipeline augment=None"
                if of_source
                else "Give this pipeline an augmentation, or augment=None"
            )
            warn(f"The recipe augments {what}: this pipeline does not augment. {remedy}.")
        return found

    def optimizer(self, steps_per_epoch: int) -> keras.optimizers.Optimizer:
        """Makes the optimizer of the configuration, with its schedule, weight decay and moving averages.

        `tfopt.compile` takes this optimizer, and any other that you make.

        Args:
            steps_per_epoch: Number of steps in an epoch. With `epochs` it decides when the learning rate is zero.
        Raises:
            ConfigError: `optimizer_arguments` of the configuration do not fit the optimizer.
        Example:
            >>> plan(TrainingConfig(optimizer="adamw", weight_decay=0.05)).optimizer(steps_per_epoch=10).weight_decay
            0.05
        """
        with self.scope():
            return make_optimizer(
                self.config,
                steps=steps_per_epoch * self.config.epochs,
                warmup_steps=round(steps_per_epoch * self.config.warmup_epochs),
            )

    def _sheet(self) -> Sheet:
        return Sheet(title="plan", tables=[decision_table(self.decisions)])

    def __str__(self) -> str:
        return str(replace(decision_table(self.decisions), head=()))


def plan(config: TrainingConfig | HasTraining | None = None, hardware: Hardware | None = None) -> Plan:
    """Decides every "auto", and refuses settings that cannot train together.

    Unless `memory_growth` is off, TensorFlow allocates GPU memory as it needs it after this call. With XLA and a GPU,
    it sets XLA_FLAGS in the environment so that convolutions stay unfused. With strategy="multi_worker", the call waits
    for the other workers.

    Args:
        config: A training configuration, or a recipe; None means TrainingConfig().
        hardware: The machine that the plan is for; None means this one.
    Raises:
        ConfigError: The settings contradict each other. The message names the remedy.
    Example:
        >>> decided = plan(TrainingConfig(precision="float32", jit_compile=False, steps_per_execution=4))
        >>> decided.steps_per_execution, decided.decisions[0].reason
        (4, 'as asked')
    """
    check_not_forked()
    config = config or TrainingConfig()
    settings = config if isinstance(config, TrainingConfig) else getattr(config, "training", None)
    if not isinstance(settings, TrainingConfig):
        raise ConfigError(f"config must be a TrainingConfig or a Recipe. Received: config={config!r}.")
    choices.check_floatx()
    machine = hardware or detect()
    decisions: list[Decision] = []

    def decide(setting: str, value: Any, reason: str) -> Any:
        decisions.append(Decision(setting=setting, value=str(value), reason=reason))
        return value

    def choose(setting: str, value: Any, reason: str) -> Any:
        asked = getattr(settings, setting)
        return decide(setting, value, reason) if asked == "auto" else decide(setting, asked, "as asked")

    precision = decide("precision", *choices.choose_precision(settings.precision, machine))
    choices.check_pipeline(settings)
    growth, growth_reason = set_memory_growth() if settings.memory_growth else (False, "as asked")  # before any device
    jit_compile = choose("jit_compile", *choices.choose_jit_compile(settings, machine))
    unfused = leave_convolutions_unfused() if jit_compile and machine.gpus else (None, "no GPU")  # likewise
    strategy, value, reason = choose_strategy(settings, machine)
    decide("strategy", value, reason)
    steps = choose("steps_per_execution", choices.STEPS_PER_CALL, choices.FEWER_RETURNS)
    prefetch = choose("prefetch", data.PREFETCH, choices.OVERLAPS)
    decide("global_batch_size", settings.global_batch_size, choices.batch_reason(settings, strategy))
    if settings.base_batch_size is not None or settings.warmup_epochs:
        factor, reason = learning_rate_factor(settings)
        decide("learning_rate", f"{settings.learning_rate * factor:.4g}", choices.rate_reason(settings, reason))
    if settings.accumulate > 1:
        decide("accumulate", settings.accumulate, choices.accumulate_reason(settings, strategy))
    if is_multi_worker(strategy):
        decide("auto_shard", settings.auto_shard, choices.auto_shard_reason(settings))
    devices = pipeline_devices(settings, machine) if settings.strategy == "pipeline" else ()
    micro_batches = choose("micro_batches", *choices.choose_micro_batches(settings, len(devices))) if devices else 1
    if settings.sparse_embedding_gradients:
        decide("sparse_embedding_gradients", True, choices.sparse_gradients_reason(settings, strategy))
    if settings.remat is not None:
        decide("remat", settings.remat, "as asked; activation functions are computed again in the backward pass")
    tf32 = choose("tensor_float_32", *tensor_float_32(machine))
    if machine.gpus:
        decide("memory_growth", growth, growth_reason)
        if jit_compile:
            decide("fused_convolutions", *unfused)
    if settings.checkpoint_dir is not None:
        decide("checkpoint_dir", settings.checkpoint_dir, choices.checkpoints_reason(settings))
    return Plan(
        config=settings,
        hardware=machine,
        precision=precision,
        jit_compile=jit_compile,
        strategy=strategy,
        stage_devices=devices,
        micro_batches=micro_batches,
        steps_per_execution=steps,
        prefetch=prefetch,
        tensor_float_32=tf32,
        decisions=tuple(decisions),
        data=of_recipe if isinstance(of_recipe := getattr(config, "data", None), DataConfig) else None,
    )


def augments_in_pipeline(config: DataConfig) -> bool:
    """Returns whether `Plan.pipeline` augments examples of a source. "auto" is the pipeline, which has the examples."""
    return config.augments and config.augment.where != "device"


def _check_service(plan: Plan) -> None:
    """Raises ConfigError if the order of the examples matters, which a tf.data service does not keep."""
    received = reason = ""
    if plan.strategy is not None:
        received, reason = f"strategy={type(plan.strategy).__name__}", "trains on one device"
    elif plan.config.checkpoint_dir is not None and plan.config.checkpoint_every != "epoch":
        received = f"checkpoint_every={plan.config.checkpoint_every}"
        reason = "has another order after a restart, and resumes only between epochs. Set checkpoint_every='epoch'"
    if received:
        raise ConfigError(f"A training with service {reason}. Received: {received}. Or leave service out.")
