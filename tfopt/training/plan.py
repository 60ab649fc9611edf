"""Decides every "auto" of a training configuration before the model is built, and gives the reasons."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfopt import data, notebook
from tfopt.data import DataConfig, EpochCounter
from tfopt.errors import ConfigError, warn
from tfopt.hardware import Hardware, detect
from tfopt.report import Decision
from tfopt.training.config import TrainingConfig
from tfopt.training.distributed.strategy import choose_strategy, is_multi_worker, pipeline_devices
from tfopt.training.memory import remat_scope, set_memory_growth, tensor_float_32
from tfopt.training.optimizers import learning_rate_factor, make_optimizer
from tfopt.training.precision import choose_precision

# Small models gain most from it (benchmarks/plan_choices.py). A larger number gains little and delays callbacks.
STEPS_PER_CALL = 10
# With M micro-batches, the S stages of a pipeline are idle for (S - 1) / (M + S - 1) of the time: at most a fifth, if
# there are four micro-batches for each stage.
MICRO_BATCHES_PER_STAGE = 4


class HasTraining(Protocol):
    """An object with a training configuration, such as a Recipe."""

    @property
    def training(self) -> TrainingConfig: ...


@dataclass(frozen=True, kw_only=True)
class Plan:
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
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self.precision)
        try:
            with contextlib.ExitStack() as scopes:
                if self.strategy is not None:
                    scopes.enter_context(self.strategy.scope())
                if self.stage_devices:  # the model may be too large for one device, so it is built in host memory
                    scopes.enter_context(tf.device("CPU:0"))
                scopes.enter_context(remat_scope(self.config.remat))
                yield
        finally:
            keras.config.set_dtype_policy(before)

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
        found = config.pipeline_arguments() if of_source else {}
        if not config.augments or {"augment", "random_shift"} & given.keys():
            return found
        if of_source and config.augment.where != "device":
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

    def _repr_html_(self) -> str:
        rows = [(decision.setting, decision.value, decision.reason) for decision in self.decisions]
        return notebook.block("plan", notebook.table(rows, ("setting", "value", "reason"), folds=False))

    def __str__(self) -> str:
        width = max(len(decision.setting) for decision in self.decisions)
        values = max(len(decision.value) for decision in self.decisions)
        return "\n".join(f"{d.setting:{width}}  {d.value:{values}}  {d.reason}" for d in self.decisions)


def _check_floatx() -> None:
    """Raises ConfigError for half precision in Keras' own settings: losses and metrics would be summed up in it."""
    if keras.config.floatx() not in ("float32", "float64"):
        raise ConfigError(
            "keras.config.floatx() must be float32 or float64: Keras sums losses and metrics up in it, and a float16 "
            f"cannot count beyond 2048. Received: {keras.config.floatx()!r}. Call keras.config.set_floatx('float32') "
            "and set precision='mixed_float16' in TrainingConfig."
        )


def plan(config: TrainingConfig | HasTraining | None = None, hardware: Hardware | None = None) -> Plan:
    """Decides every "auto", and refuses settings that cannot train together.

    Unless `memory_growth` is off, TensorFlow allocates GPU memory as it needs it after this call. With
    strategy="multi_worker", the call waits for the other workers.

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
    config = config or TrainingConfig()
    settings = config if isinstance(config, TrainingConfig) else getattr(config, "training", None)
    if not isinstance(settings, TrainingConfig):
        raise ConfigError(f"config must be a TrainingConfig or a Recipe. Received: config={config!r}.")
    _check_floatx()
    machine = hardware or detect()
    decisions: list[Decision] = []

    def decide(setting: str, value: Any, reason: str) -> None:
        decisions.append(Decision(setting=setting, value=str(value), reason=reason))

    precision, reason = choose_precision(settings.precision, machine)
    decide("precision", precision, reason)
    _check_pipeline(settings)
    growth, growth_reason = set_memory_growth() if settings.memory_growth else (False, "as asked")  # before any device
    jit_compile, reason = _jit_compile(settings, machine)
    decide("jit_compile", jit_compile, reason)
    strategy, value, reason = choose_strategy(settings, machine)
    decide("strategy", value, reason)
    steps, reason = _steps_per_execution(settings)
    decide("steps_per_execution", steps, reason)
    prefetch, reason = _prefetch(settings)
    decide("prefetch", prefetch, reason)
    decide("global_batch_size", settings.global_batch_size, _batch(settings, strategy))
    if settings.base_batch_size is not None or settings.warmup_epochs:
        factor, reason = learning_rate_factor(settings)
        decide("learning_rate", f"{settings.learning_rate * factor:.4g}", _rate(settings, reason))
    if settings.accumulate > 1:
        decide("accumulate", settings.accumulate, _accumulate(settings, strategy))
    if is_multi_worker(strategy):
        decide("auto_shard", settings.auto_shard, _auto_shard(settings))
    devices = pipeline_devices(settings, machine) if settings.strategy == "pipeline" else ()
    micro_batches = 1
    if devices:
        micro_batches, reason = _micro_batches(settings, len(devices))
        decide("micro_batches", micro_batches, reason)
    if settings.sparse_embedding_gradients:
        decide("sparse_embedding_gradients", True, _sparse_gradients(settings, strategy))
    if settings.remat is not None:
        decide("remat", settings.remat, "as asked; activation functions are computed again in the backward pass")
    tf32, reason = tensor_float_32(machine)
    if settings.tensor_float_32 != "auto":
        tf32, reason = settings.tensor_float_32, "as asked"
    decide("tensor_float_32", tf32, reason)
    if machine.gpus:
        decide("memory_growth", growth, growth_reason)
    if settings.checkpoint_dir is not None:
        decide("checkpoint_dir", settings.checkpoint_dir, _checkpoints(settings))
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


def _jit_compile(config: TrainingConfig, machine: Hardware) -> tuple[bool, str]:
    pipeline = config.strategy == "pipeline"
    if config.jit_compile != "auto":
        if config.jit_compile and pipeline:
            raise ConfigError(
                "jit_compile must not be True with strategy='pipeline': XLA compiles for one device. "
                "Received: jit_compile=True. Set jit_compile=False."
            )
        return config.jit_compile, "as asked"
    if pipeline:
        return False, "XLA compiles for one device, a pipeline has several"
    if not machine.gpus:
        return False, "no GPU; on a CPU XLA slows convolutions down and takes long to start"
    return True, f"XLA fuses the step's small kernels on {machine.gpus[0].name}"


def _steps_per_execution(config: TrainingConfig) -> tuple[int, str]:
    if config.steps_per_execution != "auto":
        return config.steps_per_execution, "as asked"
    return STEPS_PER_CALL, "fewer returns to Python between steps; 1 in a fit with a callback that acts on each batch"


def _prefetch(config: TrainingConfig) -> tuple[int, str]:
    if config.prefetch != "auto":
        return config.prefetch, "as asked"
    return data.PREFETCH, "enough to overlap input and training; tf.data's autotuner makes the end of an epoch wait"


def _batch(config: TrainingConfig, strategy: Any) -> str:
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    size = config.global_batch_size
    if size % replicas:
        lower, upper = size // replicas * replicas, (size // replicas + 1) * replicas
        raise ConfigError(
            f"global_batch_size must be divisible by the number of replicas. "
            f"Received: global_batch_size={size}, {replicas} replicas. "
            f"Use {f'{lower} or {upper}' if lower else upper}."
        )
    share = "one device" if replicas == 1 else f"{size // replicas} on each of {replicas} replicas"
    return f"as asked; {share}"


def _rate(config: TrainingConfig, reason: str) -> str:
    fall = "falls along a cosine" if config.decay == "cosine" else "stays"
    rise = f"rises for {config.warmup_epochs:g} epochs, then " if config.warmup_epochs else ""
    return f"{reason}; {rise}{fall}"


def _accumulate(config: TrainingConfig, strategy: Any) -> str:
    size = config.global_batch_size // (1 if strategy is None else strategy.num_replicas_in_sync)
    if config.accumulate > size:
        raise ConfigError(
            "accumulate must be at most the examples of a step on one replica. "
            f"Received: accumulate={config.accumulate}, with {size} examples. Set accumulate={size} or less."
        )
    return f"as asked; {-(-size // config.accumulate)} examples at a time, one update for all"


def _sparse_gradients(config: TrainingConfig, strategy: Any) -> str:
    several = {
        "strategy='pipeline'": config.strategy == "pipeline",
        f"strategy={type(strategy).__name__}": strategy is not None,
        f"accumulate={config.accumulate}": config.accumulate > 1,
    }
    received = [name for name, is_so in several.items() if is_so]
    if received:
        raise ConfigError(
            "sparse_embedding_gradients needs one device and one micro-batch: each part of a divided batch names a row "
            "by itself, and the update would depend on how the batch is divided. Received: "
            f"sparse_embedding_gradients=True, {', '.join(received)}. Set strategy='none' and accumulate=1, or leave "
            "sparse_embedding_gradients out."
        )
    return "as asked; optimizers square and clip the gradient of a row as often as a batch names it, as in Keras"


def _auto_shard(config: TrainingConfig) -> str:
    return {
        "file": "as asked; each worker reads its own files, in an order that a resumed training does not repeat",
        "off": "as asked; each worker reads all data",
    }.get(config.auto_shard, "each worker takes its part of every batch")


def _check_pipeline(config: TrainingConfig) -> None:
    if config.strategy == "pipeline":
        if config.accumulate > 1:
            raise ConfigError(
                "accumulate must be 1 with strategy='pipeline', whose micro-batches do the same. "
                f"Received: accumulate={config.accumulate}. Set micro_batches."
            )
        return
    for name, unset in (("pipeline_devices", ()), ("pipeline_cuts", ()), ("micro_batches", "auto")):
        if getattr(config, name) != unset:
            raise ConfigError(
                f"{name} needs strategy='pipeline'. Received: {name}={getattr(config, name)!r}, "
                f"strategy={config.strategy!r}. Set strategy='pipeline', or leave {name} out."
            )


def _check_service(plan: Plan) -> None:
    """Raises ConfigError if the order of the examples matters, which a tf.data service does not keep."""
    refused = {
        f"strategy={type(plan.strategy).__name__}": (plan.strategy is not None, "trains on one device"),
        f"checkpoint_every={plan.config.checkpoint_every}": (
            plan.config.checkpoint_dir is not None and plan.config.checkpoint_every != "epoch",
            "has another order after a restart, and resumes only between epochs. Set checkpoint_every='epoch'",
        ),
    }
    for received, (is_refused, reason) in refused.items():
        if is_refused:
            raise ConfigError(f"A training with service {reason}. Received: {received}. Or leave service out.")


def _micro_batches(config: TrainingConfig, stages: int) -> tuple[int, str]:
    if config.micro_batches != "auto":
        if config.micro_batches > config.global_batch_size:
            raise ConfigError(
                "micro_batches must be at most global_batch_size. Received: "
                f"micro_batches={config.micro_batches}, global_batch_size={config.global_batch_size}. "
                f"Set micro_batches={config.global_batch_size} or less."
            )
        return config.micro_batches, "as asked"
    count = min(MICRO_BATCHES_PER_STAGE * stages, config.global_batch_size)
    idle = (stages - 1) / (count + stages - 1)
    return count, f"{MICRO_BATCHES_PER_STAGE} for each stage; stages idle {idle:.0%} of the time at the ends of a step"


def _checkpoints(config: TrainingConfig) -> str:
    every = "every epoch" if config.checkpoint_every == "epoch" else f"every {config.checkpoint_every} steps"
    how = {"auto": "resumed if there is one", True: "resumed", False: "begun anew"}[config.resume]
    return f"as asked; saved {every}, {config.keep_checkpoints} kept, {how}"
