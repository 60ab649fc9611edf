"""Loss scaling for mixed_float16, with the dynamic scale of Keras' LossScaleOptimizer.

Gradients below 6e-8 are zero in float16. So a step multiplies the loss by a large scale before the backward pass, and
the optimizer divides the gradients by it. If a gradient overflows, the optimizer halves the scale, and the weights stay
as they are. After many steps without an overflow it doubles the scale.

`compile` of Keras wraps the optimizer under mixed_float16. A step of tfopt must call `scaled_loss` before it takes
gradients, and must sum the gradients of all replicas before the optimizer looks for an overflow.

Reference:
    Micikevicius et al., "Mixed Precision Training", ICLR 2018, arXiv:1710.03740.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras

from tfopt.report import Record


@dataclass(frozen=True, kw_only=True)
class LossScale(Record):
    """A change of the dynamic loss scale.

    Attributes:
        step: The step after which the change was read.
        before, after: The scale. It falls after gradients overflowed; such a step changes no weights.
    """

    step: int
    before: float
    after: float


def scaled_loss(optimizer: keras.optimizers.Optimizer, loss: Any) -> Any:
    """Returns the loss to take gradients of: scaled if the optimizer divides gradients by a scale, else as it is.

    Example:
        >>> optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=1024.0)
        >>> optimizer.build([keras.Variable([1.0])])
        >>> float(scaled_loss(optimizer, 0.5)), float(scaled_loss(keras.optimizers.SGD(), 0.5))
        (512.0, 0.5)
    """
    return optimizer.scale_loss(loss)


def loss_scale(optimizer: Any) -> float | None:
    """Returns the present scale, or None if the optimizer has none.

    Example:
        >>> loss_scale(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=1024.0))
        1024.0
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
    return float(keras.ops.convert_to_numpy(scale))
