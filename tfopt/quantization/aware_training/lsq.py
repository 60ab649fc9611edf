"""Learned step size quantization (LSQ): the optimizer trains the range of fake quantization.

The straight-through estimator (see tfopt.quantization.aware_training.fake_quant) also gives the step s of a grid a
gradient. It is the one of LSQ (Esser et al., ICLR 2020, arXiv:1902.08153, equation 3): round(x / s) - x / s inside the
range, and -p or p outside, times 1 / sqrt(N p) for N values and p steps above zero.

What is trained is the limit p * s in place of s, with the gradient p times as large. Under SGD the step then moves as
in the paper. Adam makes updates as large as the learning rate, whatever the gradient is. Under Adam the limit moves so
far, which is a number like the values themselves. The step, a hundredth of it, would move much too far.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfopt.quantization.annotation.range import steps_above_zero

SMALLEST = 1e-6  # a limit that training drives to zero would divide by it


def scale_gradient(x: Any, factor: Any) -> Any:
    """Returns x unchanged, whose gradient is `factor` times as large."""
    return tf.stop_gradient(x) + (x - tf.stop_gradient(x)) * factor


def learning_limit(limit: Any, count: Any, *, bits: int = 8, signed: bool = True) -> Any:
    """Returns a limit that learns as the step of LSQ does; see the module's docstring.

    Args:
        limit: The trained limit or limits.
        count: How many values share one limit; of an activation, those of one example.
        bits: As for `fake_quantize`.
        signed: As for `fake_quantize`.
    """
    top = steps_above_zero(bits, signed=signed)
    gradient_scale = tf.math.rsqrt(tf.cast(count, tf.float32) * top)
    return scale_gradient(tf.maximum(limit, SMALLEST), gradient_scale * top**2)
