"""The distance of a student's outputs from a teacher's.

For classes, with logits z and the temperature T (Hinton et al., "Distilling the Knowledge in a Neural Network",
arXiv:1503.02531):

    loss = T^2 * sum over classes of p * (log p - log q),    p = softmax(z_teacher / T),  q = softmax(z_student / T)

The gradient of the divergence falls with 1 / T^2, so the factor keeps it as large as that of the labels. A model whose
last op is a softmax gives probabilities. Their logarithms are logits too, up to a number for each example that cancels.
The probabilities of several teachers are averaged at this temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfopt.distillation.config import SoftLoss

SMALLEST = 1e-7  # probabilities are kept this far from 0 and 1, as in Keras' losses
SOFTMAX, SIGMOID = "Softmax", "Sigmoid"
OF_BITS = (keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy)
OF_VALUES = (
    *(keras.losses.mean_squared_error, keras.losses.mean_absolute_error, keras.losses.huber, keras.losses.log_cosh),
    *(keras.losses.mean_absolute_percentage_error, keras.losses.mean_squared_logarithmic_error),
)


class TeacherLoss(keras.losses.Loss):
    """The distance of one output from the teacher's. Its `y_true` are the targets that `targets_of` makes.

    A Keras loss, so sample weights, masks and the parts of a batch count as for the loss of the labels.
    """

    def __init__(self, kind: SoftLoss, temperature: float, op: str, name: str) -> None:
        super().__init__(name=f"{name}_from_teacher")
        self.kind, self.temperature, self.op = kind, temperature, op

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the distance of each item, without the last axis.

        Args:
            y_true: Probabilities at the temperature, or values: [batch, ..., outputs].
            y_pred: The student's outputs, of the same shape.
        """
        if self.kind == "mse":
            return ops.mean(ops.square(y_true - y_pred), axis=-1)
        logits = logits_of(y_pred, self.op) / self.temperature
        square = self.temperature**2
        if self.kind == "kl":
            distance = y_true * (_log(y_true) - ops.log_softmax(logits, axis=-1))
            return square * ops.sum(distance, axis=-1)
        on = y_true * (_log(y_true) - ops.log_sigmoid(logits))
        off = (1 - y_true) * (_log(1 - y_true) - ops.log_sigmoid(-logits))
        return square * ops.mean(on + off, axis=-1)


def targets_of(outputs: Sequence[Any], ops_of_outputs: Sequence[str], kind: SoftLoss, temperature: float) -> Any:
    """Returns what a student learns from the outputs of one or several teachers, as float32.

    Args:
        outputs: The output of each teacher: [batch, ..., outputs].
        ops_of_outputs: The op that computes it in each teacher, for example "Softmax".
    """
    targets = []
    for output, op in zip(outputs, ops_of_outputs, strict=True):
        values = ops.cast(output, "float32")
        if kind == "kl":
            values = ops.softmax(logits_of(values, op) / temperature, axis=-1)
        elif kind == "binary":
            values = ops.sigmoid(logits_of(values, op) / temperature)
        targets.append(values)
    return ops.stop_gradient(sum(targets) / len(targets))


def fitting_loss(op: str, loss: Any) -> SoftLoss:
    """Returns the distance for an output that an op computes, and that a model trains with a loss of Keras.

    Example:
        >>> fitting_loss("Softmax", "binary_crossentropy"), fitting_loss("MatMul", "mse"), fitting_loss("MatMul", None)
        ('kl', 'mse', 'kl')
    """
    if op in (SOFTMAX, SIGMOID):
        return "kl" if op == SOFTMAX else "binary"
    loss = keras.losses.get(loss)
    function = getattr(loss, "fn", loss)  # Keras' classes wrap functions
    return "binary" if function in OF_BITS else "mse" if function in OF_VALUES else "kl"


def logits_of(outputs: Any, op: str) -> Any:
    """Returns the logits of outputs that an op computes."""
    if op not in (SOFTMAX, SIGMOID):
        return outputs
    kept = ops.clip(outputs, SMALLEST, 1 - SMALLEST)
    return ops.log(kept) if op == SOFTMAX else ops.log(kept) - ops.log(1 - kept)


def _log(probabilities: Any) -> Any:
    return ops.log(ops.maximum(probabilities, SMALLEST))
