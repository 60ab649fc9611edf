"""One trial: the model loses channels, is healed by its parent, exported and measured. It runs in its own process."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

import tfopt.models.layers  # a file may name the classes that these register
import tfopt.models.text.attention
import tfopt.quantization.aware_training.layers
import tfopt.tasks.keras_metrics
import tfopt.tasks.label_smoothing  # noqa: F401
from tfopt.atomic.files import write_text
from tfopt.atomic.own_files import json_in
from tfopt.data import Examples, epoch_steps
from tfopt.data.files.tfrecord import tfrecord
from tfopt.distillation import distill, end_distillation
from tfopt.distillation.config import PARENT
from tfopt.exporting import ExportConfig, export, verify
from tfopt.pruning import shrink
from tfopt.recipe import Recipe
from tfopt.runner.model_check import with_float_inputs
from tfopt.runner.work import VERIFIED_AT_ONCE
from tfopt.tasks import TASKS, Score
from tfopt.training import Plan, TrainingConfig, plan
from tfopt.training import compile as compile_model

MODEL, DATA, BASELINE, ARTIFACT, RECIPE = "parent.keras", "data", "float32", "artifact", "recipe.toml"
LOSSES = "losses.json"


def run_trial(run: str, trial: str, metric: str, heals: bool, modules: list[str]) -> dict[str, Any]:
    """Makes and measures the artifact of one trial.

    Args:
        run: Directory of the search, with the parent, the examples and the float32 artifact of the parent.
        trial: Directory of the trial, with its recipe.
        metric: Metric of the score, by its name.
        heals: Whether the model is trained after it has lost channels. Its size and speed do not depend on that.
        modules: The modules with layers and the loss of the model, which register them.
    Returns: The share of the multiply-adds that are left, and a receipt for each batch size.
    """
    for each in modules:
        importlib.import_module(each)
    root, own = Path(run), Path(trial)
    recipe = Recipe.from_toml(own / RECIPE)
    decided = plan(healing(recipe))  # before anything uses a GPU, whose memory other processes share
    keras.utils.set_random_seed(recipe.training.seed)
    examples = tfrecord(directory=root / DATA)
    score = score_of(metric, examples)
    share = 1.0
    with decided.scope():
        model = parent = keras.saving.load_model(root / MODEL)
        if recipe.shrink is not None:
            shrunk = shrink(parent, recipe.shrink, examples.batches("train"))
            figures = shrunk.report.metrics
            model, share = shrunk.model, figures["multiply_adds"] / figures["multiply_adds_before"]
    if model is not parent and heals:
        heal(model, parent, recipe, examples, decided, own / LOSSES)
    labelled = with_float_inputs(examples.batches("validation", VERIFIED_AT_ONCE), parent)
    export(
        model,
        own / ARTIFACT,
        export_config(recipe, score),
        calibration_data=with_float_inputs(examples.batches("train"), parent),
        evaluation_data=labelled,
        baseline=root / BASELINE,
    )
    receipts = [
        verify(own / ARTIFACT, data=None if number else labelled, metric=score, batch_size=size)
        for number, size in enumerate(recipe.batch_sizes)
    ]
    return {"multiply_adds": share, "receipts": [each.to_dict() for each in receipts]}


def score_of(metric: str, examples: Examples) -> Score | str:
    """Returns the score of a name as its task makes it: it knows the ignored target, and the bytes per target.

    Example:
        >>> from tfopt.data import synthetic
        >>> examples = replace(synthetic(examples=100, input_shape=(2,)), bytes_per_target=4.0)
        >>> score = score_of("bits_per_byte", examples)
        >>> score.update([[3, 7]], keras.ops.zeros((1, 2, 256)))
        >>> score.result(), score_of("accuracy", examples)
        (2.0, 'accuracy')
    """
    made = (task.score(examples) for task in TASKS.values())
    return next((score for score in made if not isinstance(score, str) and score.name == metric), metric)


def healing(recipe: Recipe) -> TrainingConfig:
    """Returns the settings of the training after channels have left, as in the later fits of a recipe."""
    rate = recipe.training.learning_rate
    changed: dict[str, Any] = {"warmup_epochs": 0.0, "ema_momentum": None, "checkpoint_dir": None, "resume": "auto"}
    if recipe.shrink is not None:
        changed |= {"epochs": recipe.shrink.epochs, "learning_rate": recipe.shrink.learning_rate or rate}
    return replace(recipe.training, **changed)


class WriteLosses(keras.callbacks.Callback):
    """Writes the loss of the validation part after each epoch to a file, which `read_losses` reads meanwhile."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file, self._losses = file, list[float]()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._losses.append(float(logs["val_loss"]))
        write_text(self._file, json.dumps(self._losses))


def read_losses(trial: Path) -> list[float]:
    """Returns the loss of the validation part after each epoch of a trial so far."""
    file = trial / LOSSES
    found = json_in(file.read_bytes()) if file.is_file() else None
    return found if isinstance(found, list) and all(isinstance(each, int | float) for each in found) else []


def heal(
    model: keras.Model, parent: keras.Model, recipe: Recipe, examples: Examples, decided: Plan, losses: Path
) -> None:
    """Trains a model that has lost channels, with the loss of its parent and the teacher of the recipe."""
    training = decided.config
    steps = epoch_steps(
        examples,
        training.global_batch_size,
        steps_per_epoch=training.steps_per_epoch,
        drop_remainder=training.drop_remainder,
    )
    compiled = keras.saving.deserialize_keras_object(parent.get_compile_config())
    more = {name: compiled[name] for name in ("loss_weights",) if compiled.get(name) is not None}
    optimizer = decided.optimizer(steps_per_epoch=steps)
    compile_model(model, decided, optimizer=optimizer, loss=compiled["loss"], **more)
    if recipe.distillation is not None:
        teacher = parent if recipe.distillation.teacher == PARENT else recipe.distillation.teacher
        distill(model, teacher, recipe.distillation.distillation())
    batches = decided.pipeline(examples, augment=recipe.data.augmentation(examples))
    model.fit(
        batches,
        validation_data=decided.pipeline(examples, training=False),
        epochs=training.epochs,
        steps_per_epoch=training.steps_per_epoch,
        shuffle=False,
        verbose=0,
        callbacks=[WriteLosses(losses)],
    )
    end_distillation(model)


def export_config(recipe: Recipe, score: Score | str) -> ExportConfig:
    """Returns the settings of the artifact that a recipe asks for. Its score bounds what int8 may lose, if anything."""
    quantization = recipe.quantization
    if quantization is None:
        return ExportConfig(format=recipe.formats[0])
    if quantization.metric in ("accuracy", getattr(score, "name", score)):  # "accuracy" is the default, as in a recipe
        quantization = replace(quantization, metric=score)
    int8 = ExportConfig(
        precision="int8",
        quantization=quantization,
        int8_nodes=recipe.int8_nodes,
        float_weights="int8",
        batch_sizes=recipe.batch_sizes,
    )
    return int8.of_format(recipe.formats[0])
