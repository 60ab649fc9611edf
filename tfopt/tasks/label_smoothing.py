"""Label smoothing: a share of each target is spread evenly over all classes.

Szegedy et al., "Rethinking the Inception Architecture", CVPR 2016, arXiv:1512.00567, section 7.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from tfopt.compat.layers import set_mask
from tfopt.errors import ConfigError


@keras.saving.register_keras_serializable(package="tfopt")
class SmoothedCrossEntropy(keras.losses.Loss):
    """The cross-entropy of logits and class numbers, with label smoothing.

    With K classes and a share s, the target of the right class is 1 - s + s / K, and s / K for each other class:

        loss = (1 - s) * -log p(right class) + s * mean over all classes of -log p(class)

    Args:
        label_smoothing: The share s, 0 to 1.
        ignore_class: Class number of targets that do not count, or None.
        name: Name of the loss.
        dtype: Type in which the loss is computed.
        reduction: As in Keras.
    Example:
        >>> loss = SmoothedCrossEntropy(0.1)
        >>> round(float(loss([2], ops.zeros((1, 4)))), 4)  # log 4: all classes are equally likely
        1.3863
    """

    def __init__(
        self,
        label_smoothing: float,
        ignore_class: int | None = None,
        name: str = "smoothed_cross_entropy",
        dtype: Any = None,
        reduction: str = "sum_over_batch_size",
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.label_smoothing = label_smoothing
        self.ignore_class = ignore_class

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the loss of each target [batch, ...], from class numbers and logits [batch, ..., classes]."""
        logs = ops.log_softmax(y_pred)
        truth = ops.reshape(ops.cast(y_true, "int32"), ops.shape(logs)[:-1])
        counts = None if self.ignore_class is None else ops.not_equal(truth, self.ignore_class)
        if counts is not None:
            truth = ops.where(counts, truth, 0)
        right = ops.squeeze(ops.take_along_axis(logs, ops.expand_dims(truth, -1), axis=-1), -1)
        smoothing = self.label_smoothing
        loss = -(1 - smoothing) * right - smoothing * ops.mean(logs, axis=-1)
        if counts is None:
            return loss
        loss = ops.where(counts, loss, 0.0)
        set_mask(loss, counts)  # the mean counts the others only, as in Keras' own loss
        return loss

    def get_config(self) -> dict[str, Any]:
        """Returns the settings."""
        return {**super().get_config(), "label_smoothing": self.label_smoothing, "ignore_class": self.ignore_class}


def smoothed(loss: Any, label_smoothing: float) -> Any:
    """Returns a cross-entropy with label smoothing.

    Args:
        loss: A loss that a task made.
        label_smoothing: The share of each target that is spread over all classes. With 0 the loss stays as it is.
    Raises:
        ConfigError: The loss is no cross-entropy.
    Example:
        >>> smoothed(keras.losses.BinaryCrossentropy(from_logits=True), 0.1).get_config()["label_smoothing"]
        0.1
    """
    if not label_smoothing:
        return loss
    config = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}
    if type(loss) is keras.losses.SparseCategoricalCrossentropy and config["from_logits"]:
        return SmoothedCrossEntropy(label_smoothing, config["ignore_class"])
    if type(loss) in (keras.losses.CategoricalCrossentropy, keras.losses.BinaryCrossentropy):
        return type(loss).from_config({**config, "label_smoothing": label_smoothing})
    raise ConfigError(
        "label_smoothing must be 0 unless the loss of the task is a cross-entropy. Received: "
        f"label_smoothing={label_smoothing}, with the loss {loss!r}. Set label_smoothing=0."
    )
