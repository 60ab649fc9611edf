"""The first fit of a script: what `tfopt accelerate` may change of it, and its training with data for any time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.trainer import built_under
from tfopt.errors import TrainingError
from tfopt.scripts.obstacles import obstacle, why_single_steps
from tfopt.training.step.fit_callback import per_batch_callback
from tfopt.training.xla import xla_blockers
from tfopt.tuning.facts import Facts
from tfopt.tuning.script_data import data_of
from tfopt.tuning.timed import EachBatch, Training
from tfopt.tuning.trial import VALIDATED

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
    trained = in_an_epoch(fit, training, examples)
    steps = trained and math.ceil(trained / training.batch)
    return Facts(
        values=values,
        fixed=fixed,
        replicas=training.replicas,
        examples=examples,
        steps=steps,
        compiled_at="" if fit.compiled_with is None or built_under(model) is not None else fit.compiled_at,
        compiled_with=fit.compiled_with or (),
    )


def in_an_epoch(fit: Fit, training: Training, examples: int | None) -> int | None:
    """Returns how many examples an epoch of a script's fit trains on, of those that its data has."""
    if steps := fit.given.get("steps_per_epoch"):
        return int(steps) * training.batch
    return examples and math.floor(examples * (1 - (fit.given.get("validation_split") or 0)))


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
    data = data_of(given, rebatches=rebatches)

    def validation(size: int) -> dict[str, Any]:
        found = given.get("validation_data")
        if found is None:
            return {}
        sized = {} if isinstance(found, tf.data.Dataset) else {"validation_batch_size": size}
        return {"validation_data": found, "validation_steps": VALIDATED, **sized}

    def train(**asked: Any) -> keras.callbacks.History:
        """Calls Keras' own fit or, for the data as it is, the fit of the script, also with tfopt's step under it."""
        if rebatches:
            history = original(**asked)
        else:
            history = vars(model).get("fit", original)(**{**asked, "verbose": given.get("verbose", "auto")})
        data.check()
        return history

    each_batch = per_batch_callback(given.get("callbacks"), validates=False) is not None
    training = Training(
        model=model,
        fit=train,
        data=data.arguments,
        validation=validation,
        replicas=int(model.distribute_strategy.num_replicas_in_sync),
        inputs=tf.nest.map_structure(lambda each: tf.convert_to_tensor(each[:1]), data.inputs),
        batch=data.batch,
        callbacks=[EachBatch()] if each_batch and not rebatches else [],
        epoch_steps=data.epoch_steps,
    )
    return training, data.examples
