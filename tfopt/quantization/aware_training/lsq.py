"""Learned step size quantization (LSQ): the optimizer trains the range of fake quantization.

The straight-through estimator (see tfopt.quantization.aware_training.fake_quant) also gives the step s of a grid a
gradient. It is the gradient of LSQ (Esser et al., ICLR 2020, arXiv:1902.08153, equation 3): round(x / s) - x / s inside
the range, and -p or p outside, times 1 / sqrt(N p) for N values and p steps above zero.

The trained variable is the limit p * s in place of s. Its gradient is p times as large, so that SGD changes the step as
in the paper. The reason for the limit is Adam, whose updates are about as large as the learning rate, whatever the
gradient is. The limit has the magnitude of the values, so this update suits it. The step is about a hundredth of the
limit, so the same update would be much too large for it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfopt.quantization.annotation.range import steps_above_zero

# Values are divided by the limit, which training could make zero. Its square must stay a number of float32.
SMALLEST = 1e-12


def scale_gradient(x: Any, factor: Any) -> Any:
    """Returns x with a gradient that is `factor` times as large."""
    return tf.stop_gradient(x) + (x - tf.stop_gradient(x)) * factor


def learning_limit(limit: Any, count: Any, *, bits: int = 8, signed: bool = True) -> Any:
    """Returns a limit with the gradient of LSQ; see the docstring of the module.

    Args:
        limit: The trained limit or limits.
        count: How many values share one limit. For an activation, it is the number of values in one example.
        bits: As in `fake_quantize`.
        signed: As in `fake_quantize`.
    """
    qmax = steps_above_zero(bits, signed=signed)
    gradient_scale = tf.math.rsqrt(tf.cast(count, tf.float32) * qmax)
    return scale_gradient(tf.maximum(limit, SMALLEST), gradient_scale * qmax**2)
