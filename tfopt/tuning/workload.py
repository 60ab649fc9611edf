"""What is tuned: a recipe, a compiled model with examples, or a script, as another process can read it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfopt.atomic.files import write_text, writing_to
from tfopt.compat.kinds import check_keras_3
from tfopt.compat.trainer import built_under
from tfopt.data import Examples, convert
from tfopt.data.user_data import check_examples
from tfopt.distillation.config import PARENT
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.recipe import Recipe
from tfopt.recipes import find_recipe
from tfopt.report import Record
from tfopt.training import TrainingConfig
from tfopt.training.distributed.cluster import find_cluster
from tfopt.training.step.runtime import plan_of
from tfopt.trials.own_modules import own_modules
from tfopt.tuning.workers import alone, cluster_of

RECIPE, MODEL, DATA = "recipe.toml", "model.keras", "data"
KERAS_BATCH = 32
SAVED = 8192  # examples of a model's data that the trials train on, again and again


@dataclass(frozen=True, kw_only=True)
class Workload(Record):
    """What a trial trains.

    Attributes:
        kind: What it is.
        name: The name of the recipe or of the model, or the path of the script.
        folder: Directory of the recipe's settings and, of a model, the model and its examples.
        words: The words that follow the script.
        examples: Number of training examples; None if it is unknown.
        largest: Number of the training example with the largest shapes; None if all have the same or it is unknown.
        devices: Number of logical CPU devices of a trial.
        keras_step: Whether a model trains by Keras' own step.
        modules: The modules of a model's own layers and loss, which register them.
        digest: The SHA-256 of a script; empty for a module.
    """

    kind: Literal["recipe", "model", "script"]
    name: str
    folder: str
    words: Sequence[str] = ()
    examples: int | None = None
    largest: int | None = None
    devices: int = 1
    keras_step: bool = False
    modules: Sequence[str] = ()
    digest: str = ""

    @property
    def title(self) -> str:
        """The name in a report: a script that is a module has the module's too."""
        return f"-m {self.words[0]}" if self.name == "-m" and self.words else self.name


def workload_of(
    what: Recipe | keras.Model,
    data: Any,
    folder: Path,
    training: TrainingConfig | None = None,
    *,
    is_alone: bool = False,
) -> Workload:
    """Writes what the trials need into a directory.

    Args:
        what: A recipe, or a compiled model.
        data: The examples of a model: `Examples`, a tuple of arrays, or a tf.data.Dataset, single or in batches.
        folder: The directory.
        training: Settings of a model's training. None means those of the plan that `tfopt.compile` was given or, if
            Keras compiled the model, Keras' own step.
        is_alone: Whether a worker of several trains without the others. Else several are refused.
    Raises:
        ConfigError: The examples have another form, or the settings cannot be given to another process.
        UnsupportedModelError: The model is not compiled.
    """
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if isinstance(what, keras.Model):
        return _of_model(what, data, folder, training, is_alone)
    if data is not None:
        raise ConfigError(
            f"data must be left out with a recipe, which has its own. Received: data={type(data).__name__}. Leave it "
            "out, or pass a model."
        )
    recipe = what
    if is_alone:
        recipe = replace(recipe, training=alone(recipe.training))
    else:
        _check_one_process(recipe, None)
    write_text(folder / RECIPE, _plain(recipe).to_toml())
    count = recipe.data.load().size("train")
    return Workload(kind="recipe", name=recipe.name, folder=str(folder), examples=count, devices=cpu_devices())


def recipe_or_model(what: Recipe | str | Path | keras.Model) -> Recipe | keras.Model:
    """Returns a model as it is; else the recipe, for its name or its file.

    Raises:
        ConfigError: It is something else, or no recipe has the name.
    """
    if isinstance(what, keras.Model):
        return what
    if not isinstance(what, Recipe | str | Path):
        raise ConfigError(
            f"model_or_recipe must be a Keras model, a Recipe, its name or its file. Received: {type(what).__name__}."
        )
    return find_recipe(what)


def of_script(path: str, words: Sequence[str], folder: Path) -> Workload:
    """Returns the workload of a script, which must be a Python file, or -m with a module as the first word."""
    if path != "-m" and not Path(path).is_file():
        raise ConfigError(f"The script must be a Python file. Received: {path}, which does not exist. Name a script.")
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    cluster = find_cluster()
    if cluster is not None and len(cluster.workers) > 1:
        raise ConfigError(
            "A script must be tuned in one process, because its trials would join the other workers. Received: "
            f"{' '.join([path, *words[:1]])}, in one of {len(cluster.workers)} workers ({cluster.source}). Unset "
            "TF_CONFIG or leave srun out."
        )
    digest = "" if path == "-m" else hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return Workload(kind="script", name=path, folder=str(folder), words=tuple(words), digest=digest)


def _of_model(model: keras.Model, data: Any, folder: Path, training: TrainingConfig | None, is_alone: bool) -> Workload:
    check_keras_3(model)
    if not model.compiled or not model.get_compile_config():
        raise UnsupportedModelError(
            f"model must be compiled, because the trials train it. Received: {model.name!r} without a loss. Call "
            "model.compile."
        )
    decided = plan_of(model)
    strategy = built_under(model)
    own = TrainingConfig(  # for Keras' own step
        precision="float32",
        strategy="none" if strategy is None else strategy,
        global_batch_size=_batch_size(model, data),
    )
    settings = training or (own if decided is None else decided.config)
    if isinstance(settings.strategy, tf.distribute.MirroredStrategy):
        settings = replace(settings, strategy="mirrored")
    if is_alone:
        settings = alone(settings)
    else:
        _check_one_process(model, training)
    examples = _examples(model, data)
    count = examples.size("train")
    if count == 0:
        raise ConfigError("data must hold training examples. Received: none. Pass at least one.")
    recipe = _plain(Recipe(name="model", training=settings))
    write_text(folder / RECIPE, recipe.to_toml())
    largest = largest_example(examples)
    train = examples.train.take(SAVED)
    if largest is not None:  # the first of those that are kept
        train = examples.train.skip(largest).take(1).concatenate(train)
    kept = examples.test.take(SAVED), None if examples.validation is None else examples.validation.take(SAVED)
    convert(replace(examples, train=train, test=kept[0], validation=kept[1]), folder / DATA, overwrite=True)
    unfinished = folder / f".{MODEL}"
    model.save(unfinished)
    unfinished.replace(folder / MODEL)
    return Workload(
        kind="model",
        name=model.name,
        folder=str(folder),
        examples=count,
        largest=None if largest is None else 0,
        devices=cpu_devices(),
        keras_step=decided is None and training is None,
        modules=own_modules(model),
    )


def _examples(model: keras.Model, data: Any) -> Examples:
    """Returns the examples of a model in their form for the pipeline."""
    if isinstance(data, Examples):
        return data
    if data is None:
        raise ConfigError(
            "data must be given with a model. Received: data=None. Pass tfopt.data.arrays(x, y), a tuple (x, y), or a "
            "tf.data.Dataset."
        )
    if isinstance(data, tf.data.Dataset):
        if _is_batched(model, data):
            data = data.unbatch()
        dataset = check_examples(data)
        if int(dataset.cardinality()) < 0:
            count = int(dataset.take(100 * SAVED).reduce(np.int64(0), lambda total, *_: total + 1))
            dataset = dataset.take(count).apply(tf.data.experimental.assert_cardinality(count))
    else:
        dataset = tf.data.Dataset.from_tensor_slices(check_examples(data))
    return Examples(name=model.name, train=dataset, test=dataset.take(256), outputs=1)


def _is_batched(model: keras.Model, data: tf.data.Dataset) -> bool:
    inputs: Any = getattr(model, "inputs", None)  # a subclass has none
    return bool(inputs) and tf.nest.flatten(data.element_spec)[0].shape.rank == len(inputs[0].shape)


def _batch_size(model: keras.Model, data: Any) -> int:
    """Returns the batch of a data set in batches; else that which `fit` takes."""
    if not isinstance(data, tf.data.Dataset) or not _is_batched(model, data):
        return KERAS_BATCH
    return next((int(tf.nest.flatten(each)[0].shape[0]) for each in data.take(1)), KERAS_BATCH)


def _plain(recipe: Recipe) -> Recipe:
    """Returns a recipe that only trains: without other stages, their teacher, exports and checkpoints."""
    training = replace(recipe.training, checkpoint_dir=None, resume="auto")
    off: dict[str, Any] = dict.fromkeys(("shrink", "pruning", "clustering", "quantization", "export_dir"))
    taught = recipe.distillation
    if taught is not None:  # a parent teaches the other stages only, and outputs on disk stay as they are
        off["distillation"] = None if taught.teacher == PARENT else replace(taught, teacher_cache=None)
    return replace(recipe, training=training, forms={}, **off)


def _check_one_process(what: keras.Model | Recipe, training: TrainingConfig | None) -> None:
    if cluster_of(what, training) is not None:
        raise ConfigError(
            "The speed settings must be searched in one process, because a trial that fails would stop the other "
            "workers. Received: a training of several workers. Unset TF_CONFIG or leave srun out, and search with "
            "strategy='mirrored'."
        )


def largest_example(examples: Examples) -> int | None:
    """Returns the number of the training example with the most elements; None if all have one shape.

    Example:
        >>> rows = tf.data.Dataset.range(5).map(lambda n: (tf.ones([n % 4 + 1]), n))
        >>> largest_example(Examples(name="rows", train=rows, test=rows, outputs=1))
        3
    """
    specs = tf.nest.flatten(examples.element_spec)
    if all(isinstance(each, tf.TensorSpec) and each.shape.is_fully_defined() for each in specs):
        return None
    sizes = examples.decoded("train").map(
        lambda *example: tf.add_n([tf.size(each) for each in tf.nest.flatten(example) if isinstance(each, tf.Tensor)])
    )
    return int(np.argmax(list(sizes.as_numpy_iterator())))


def only_largest(examples: Examples, number: int | None) -> Examples:
    """Returns examples that are all the same as one of the training part."""
    if number is None:
        return examples
    one = examples.train.skip(number).take(1).cache()
    count = max(examples.size("train") or SAVED, 1)
    return replace(examples, train=one.repeat(count), test=one.repeat(64), validation=None)


def cpu_devices() -> int:
    """Returns the number of logical CPU devices that this process has or will have, without starting them."""
    found = tf.config.get_logical_device_configuration(tf.config.list_physical_devices("CPU")[0])
    return len(found or [None])
