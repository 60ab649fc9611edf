"""The training step of a recipe: traced for a precision (its kernels, its memory), and measured on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from tfopt.advisor.device import of_card, of_processor, step_seconds
from tfopt.data import Examples
from tfopt.data.config import pipeline_settings
from tfopt.distillation import distill
from tfopt.distillation.config import PARENT
from tfopt.graph.unfolded import freeze_unfolded
from tfopt.hardware import Hardware, cpu_peak, find_card
from tfopt.profiling.cost import Kernel, kernels
from tfopt.profiling.cost.memory import step_bytes
from tfopt.profiling.cost.training import train_graph
from tfopt.recipe import Recipe
from tfopt.report import Record
from tfopt.runner.teacher import teacher_recipe
from tfopt.runner.work import loss_of
from tfopt.training import Plan, plan
from tfopt.training import compile as compile_model

MEASURED_SECONDS = 3.0
# Steps of a timed epoch: one call into TensorFlow.
STEPS = 10
LEAST_EPOCHS = 3


@dataclass(frozen=True, kw_only=True)
class RecipeStep:
    """The training step of a recipe on one device."""

    examples: int  # number of examples of a step
    accumulate: int  # number of micro-batches, each of which runs the kernels once
    kernels: Sequence[Kernel]  # the kernels of a micro-batch
    memory_bytes: int  # the estimated memory of a micro-batch
    gradient_bytes: int  # bytes of the gradients of all weights


@dataclass(frozen=True, kw_only=True)
class ThisMachine(Record):
    """The same estimate for this machine, against a measured step."""

    device: str  # the device
    precision: str  # name of the dtype policy
    estimated_ms: float | None  # estimated time of a step; None if a peak rate is unknown
    measured_ms: float  # measured time of a step: the median of several
    error: float | None  # estimated / measured - 1; None without an estimate

    def __str__(self) -> str:
        head = f"this machine ({self.device}, {self.precision}): measured {self.measured_ms:.3g} ms per step"
        if self.estimated_ms is None or self.error is None:
            return f"{head}, estimate unavailable (a peak rate is unknown)"
        return f"{head}, estimated {self.estimated_ms:.3g} ms, error {self.error:+.0%}"


def plan_on(recipe: Recipe, hardware: Hardware) -> Plan:
    """Returns the plan of a recipe for one device of a machine."""
    return plan(replace(recipe.training, strategy="none", checkpoint_dir=None, memory_growth=False), hardware)


def first_batch(recipe: Recipe, examples: Examples) -> Any:
    """Returns one batch as the model is trained on it. Its images are not changed, but its targets are shares of
    classes if an augmentation mixes them.
    """
    decided = plan_on(recipe, Hardware(logical_cores=1, memory_bytes=0, tensorflow_version=tf.__version__))
    options = {**pipeline_settings(recipe.data), "augment": None}
    batch = next(iter(decided.pipeline(examples, training=False, **options)))
    augmentation = recipe.data.augmentation(examples)
    return batch if augmentation is None else augmentation.one_hot(batch)


def compiled_model(recipe: Recipe, examples: Examples, decided: Plan) -> keras.Model:
    """Returns the model of a recipe, compiled by Keras with the optimizer, the loss and the metrics of the recipe.

    It learns from the teacher of the recipe, untrained, which computes in each step unless its outputs are cached.
    """
    with decided.scope():
        model = recipe.model.build(examples.input_shape, examples.outputs)
        model.compile(
            optimizer=decided.optimizer(steps_per_epoch=1),
            loss=loss_of(recipe, examples, recipe.data.augmentation(examples)),
            metrics=recipe.find_task().metrics(examples),
            jit_compile=False,
        )
    config = recipe.distillation
    if config is None or config.teacher == PARENT or config.teacher_cache is not None:
        return model
    if (of_teacher := teacher_recipe(recipe)) is None:
        distill(model, config.teacher, config.distillation())
        return model
    with decided.scope():
        teacher = freeze_unfolded(of_teacher.model.build(examples.input_shape, examples.outputs))
    size = _at_once(recipe)  # which is open in the graph, and decides its memory
    inputs = {
        name: tf.TensorSpec([size, *each.shape[1:]], each.dtype, each.name) for name, each in teacher.inputs.items()
    }
    distill(model, replace(teacher, inputs=inputs), config.distillation())
    return model


def _at_once(recipe: Recipe) -> int:
    """Returns the number of examples of a micro-batch."""
    return math.ceil(recipe.training.global_batch_size / recipe.training.accumulate)


def batch_specs(recipe: Recipe, batch: Any) -> Any:
    """Returns the specs of a micro-batch of a recipe, from any batch of its examples."""
    size = _at_once(recipe)
    return keras.tree.map_structure(lambda value: tf.TensorSpec([size, *value.shape[1:]], value.dtype), batch)


def recipe_step(recipe: Recipe, examples: Examples, batch: Any, decided: Plan) -> RecipeStep:
    """Traces the training step of a recipe under a plan. Under XLA, its kernels are fused."""
    specs = batch_specs(recipe, batch)
    model = compiled_model(recipe, examples, decided)
    graph, _ = train_graph(model, specs)
    trained = sum(math.prod(variable.shape) * variable.value.dtype.size for variable in model.trainable_variables)
    return RecipeStep(
        examples=recipe.training.global_batch_size,
        accumulate=recipe.training.accumulate,
        kernels=kernels(graph, fused=decided.jit_compile),
        memory_bytes=step_bytes(graph, model, specs),
        gradient_bytes=trained,
    )


def this_machine(recipe: Recipe, examples: Examples, batch: Any, decided: Plan, step: RecipeStep) -> ThisMachine:
    """Estimates and measures a step of a recipe on the device of a plan."""
    hardware = decided.hardware
    card = find_card(hardware.gpus[0].name) if hardware.gpus else None
    device = None
    if card is not None:
        device = of_card(hardware.gpus[0].name, card)
    elif not hardware.gpus:
        device = of_processor(hardware, cpu_peak())
    seconds = None if device is None else step_seconds(step.kernels, device)
    estimated = None if seconds is None else 1e3 * seconds * step.accumulate
    measured = measured_step_ms(recipe, examples, batch, decided)
    return ThisMachine(
        device=device.name if device is not None else hardware.gpus[0].name,
        precision=decided.precision,
        estimated_ms=estimated,
        measured_ms=measured,
        error=None if estimated is None else estimated / measured - 1,
    )


def measured_step_ms(recipe: Recipe, examples: Examples, batch: Any, decided: Plan) -> float:
    """Returns the time of a training step of a new model of the recipe in `fit`, always on the same batch."""
    model = compiled_model(recipe, examples, decided)
    compile_model(model, decided, optimizer=model.optimizer, loss=model.loss)
    size = recipe.training.global_batch_size
    times = -(-size // int(keras.tree.flatten(batch)[0].shape[0]))  # the batch is repeated, or cut
    whole = keras.tree.map_structure(lambda value: tf.concat([value] * times, 0)[:size], batch)
    data = tf.data.Dataset.from_tensors(whole).repeat()
    timer = _Timer()
    model.fit(data, steps_per_epoch=STEPS, epochs=LEAST_EPOCHS + 1000, verbose=0, shuffle=False, callbacks=[timer])
    return 1e3 * statistics.median(timer.seconds) / STEPS


class _Timer(keras.callbacks.Callback):
    """Times the epochs but the first, and ends the training after MEASURED_SECONDS."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._end = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if epoch == 0:  # it traces and compiles
            self._end = now + MEASURED_SECONDS
            return
        self.seconds.append(now - self._start)
        if now > self._end and len(self.seconds) >= LEAST_EPOCHS:
            self.model.stop_training = True
