"""The first fit of a script: what `tfopt accelerate` may change of it, and its training with data for any time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.trainer import built_under
from tfopt.errors import ConfigError, TrainingError
from tfopt.scripts.obstacles import obstacle, why_single_steps
from tfopt.training.step.fit_callback import per_batch_callback
from tfopt.training.xla import xla_blockers
from tfopt.tuning.facts import Facts
from tfopt.tuning.timed import EachBatch, Training
from tfopt.tuning.trial import VALIDATED
from tfopt.tuning.workload import KERAS_BATCH

# What of a script's own call of fit stays.
KEPT = ("x", "y", "sample_weight", "class_weight", "shuffle")
OWN_DATA = "the script prepares its data itself; see tfopt doctor"
OWN_PLAN = "tfopt accelerate does not set it; call tfopt.plan and tfopt.compile in the script"
# What `tfopt accelerate` leaves to the script.
LEFT = {
    **dict.fromkeys(("cache", "augment", "prefetch", "threads"), OWN_DATA),
    **dict.fromkeys(("accumulate", "remat", "communication"), OWN_PLAN),
    "strategy": "the script builds its model itself, in the scope of a strategy or not",
    "global_batch_size": "the script sets it; see --only batch-size",
}


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The first fit of a script.

    Attributes:
        model: Its model.
        original: Keras' own fit of the model.
        given: The arguments, by their names.
        compiled_at, at: The lines of the script that compile the model and call fit.
        compiled_with: The names of what it gives to compile; None if it did not compile the model.
    """

    model: keras.Model
    original: Callable[..., keras.callbacks.History]
    given: Mapping[str, Any]
    compiled_at: str
    at: str
    compiled_with: Sequence[str] | None = None


def facts_of_fit(fit: Fit, training: Training, examples: int | None) -> Facts:
    """Returns what `tfopt accelerate` may change of a fit of Keras' own, and why it may not change the rest."""
    model, fixed = fit.model, dict(LEFT)
    values = {
        "step": "keras",
        "precision": model.dtype_policy.name,
        "jit_compile": bool(model.jit_compile),
        "steps_per_execution": "auto",
    }
    if not model.jit_compile:
        fixed["jit_compile"] = f"{fit.compiled_at} leaves the model without XLA; jit_compile=True there asks for it"
    elif blockers := xla_blockers(model):
        fixed["jit_compile"] = f"XLA cannot compile {blockers[0].name}: {blockers[0].reason}"
    if model.dtype_policy.name != "float32":
        fixed["precision"] = f"the script itself chose {model.dtype_policy.name}"
    if reason := why_single_steps(model, fit.given):
        fixed["steps_per_execution"] = f"{fit.at} has one step per call because {reason}"
    if found := obstacle(model, fit.compiled_at):
        fixed |= dict.fromkeys(values, f"{found.name}: {found.reason}")
    trained = examples and math.floor(examples * (1 - (fit.given.get("validation_split") or 0)))
    steps = fit.given.get("steps_per_epoch") or (trained and math.ceil(trained / training.batch))
    return Facts(
        values=values,
        fixed=fixed,
        replicas=training.replicas,
        examples=examples,
        steps=steps,
        compiled_at="" if fit.compiled_with is None or built_under(model) is not None else fit.compiled_at,
        compiled_with=fit.compiled_with or (),
    )


def training_of(fit: Fit, *, rebatches: bool) -> tuple[Training, int | None]:
    """Returns the training of a script's fit, and its number of examples.

    Args:
        fit: The fit.
        rebatches: Whether the data is to get batches of any size. Else a data set stays as it is, the progress bar too,
            and something stands for a callback that acts on each batch.
    """
    if keras.config.backend() != "tensorflow":
        raise TrainingError(
            f"Keras must run on TensorFlow. Received: a script on {keras.config.backend()}. Set "
            "KERAS_BACKEND=tensorflow."
        )
    model, original, given = fit.model, fit.original, fit.given
    own = {name: given[name] for name in KEPT if given.get(name) is not None}
    data = own.pop("x", None)
    epoch_steps = None
    if isinstance(data, tf.data.Dataset):
        batched, examples = data, _count(data)
        first = next(iter(data))
        inputs = first[0] if isinstance(first, tuple) else first
        batch = int(tf.nest.flatten(inputs)[0].shape[0])

        def arguments(size: int, steps: int) -> dict[str, Any]:
            repeated = batched.repeat()
            repeated = repeated.rebatch(size) if rebatches else repeated
            return {**own, "x": repeated, "steps_per_epoch": steps, "shuffle": False}

    elif data is not None and hasattr(tf.nest.flatten(data)[0], "shape"):
        examples, inputs = int(tf.nest.flatten(data)[0].shape[0]), data
        batch = min(given.get("batch_size") or KERAS_BATCH, examples)
        epoch_steps = None if rebatches else examples // batch
        named: dict[str, Any] = {"x": data, **{name: own.pop(name) for name in ("y", "sample_weight") if name in own}}

        def arguments(size: int, steps: int) -> dict[str, Any]:
            count = size * max(1, min(steps, examples // size))  # whole epochs of full batches
            part = tf.nest.map_structure(lambda each: each[:count], named)
            return {**own, **part, "batch_size": size}

    else:
        raise ConfigError(
            f"The script's data must be arrays or a tf.data.Dataset. Received: {type(data).__name__}. Make a "
            "tf.data.Dataset of it, or see `tfopt doctor`."
        )

    def validation(size: int) -> dict[str, Any]:
        found = given.get("validation_data")
        if found is None:
            return {}
        sized = {} if isinstance(found, tf.data.Dataset) else {"validation_batch_size": size}
        return {"validation_data": found, "validation_steps": VALIDATED, **sized}

    def as_given(**asked: Any) -> keras.callbacks.History:
        installed = vars(model).get("fit", original)  # with tfopt's step under the model
        history: keras.callbacks.History = installed(**{**asked, "verbose": given.get("verbose", "auto")})
        return history

    each_batch = per_batch_callback(given.get("callbacks"), validates=False) is not None
    training = Training(
        model=model,
        fit=original if rebatches else as_given,
        data=arguments,
        validation=validation,
        replicas=int(model.distribute_strategy.num_replicas_in_sync),
        inputs=tf.nest.map_structure(lambda each: tf.convert_to_tensor(each[:1]), inputs),
        batch=batch,
        callbacks=[EachBatch()] if each_batch and not rebatches else [],
        epoch_steps=epoch_steps,
    )
    return training, examples


def _count(dataset: Any) -> int | None:
    """Returns the number of examples of a batched data set; None if it is unknown."""
    batches = int(dataset.cardinality())
    size = tf.nest.flatten(dataset.element_spec)[0].shape[0]
    if batches < 0:
        return None
    if size is None:
        first = next(iter(dataset), None)
        size = 0 if first is None else int(tf.nest.flatten(first)[0].shape[0])
    return math.ceil(batches * size)
