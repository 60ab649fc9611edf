"""Augmentation inside the training step, on the device of each replica.

The random numbers of a step depend on the seed of the plan, the number of the step and the number of the replica. The
optimizer counts the steps, and a checkpoint holds this count. So a resumed training goes on with the same images. If
float16 could not hold the gradients of a step, the step does not count: the next batch gets the same random numbers.

The model is not changed. So evaluation, prediction and exports see the images as they are.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfopt.data.augment.augmentation import Augmentation
from tfopt.data.augment.config import AugmentConfig
from tfopt.errors import ConfigError
from tfopt.training.plan import Plan, augments_in_pipeline


class StepAugmentation:
    """The augmentation of the batches of one compiled model, whose optimizer counts the steps."""

    def __init__(self, augmentation: Augmentation, model: keras.Model, seed: int) -> None:
        self._augmentation = augmentation
        self._model = model
        self._seed = seed

    def on_replica(self, x: Any, y: Any, weight: Any) -> tuple[Any, Any, Any]:
        """Returns the changed batch of this replica, for training."""
        step = tf.cast(tf.convert_to_tensor(self._model.optimizer.iterations), tf.int64)
        seed = tf.stack([tf.constant(self._seed, tf.int64), step])
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        seed = tf.random.experimental.stateless_fold_in(seed, replica)
        return _filled(self._augmentation(_example(x, y, weight), seed))

    def one_hot(self, x: Any, y: Any, weight: Any) -> tuple[Any, Any, Any]:
        """Returns a batch for evaluation: unchanged, but with targets of the same form as in training."""
        return _filled(self._augmentation.one_hot(_example(x, y, weight)))

    def spec(self, x: Any, y: Any, weight: Any) -> tuple[Any, Any, Any]:
        """Returns the specs of a batch with targets of the same form as in training."""
        if not isinstance(y, tf.TensorSpec):
            return self.one_hot(x, y, weight)
        one_hot = tf.function(lambda targets: self._augmentation.one_hot((None, targets))[1])
        return x, one_hot.get_concrete_function(y).structured_outputs, weight


def for_model(augment: Augmentation | AugmentConfig | None, model: keras.Model, plan: Plan) -> StepAugmentation | None:
    """Returns the augmentation for the training step of a model, or None if there is none.

    Raises:
        ConfigError: The settings do not fit the training step or the model.
    """
    if augment is None or isinstance(augment, Augmentation):
        augmentation = augment
    elif isinstance(augment, AugmentConfig):
        shape = model.output_shape
        if isinstance(shape, tuple) and len(shape) == 4 and (augment.is_geometric or augment.rand_augment):
            raise ConfigError(
                "augment must be an Augmentation for a model whose outputs are images: it says whether targets are "
                f"masks. Received: augment=AugmentConfig(...) and outputs of shape {shape}. "
                "Pass tfopt.data.Augmentation(config, masks=True)."
            )
        outputs = shape[-1] if isinstance(shape, tuple) and len(shape) == 2 else None
        augmentation = Augmentation(augment, outputs=outputs, on_gpu=bool(plan.hardware.gpus))
    else:
        raise ConfigError(
            "augment must be an AugmentConfig, an Augmentation or None. Received: "
            f"augment={augment!r}. Pass for example tfopt.data.AugmentConfig(crop=4)."
        )
    if augmentation is None or augmentation.config.is_off:
        return None
    if augmentation.config.where == "host":
        raise ConfigError(
            "where must not be 'host' for augmentation in the training step. Received: augment with where='host'. "
            "Pass it to the pipeline, or set where='device'."
        )
    if plan.data is not None and augments_in_pipeline(plan.data):
        raise ConfigError(
            "augment must be left out where plan.pipeline augments already, as the recipe says. Received: augment, and "
            f"a recipe with where={plan.data.augment.where!r}. Leave it out, or set where='device' in the recipe."
        )
    if augmentation.needs_one_hot and type(model).test_step is not keras.Model.test_step:
        raise ConfigError(
            "mixup and cutmix in the training step need Keras' own test_step, whose targets tfopt makes shares of "
            f"each class. Received: {model.name!r}, whose class {type(model).__name__} has its own test_step. Mix in "
            "the pipeline instead."
        )
    return StepAugmentation(augmentation, model, plan.config.seed)


def _example(x: Any, y: Any, weight: Any) -> tuple[Any, ...]:
    return (x, y) if weight is None else (x, y, weight)


def _filled(example: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    x, y, *weight = example
    return x, y, weight[0] if weight else None
