"""The trial of a script: it runs until its first fit, whose data then gets other batches.

What needs Keras or TensorFlow is imported when the script has imported them: it may set environment variables before.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfopt.errors import ConfigError, TrainingError
from tfopt.scripts.run_script import run_script
from tfopt.tuning.limit import Used, kept, of_json

if TYPE_CHECKING:
    import keras

    from tfopt.tuning.timed import Training

# What of a script's own call of fit stays.
KEPT = ("x", "y", "sample_weight", "class_weight", "shuffle")


def train(
    workload: dict[str, Any], trial: dict[str, Any], limit: dict[str, Any] | None, directory: str
) -> dict[str, Any]:
    """As `tfopt.tuning.trial.train`, for a script."""
    with kept(of_json(limit), Path(directory)) as used:
        hook = _FirstFit(trial, used, Path(directory))
        words = list(workload["words"])
        code = run_script(workload["name"], words, hook)
        if hook.error is not None:
            raise hook.error
        if hook.found is None:
            raise TrainingError(
                "The script must train with keras.Model.fit. Received: "
                + (f"{workload['name']}, which ended with exit code {code} before" if code else "no call of it")
                + ". The log of the trial has its output."
            )
        return hook.found


class _FirstFit:
    """A `FitHook` that measures the first fit of the script, and then ends the script."""

    def __init__(self, trial: dict[str, Any], used: Used, directory: Path) -> None:
        self._trial, self._used, self._directory = trial, used, directory
        self.found: dict[str, Any] | None = None
        self.error: Exception | None = None

    def compile(self, model: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        original(*args, **kwargs)

    def fit(self, model: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.found is not None or self.error is not None:  # the script has gone on after its end
            raise SystemExit(0)
        from tfopt.tuning.trial import Trial, measured

        try:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            training, examples = _training(model, original, given)
            found = measured(training, Trial(**self._trial), self._used, self._directory)
            self.found = {**found, "examples": examples, "largest": None}
        except Exception as error:  # noqa: BLE001 - it is the outcome of the trial
            self.error = error
        raise SystemExit(0)


def _training(model: keras.Model, original: Callable[..., Any], given: dict[str, Any]) -> tuple[Training, int | None]:
    """Returns the training of a script's fit, and its number of examples."""
    from tfopt.tuning.timed import Training
    from tfopt.tuning.trial import VALIDATED

    import tensorflow as tf  # isort: skip

    own = {name: given[name] for name in KEPT if given.get(name) is not None}
    data = own.pop("x", None)
    if isinstance(data, tf.data.Dataset):
        batched, examples = data, _count(data)
        first = next(iter(data))
        inputs = first[0] if isinstance(first, tuple) else first

        def arguments(size: int, steps: int) -> dict[str, Any]:
            return {**own, "x": batched.repeat().rebatch(size), "steps_per_epoch": steps, "shuffle": False}

    elif data is not None and hasattr(tf.nest.flatten(data)[0], "shape"):
        examples, inputs = int(tf.nest.flatten(data)[0].shape[0]), data
        named: dict[str, Any] = {"x": data, **{name: own.pop(name) for name in ("y", "sample_weight") if name in own}}

        def arguments(size: int, steps: int) -> dict[str, Any]:
            count = size * max(1, min(steps, examples // size))  # whole epochs of full batches
            part = tf.nest.map_structure(lambda each: each[:count], named)
            return {**own, **part, "batch_size": size}

    else:
        raise ConfigError(
            f"The script's data must be arrays or a tf.data.Dataset. Received: {type(data).__name__}. Make its batches "
            "with another size by hand, and see `tfopt doctor`."
        )

    def validation(size: int) -> dict[str, Any]:
        found = given.get("validation_data")
        if found is None:
            return {}
        sized = {} if isinstance(found, tf.data.Dataset) else {"validation_batch_size": size}
        return {"validation_data": found, "validation_steps": VALIDATED, **sized}

    replicas = int(model.distribute_strategy.num_replicas_in_sync)
    training = Training(
        model=model,
        fit=original,
        data=arguments,
        validation=validation,
        replicas=replicas,
        inputs=tf.nest.map_structure(lambda each: tf.convert_to_tensor(each[:1]), inputs),
    )
    return training, examples


def _count(dataset: Any) -> int | None:
    """Returns the number of examples of a batched data set; None if it is unknown."""
    import tensorflow as tf

    batches = int(dataset.cardinality())
    size = tf.nest.flatten(dataset.element_spec)[0].shape[0]
    if batches < 0:
        return None
    if size is None:
        first = next(iter(dataset), None)
        size = 0 if first is None else int(tf.nest.flatten(first)[0].shape[0])
    return math.ceil(batches * size)
