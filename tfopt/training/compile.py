"""Compiles a Keras model under a plan. Keras' own `fit` then trains it, with tfopt's training step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfopt.compat.forks import check_not_forked
from tfopt.compat.kinds import check_keras_3
from tfopt.compat.layers import layers_inside
from tfopt.compat.optimizers import inner_optimizer
from tfopt.compat.trainer import built_under
from tfopt.data.augment.augmentation import Augmentation
from tfopt.data.augment.config import AugmentConfig
from tfopt.errors import ConfigError, UnsupportedModelError, warn
from tfopt.models.float32_outputs import float32_outputs as float32_outputs  # also tfopt.training's
from tfopt.models.float32_outputs import half_outputs, keep_float32
from tfopt.profiling.tensor_cores import tensor_core_alignment as tensor_core_alignment  # also tfopt.training's
from tfopt.report import PassReport, Skip
from tfopt.settings.validation import check_type
from tfopt.training.compile_report import lost_by_own_step, own_loss, report_of
from tfopt.training.config import TrainingConfig
from tfopt.training.distributed.strategy import on_replicas
from tfopt.training.distributed.whole_batch import approximated_metrics, check_given_losses
from tfopt.training.losses import parts_in_words
from tfopt.training.pipeline_parallel.step import Stages, split
from tfopt.training.plan import Plan
from tfopt.training.step import runtime
from tfopt.training.step.augment import StepAugmentation, for_model
from tfopt.training.step.calls import compile_arguments
from tfopt.training.step.keras_step import KerasStep
from tfopt.training.step.step import Step
from tfopt.training.xla import xla_blockers

# The settings that an optimizer is made of.
OF_OPTIMIZER = (
    "optimizer",
    "learning_rate",
    "decay",
    "warmup_epochs",
    "base_batch_size",
    "optimizer_arguments",
    "weight_decay",
    "ema_momentum",
)


def compile(
    model: keras.Model,
    plan: Plan,
    *,
    optimizer: str | keras.optimizers.Optimizer = "adam",
    loss: Any = None,
    metrics: Sequence[Any] | None = None,
    augment: Augmentation | AugmentConfig | None = None,
    **options: Any,
) -> PassReport:
    """Compiles a model, so that its `fit`, `evaluate` and `train_on_batch` run tfopt's training step.

    The step combines the plan's strategy, XLA, micro-batches and steps per execution. `fit` saves and resumes the
    training if the plan has a checkpoint directory, and stops with a reason if the training cannot succeed. The model's
    class does not change, and a later `model.compile` of Keras removes all of this. A model with its own `train_step`
    keeps it, and Keras runs it as usual; the report says what such a model cannot have.

    If the plan chose half precision by itself, the layers that compute the outputs are set to float32, as
    `tfopt.float32_outputs` does; the report lists them. Under float16, Keras itself adds the dynamic loss scaling. An
    optimizer or metric that was made outside the strategy's scope gets new variables, which are on every replica.

    Args:
        model: Any Keras model, built under `plan.scope()`.
        plan: The plan that `tfopt.plan` returned.
        optimizer, loss, metrics, options: As in `keras.Model.compile`, or in the `compile` of the model's class. An
            optimizer that is named has Keras' default settings; `plan.optimizer(steps_per_epoch=...)` makes one with
            those of the config. Losses must average over the batch, which is Keras' default. If replicas or
            micro-batches divide it, a loss in which examples meet, such as Dice over all of them, is refused; masks and
            weights count as in the whole batch.
        augment: Random changes of the images of each training step, on the device; see tfopt.data.AugmentConfig. They
            are not part of the model: evaluation, prediction and exports see the images as they are. With mixup or
            cutmix, the loss takes shares of each class, such as CategoricalCrossentropy.
    Returns: A report: how the model trains, what it cannot have, and the layers whose training differs from Keras' own
        step on one device (embeddings, and layers with their own state).
    Raises:
        ConfigError: The plan or an option does not fit this model.
        UnsupportedModelError: The model was built outside `plan.scope()`, or cannot be split over a pipeline.
    Example:
        >>> import keras, numpy as np
        >>> from tfopt.training.config import TrainingConfig
        >>> from tfopt.training.plan import plan
        >>> decided = plan(TrainingConfig(precision="float32"))
        >>> with decided.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> print(compile(model, decided, optimizer="sgd", loss="mse"))
        compile: 1 changed, 0 skipped
          changed  sequential... (Sequential): trains by tfopt's step
        >>> history = model.fit(decided.pipeline((np.zeros((8, 4)), np.zeros((8, 1)))), verbose=0)
    """
    check_not_forked()
    _check_model(model, plan)
    _check_options(plan, optimizer, loss, options)
    own_step = type(model).train_step is not keras.Model.train_step
    divided = "" if own_step else parts_in_words(plan.replicas, max(plan.config.accumulate, plan.micro_batches))
    of_parts: list[Skip] = []
    if divided:
        _check_stateful(model, divided)
        check_given_losses(model, loss, divided)
        of_parts += own_loss(model, divided)
        for given in (metrics, options.get("weighted_metrics")):
            of_parts += approximated_metrics(model, given, divided)
    augmentation = for_model(augment, model, plan)
    if own_step:
        _check_own_step(model, plan, augmentation)
    blockers = list(xla_blockers(model)) if plan.jit_compile else []
    if blockers and plan.config.jit_compile is True:
        what = f"{blockers[0].name}: {blockers[0].reason}"
        warn(f"XLA cannot compile this model's training step, which goes on without it: {what}.")
    _warn_of_unused_settings(plan.config, optimizer)
    chosen_half = plan.config.precision == "auto" and plan.precision != "float32"
    if not chosen_half and (halves := half_outputs(model)):
        warn(
            f"Outputs are computed in half precision by {', '.join(layer.name for layer in halves)}: losses and "
            "probabilities lose digits. Call tfopt.float32_outputs(model) before compiling, or give these layers "
            'dtype="float32".'
        )

    # Under a strategy, Keras runs a model's own train_step without XLA, and one step at a time.
    limited = own_step and plan.strategy is not None
    jit_compile = plan.jit_compile and not (blockers or limited or options.get("run_eagerly"))
    steps = 1 if limited else plan.steps_per_execution
    of_plan = {"jit_compile": jit_compile, "steps_per_execution": steps}
    arguments = compile_arguments(model, {"optimizer": optimizer, "loss": loss, "metrics": metrics, **options}, of_plan)
    stages = None
    if plan.stage_devices and "call" in vars(model):  # it is run for the outputs of its layers, as by tfopt.distill
        raise ConfigError(
            f"strategy='pipeline' calls the layers of a model one by one. Received: {model.name!r}, whose layers are "
            "watched. Leave features out of the DistillationConfig, or choose another strategy."
        )
    if plan.stage_devices:
        cuts = plan.config.pipeline_cuts or None
        stages = split(model, plan.stage_devices, cuts, batch_size=plan.config.global_batch_size)
        stages.place()
    outputs = keep_float32(model) if chosen_half else PassReport(name="float32 outputs")
    runtime.uninstall(model)
    with plan.strategy.scope() if plan.strategy else contextlib.nullcontext():
        for name, value in arguments.items():  # in the same order on all workers
            if name != "loss":
                arguments[name] = keras.tree.map_structure(lambda each: on_replicas(each, plan.strategy), value)
        model.compile(**arguments)
    for name in of_plan.keys() - arguments.keys():
        setattr(model, name, of_plan[name])
    if stages is not None:
        stages.place_optimizer(model.optimizer)
    if own_step:
        lost = lost_by_own_step(model, plan, steps)
        return PassReport(name="compile", changed=outputs.changed, skipped=[*outputs.skipped, *blockers, lost])
    when_built = functools.partial(keep_float32, model) if chosen_half else None
    _install(model, plan, stages, augmentation, jit_compile=jit_compile, when_built=when_built)
    return report_of(model, plan, stages, outputs, [*blockers, *of_parts])


def put_step(model: keras.Model, plan: Plan) -> None:
    """Puts tfopt's training step under a model that Keras has compiled. Keras' settings of the model stay as they are.

    The model keeps its optimizer, losses and metrics, its `jit_compile` and its `steps_per_execution`, and the errors
    of TensorFlow. A later `model.compile` removes the step.
    Under a strategy, each replica runs Keras' own step; see KerasStep.

    Raises:
        UnsupportedModelError: The model has its own `train_step`, or was built under another strategy.
    Example:
        >>> import numpy as np
        >>> from tfopt.training.plan import plan
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> put_step(model, plan())
        >>> model.fit(np.zeros((8, 4)), np.zeros((8, 1)), verbose=0).epoch
        [0]
    """
    _check_model(model, plan)
    if type(model).train_step is not keras.Model.train_step:
        raise UnsupportedModelError(
            f"model must train by Keras' train_step. Received: {model.name!r}, whose class {type(model).__name__} has "
            "its own. Override compute_loss instead of train_step."
        )
    runtime.uninstall(model)
    _install(model, plan, None, None, jit_compile=bool(model.jit_compile), as_keras=True)


def _install(
    model: keras.Model,
    plan: Plan,
    stages: Stages | None,
    augment: StepAugmentation | None,
    *,
    jit_compile: bool,
    as_keras: bool = False,
    when_built: Callable[[], object] | None = None,
) -> None:
    config = plan.config

    def make_step(jit_compile: bool) -> Step | KerasStep:
        if as_keras and plan.strategy is not None:
            return KerasStep(model)
        return Step(
            model,
            jit_compile=jit_compile,
            accumulate=config.accumulate,
            sparse_gradients=config.sparse_embedding_gradients,
            stages=stages,
            micro_batches=plan.micro_batches,
            augment=augment,
            output_losses_as_keras=as_keras,
        )

    explains = not as_keras
    made = runtime.Runtime(model, plan, make_step, jit_compile=jit_compile, explains=explains, when_built=when_built)
    made.install()


def _check_stateful(model: keras.Model, divided: str) -> None:
    """Refuses recurrent layers that keep the state of each example of a batch."""
    stateful = [layer.name for layer in layers_inside(model) if getattr(layer, "stateful", False)]
    if stateful:
        raise UnsupportedModelError(
            f"A stateful recurrent layer keeps a state for each example of the whole batch, which {divided} would "
            f"divide. Received: {', '.join(map(repr, stateful))} with stateful=True. Set accumulate=1 and "
            "strategy='none', or stateful=False."
        )


def _check_options(plan: Plan, optimizer: Any, loss: Any, options: dict[str, Any]) -> None:
    for name in ("jit_compile", "steps_per_execution"):
        if name in options:
            rule = f"{name} must be set in the TrainingConfig that the plan was made of"
            raise ConfigError(f"{rule}. Received: {name}={options[name]!r}.")
    if optimizer is None:
        raise ConfigError("optimizer must be given. Received: optimizer=None. Name one, for example 'adam'.")
    if plan.replicas == plan.config.accumulate == plan.micro_batches == 1:
        return
    for item in keras.tree.flatten(loss):
        reduction = getattr(item, "reduction", "sum_over_batch_size")
        if reduction in ("sum", "none", None):
            raise ConfigError(
                "loss must average over the batch where a batch is divided over replicas or micro-batches. Received: "
                f"{type(item).__name__} with reduction={reduction!r}. Leave reduction at 'sum_over_batch_size'."
            )
    inner = inner_optimizer(optimizer)
    if isinstance(inner, keras.Optimizer) and inner.gradient_accumulation_steps and plan.strategy is not None:
        raise ConfigError(
            "gradient_accumulation_steps of an optimizer fails under a distribution strategy. Received: "
            f"gradient_accumulation_steps={inner.gradient_accumulation_steps}. "
            "Leave it out, and set accumulate in TrainingConfig."
        )


def _check_model(model: keras.Model, plan: Plan) -> None:
    check_type("plan", plan, Plan, "Pass tfopt.plan(config).")
    check_keras_3(model)
    check_type("model", model, keras.Model)
    strategy = built_under(model)
    if strategy is not plan.strategy:
        raise UnsupportedModelError(
            f"model must be built under plan.scope(). Received: {model.name!r}, built under "
            f"{'no strategy' if strategy is None else type(strategy).__name__}, with a plan for "
            f"{'none' if plan.strategy is None else type(plan.strategy).__name__}. "
            "Build it within `with plan.scope():`."
        )


def _check_own_step(model: keras.Model, plan: Plan, augmentation: StepAugmentation | None) -> None:
    config = plan.config
    distributed = plan.strategy is not None
    asked = {
        "augment": augmentation is not None,
        "accumulate": config.accumulate > 1,
        "checkpoint_dir": config.checkpoint_dir is not None,
        "strategy='pipeline'": bool(plan.stage_devices),
        "jit_compile=True under a strategy": distributed and config.jit_compile is True,
        "steps_per_execution under a strategy": distributed and config.steps_per_execution not in ("auto", 1),
    }
    refused = [name for name, is_asked in asked.items() if is_asked]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)} needs tfopt's training step. Received: {model.name!r}, whose class "
            f"{type(model).__name__} has its own train_step. Leave it out, or override compute_loss instead of "
            "train_step."
        )


def _warn_of_unused_settings(config: TrainingConfig, optimizer: Any) -> None:
    default = TrainingConfig()
    unused = {name: getattr(config, name) for name in OF_OPTIMIZER if getattr(config, name) != getattr(default, name)}
    if unused and isinstance(optimizer, str):
        settings = ", ".join(f"{name}={value!r}" for name, value in unused.items())
        warn(
            f"The TrainingConfig's {settings} has no effect: the model trains with Keras' default {optimizer!r}. Pass "
            "optimizer=plan.optimizer(steps_per_epoch=...) to compile."
        )
