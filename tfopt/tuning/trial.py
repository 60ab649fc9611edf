"""A trial: it trains a workload for some steps in its own process, and returns what was seen.

Either it trains one batch size as the whole training would, for its memory: on the largest shapes, with a validation
pass and a checkpoint. Or it times several batch sizes in turns.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from rich.console import Console

import tfopt.models.layers  # a file may name the classes that these register
import tfopt.models.text.attention
import tfopt.quantization.aware_training.layers
import tfopt.tasks.keras_metrics
import tfopt.tasks.label_smoothing  # noqa: F401
from tfopt.compat.trainer import built_under
from tfopt.data import Examples, epoch_steps
from tfopt.data.files.tfrecord import tfrecord
from tfopt.profiling.cost import training_memory
from tfopt.recipe import Recipe, with_changes
from tfopt.report import Record
from tfopt.runner.teacher import teacher_recipe
from tfopt.runner.work import begin, place_augmentation
from tfopt.training import compile as compile_model
from tfopt.training import plan
from tfopt.training.memory import set_memory_growth
from tfopt.training.xla import leave_convolutions_unfused
from tfopt.tuning.facts import facts_of, facts_of_data
from tfopt.tuning.limit import Used, kept, of_json
from tfopt.tuning.throughput import time_sizes
from tfopt.tuning.timed import TimedFit, Training
from tfopt.tuning.workload import DATA, MODEL, RECIPE, Workload, largest_example, only_largest

STEPS = 3  # of an epoch of a trial for its memory; there are two epochs, with a checkpoint between them
VALIDATED = 2  # batches
ESTIMATED = (1, 65)  # examples on a replica
STEP, TFOPT = "step", "tfopt"
INPUTS_AT_ONCE = 3  # batches that the pipeline holds: two in advance, and the one of the step


@dataclass(frozen=True, kw_only=True)
class Trial(Record):
    """What a trial does.

    Attributes:
        sizes: Numbers of examples on each replica.
        whole: Whether to train the one size as the whole training does, for its memory.
        window_s: Seconds of steps in each turn of a size.
        turns: Largest number of turns of all sizes.
        limit_s: Seconds after which no turn begins.
        decides: Whether fewer turns are taken where they suffice to tell the sizes apart, and more of the sizes that
            may be the knee where they do not.
        settings: Settings that the recipe is changed by, as nested tables.
        estimates: Whether to estimate the memory of a step too.
    """

    sizes: Sequence[int]
    whole: bool = False
    window_s: float = 0.5
    turns: int = 1
    limit_s: float = math.inf
    decides: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    estimates: bool = False


def train(
    workload: dict[str, Any], trial: dict[str, Any], limit: dict[str, Any] | None, directory: str
) -> dict[str, Any]:
    """Trains a recipe or a model, and returns what was seen.

    Args:
        workload, trial, limit: The fields of a Workload, a Trial and a Limit.
        directory: Directory of the trial.
    Returns: The number of replicas, what was seen of each size, the peak of the memory and what it was before the first
        step, and the number of the example with the largest shapes.
    """
    what, asked = Workload(**workload), Trial(**trial)
    set_devices(what)
    with kept(of_json(limit), Path(directory)) as used, contextlib.ExitStack() as scopes:
        training, largest = begin_training(what, asked.settings, scopes, only_longest=asked.whole)
        return {**measured(training, asked, used, Path(directory)), "largest": largest}


def set_devices(workload: Workload) -> None:
    """Gives this process as many logical CPU devices as the workload had."""
    if workload.devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * workload.devices)


def begin_training(
    what: Workload, settings: Mapping[str, Any], scopes: contextlib.ExitStack, *, only_longest: bool = False
) -> tuple[Training, int | None]:
    """Returns the training of a recipe or a model, and the number of the example with the largest shapes.

    Args:
        what: The recipe or the model.
        settings: Settings that the recipe is changed by, as nested tables; and "step", which may be "tfopt" for a model
            that Keras compiled.
        scopes: Ends what the training has begun.
        only_longest: Whether all examples are that with the largest shapes.
    """
    nested = {name: value for name, value in settings.items() if name != STEP}
    what = replace(what, keras_step=what.keras_step and settings.get(STEP) != TFOPT)
    recipe = with_changes(Recipe.from_toml(Path(what.folder, RECIPE), allow_code=True), nested)
    recipe = replace(recipe, training=replace(recipe.training, stop_on_nan=False))
    keras.utils.set_random_seed(recipe.training.seed)
    if recipe.training.memory_growth:  # here, because the examples start TensorFlow's devices
        set_memory_growth()
    leave_convolutions_unfused()
    largest = what.largest
    if what.kind == "recipe":
        examples = recipe.data.load()
        largest = largest_example(examples) if only_longest and largest is None else largest
    else:
        examples = tfrecord(directory=Path(what.folder, DATA))
    if only_longest:
        examples = only_largest(examples, largest)
    if what.kind == "recipe":
        return _of_recipe(recipe, examples, scopes), largest
    return _of_model(what, recipe, examples), largest


def _of_recipe(recipe: Recipe, examples: Examples, scopes: contextlib.ExitStack) -> Training:
    training = recipe.training
    steps = epoch_steps(
        examples,
        training.global_batch_size,
        steps_per_epoch=training.steps_per_epoch,
        drop_remainder=training.drop_remainder,
        buckets=len(recipe.data.bucket_boundaries),
    )
    recipe = replace(recipe, training=replace(training, steps_per_epoch=steps))  # the data repeats
    decided = plan(recipe)
    augmentation, places = place_augmentation(recipe, examples, decided)
    work = begin(recipe, decided, examples, augmentation, places, Console(quiet=True))
    teacher = teacher_recipe(recipe)
    if teacher is not None:  # untrained, it takes as long and as much memory
        work.lessons.learn_from(teacher.model.build(examples.input_shape, examples.outputs))
    else:
        work.try_teacher()
    scopes.enter_context(work.lessons.taught(work.model))
    own = work.compile("train", training.epochs, training.learning_rate, from_scratch=True)

    @cache
    def batches(size: int, training: bool) -> Any:
        return work.batches(replace(own, config=replace(own.config, global_batch_size=size)), training=training)

    own_facts = facts_of(own, work.model, examples)
    values, fixed = facts_of_data(recipe.data, examples, places)
    return Training(
        model=work.model,
        fit=work.model.fit,
        data=lambda size, steps: {"x": batches(size, True), "steps_per_epoch": steps, "shuffle": False},
        validation=lambda size: {"validation_data": batches(size, False), "validation_steps": VALIDATED},
        replicas=own.replicas,
        inputs=next(iter(examples.batches("train", 1)))[0],
        batch=training.global_batch_size,
        facts=replace(own_facts, values={**own_facts.values, **values}, fixed={**own_facts.fixed, **fixed}),
    )


def _of_model(workload: Workload, recipe: Recipe, examples: Examples) -> Training:
    for each in workload.modules:  # Keras reads only classes that are registered
        importlib.import_module(each)
    decided = plan(replace(recipe.training, steps_per_epoch=1))  # the data repeats
    with decided.scope():
        model = keras.saving.load_model(Path(workload.folder, MODEL))
    if not workload.keras_step:
        compiled = keras.saving.deserialize_keras_object(model.get_compile_config())
        given = {name: value for name, value in compiled.items() if value is not None}
        given = {name: given[name] for name in ("loss", "loss_weights", "metrics", "weighted_metrics") if name in given}
        compile_model(model, decided, optimizer=model.optimizer, **given)

    @cache
    def batches(size: int, training: bool) -> Any:
        sized = replace(decided, config=replace(decided.config, global_batch_size=size))
        return sized.pipeline(examples, training=training)

    return Training(
        model=model,
        fit=model.fit,
        data=lambda size, steps: {"x": batches(size, True), "steps_per_epoch": steps, "shuffle": False},
        validation=lambda size: {"validation_data": batches(size, False), "validation_steps": VALIDATED},
        replicas=decided.replicas,
        inputs=next(iter(examples.batches("train", 1)))[0],
        batch=decided.config.global_batch_size,
        facts=facts_of(decided, model, examples, keras_step=workload.keras_step),
    )


def measured(training: Training, trial: Trial, used: Used, directory: Path) -> dict[str, Any]:
    """Returns what was seen of a training; see `train`."""
    before = used.peak()
    seen = _whole(training, trial.sizes[0], directory) if trial.whole else _in_turns(training, trial)
    peak = used.peak()
    estimates: dict[Any, Any] = {}
    if trial.estimates and built_under(training.model) is not None:
        estimates = {"unavailable": "the estimate is of a step on one device, without a strategy"}
    elif trial.estimates:
        try:
            estimates = {size: estimated_bytes(training, size) for size in ESTIMATED}
        except Exception as error:  # noqa: BLE001 - a model that cannot be traced so still trains
            estimates = {"unavailable": textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")}
    return {
        "replicas": training.replicas,
        "seen": seen,
        "peak_bytes": peak,
        "bytes_before": before,
        "estimates": estimates,
    }


def _whole(training: Training, size: int, directory: Path) -> list[dict[str, Any]]:
    examples = size * training.replicas
    history = training.fit(
        **training.data(examples, STEPS),
        **training.validation(examples),
        epochs=2,
        verbose=0,
        callbacks=[_Checkpoint(directory)],
    )
    return [{"size": size, "losses": history.history.get("loss", [])}]


def _in_turns(training: Training, trial: Trial) -> list[dict[str, Any]]:
    fits = {size: TimedFit(training, size * training.replicas) for size in trial.sizes}
    end = time.perf_counter() + trial.limit_s
    for each in fits.values():
        each.prepare(trial.window_s)
    sides = {size: each.rate for size, each in fits.items()}
    rates = time_sizes(sides, trial.turns, lambda: time.perf_counter() > end, decides=trial.decides)
    return [{"size": size, "examples_per_s": rates[size], "losses": each.losses} for size, each in fits.items()]


def estimated_bytes(training: Training, size: int) -> int:
    """Returns the estimated memory of a step on all replicas, with the batches that wait for it."""
    specs = keras.tree.map_structure(
        lambda value: tf.TensorSpec([size, *value.shape[1:]], value.dtype), training.inputs
    )
    found = training_memory(training.model, size, optimizer=training.model.optimizer, inputs=specs)
    return training.replicas * (found.total_bytes + (INPUTS_AT_ONCE - 1) * found.input_bytes)


class _Checkpoint(keras.callbacks.Callback):
    """Saves the model after the first epoch, and removes the file."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch:
            return
        with tempfile.TemporaryDirectory(dir=self._directory) as folder:
            try:
                self.model.save(Path(folder, "checkpoint.keras"))
            except (ValueError, TypeError, NotImplementedError):  # a subclass without a configuration
                self.model.save_weights(Path(folder, "checkpoint.weights.h5"))
