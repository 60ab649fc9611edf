"""The training step of a recipe, traced for a precision: its kernels and its memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from tfopt.data import Examples
from tfopt.hardware import Hardware
from tfopt.profiling.cost import Kernel, TrainingMemory, kernels, training_memory
from tfopt.profiling.cost.training import train_graph
from tfopt.recipe import Recipe
from tfopt.runner.model_check import are_shares
from tfopt.training import Plan, plan


@dataclass(frozen=True, kw_only=True)
class RecipeStep:
    """The training step of a recipe on one device.

    Attributes:
        examples: Number of examples of a step.
        accumulate: Number of micro-batches, each of which runs the kernels once.
        kernels: The kernels of a micro-batch.
        memory: The estimated memory of a micro-batch.
        gradient_bytes: Bytes of the gradients of all weights.
    """

    examples: int
    accumulate: int
    kernels: Sequence[Kernel]
    memory: TrainingMemory
    gradient_bytes: int


def plan_on(recipe: Recipe, hardware: Hardware) -> Plan:
    """Returns the plan of a recipe for one device of a machine."""
    return plan(replace(recipe.training, strategy="none", checkpoint_dir=None, memory_growth=False), hardware)


def first_batch(recipe: Recipe, examples: Examples) -> Any:
    """Returns one batch as the model is trained on it, without augmentation."""
    decided = plan_on(recipe, Hardware(logical_cores=1, memory_bytes=0, tensorflow_version=tf.__version__))
    options = {**recipe.data.pipeline_arguments(), "augment": None}
    return next(iter(decided.pipeline(examples, training=False, **options)))


def compiled_model(recipe: Recipe, examples: Examples, decided: Plan) -> keras.Model:
    """Returns the model of a recipe, compiled by Keras with the optimizer, the loss and the metrics of the recipe."""
    task = recipe.find_task()
    soft = task.soft_loss if are_shares(examples, task) else None
    with decided.scope():
        model = recipe.model.build(examples.input_shape, examples.outputs)
        model.compile(
            optimizer=decided.optimizer(steps_per_epoch=1),
            loss=(soft or task.loss)(examples),
            metrics=task.metrics(examples),
            jit_compile=False,
        )
    return model


def recipe_step(recipe: Recipe, examples: Examples, batch: Any, decided: Plan) -> RecipeStep:
    """Traces the training step of a recipe under a plan. Under XLA, its kernels are fused.

    Args:
        recipe: The recipe.
        examples: Its examples.
        batch: One batch, from `first_batch`.
        decided: The plan for the device.
    """
    accumulate = recipe.training.accumulate
    size = math.ceil(recipe.training.global_batch_size / accumulate)
    specs = keras.tree.map_structure(lambda value: tf.TensorSpec([size, *value.shape[1:]], value.dtype), batch)
    model = compiled_model(recipe, examples, decided)
    graph, _ = train_graph(model, specs)
    found = kernels(graph, fused=decided.jit_compile)
    memory = training_memory(model, size, optimizer=model.optimizer, inputs=specs[0])
    trained = sum(math.prod(variable.shape) * variable.value.dtype.size for variable in model.trainable_variables)
    return RecipeStep(
        examples=recipe.training.global_batch_size,
        accumulate=accumulate,
        kernels=found,
        memory=memory,
        gradient_bytes=trained,
    )
