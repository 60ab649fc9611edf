"""Measures the noise of the gradients of a training, from the parts into which its step divides a batch.

A batch of B examples is divided into k parts of m examples. g is the gradient of a part, and G that of the batch, which
is the sum of (m / B) * g. With S as the trace of the covariance of the gradients of single examples, and G* as their
mean,

    a  =  the sum over the parts of (m / B) * |g|^2     has the mean     |G*|^2 + S * k / B
    b  =  |G|^2                                         has the mean     |G*|^2 + S / B

for parts of any sizes. So S is B * (a - b) / (k - 1) on average, and |G*|^2 is (k * b - a) / (k - 1), which for two
equal parts is the product of their gradients. The noise scale S / |G*|^2 is the ratio of the averages of both over many
steps: an average of the ratios would be biased, and |G*|^2 of a single step may be negative. The averages weigh newer
steps more, since the noise scale grows during a training.

The interval is Fieller's. It holds all ratios R for which the average of S - R * |G*|^2 over the steps does not differ
from zero. It has no upper end where |G*|^2 does not: then the noise scale may be of any size.

A step that has one part only is measured by a second forward and backward pass over its two halves. What that pass
changes, such as moving statistics and random states, is dropped, so the weights are the same as without it.

Reference:
    McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162, appendix A.1.
    Fieller, "Some Problems in Interval Estimation", Journal of the Royal Statistical Society B 16, 1954.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from scipy.special import stdtrit

from tfopt.compat.layers import added_losses, layers_inside
from tfopt.errors import UnsupportedModelError
from tfopt.report import Record
from tfopt.training.plan import Plan

CONFIDENCE = 0.95
# The steps between two measurements. A measured step is a call of its own, and the halves cost another step: together
# up to six steps of a tiny model. So measuring takes less than 1% of the time.
EVERY = 1024
# With fewer steps, their spread says nothing about an interval.
FEWEST = 3
FIGURES = 3  # the number of figures of a part


@dataclass(frozen=True, kw_only=True)
class NoiseEstimate(Record):
    """The noise of the gradients at one time of a training.

    Attributes:
        noise_scale: The noise scale in examples; None if it is unknown.
        least, most: The ends of its 95% interval. None is unknown, and for `most` also without end.
        trace: The trace of the covariance of the gradients of single examples.
        squared_norm: The squared norm of their mean.
        steps: The number of steps that were measured.
    """

    noise_scale: float | None = None
    least: float | None = None
    most: float | None = None
    trace: float | None = None
    squared_norm: float | None = None
    steps: int = 0

    @classmethod
    def of_sums(cls, sums: Sequence[float]) -> NoiseEstimate:
        """Returns the estimate of weighted sums over steps.

        Args:
            sums: The sums of the weights w and their squares; of w * S, w * Q, w * S^2, w * S * Q and w * Q^2 with Q
                for |G*|^2; and the number of steps.
        Example:
            >>> steps = [(9.0, 1.0), (11.0, 1.0), (10.0, 1.1), (10.0, 0.9)]  # S and Q
            >>> powers = [(1, 0), (0, 1), (2, 0), (1, 1), (0, 2)]
            >>> sums = [sum(s**i * q**j for s, q in steps) for i, j in powers]
            >>> found = NoiseEstimate.of_sums([4, 4, *sums, 4])
            >>> round(found.noise_scale, 2), round(found.least, 2), round(found.most, 2)
            (10.0, 8.31, 12.03)
        """
        weight, squares, s, q, ss, sq, qq, steps = map(float, sums)
        if not weight:
            return cls()
        s, q, ss, sq, qq = (each / weight for each in (s, q, ss, sq, qq))
        known = cls(noise_scale=max(s, 0.0) / q if q > 0 else None, trace=s, squared_norm=q, steps=round(steps))
        count = weight**2 / squares  # of equal weights that average as well
        if known.noise_scale is None or round(count) < FEWEST:
            return known
        z = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
        ss, sq, qq = (
            (each - product) * z**2 / (count - 1) for each, product in ((ss, s * s), (sq, s * q), (qq, q * q))
        )
        least, most = _fieller(s, q, ss, sq, qq)
        return cls(**{**known.to_dict(), "least": least, "most": most})


def _fieller(s: float, q: float, ss: float, sq: float, qq: float) -> tuple[float, float | None]:
    """Returns the ends of the R with (s - R q)^2 <= ss - 2 R sq + R^2 qq, for s / q above 0. None is no end."""
    square, middle, rest = q * q - qq, s * q - sq, s * s - ss
    root = math.sqrt(max(middle**2 - square * rest, 0.0))
    if square > 0:
        return max((middle - root) / square, 0.0), (middle + root) / square
    if rest <= 0 or not square:
        return 0.0, None
    return max((middle - root) / square, 0.0), None


class GradientNoise:
    """The sums of the noise of a model's gradients. They are variables, which the training step updates.

    Args:
        plan: The plan of the model, under whose strategy the variables are made.
        momentum: The share of its weight that a step keeps when the next one is measured.
        every: The number of steps from one measurement to the next.
    """

    def __init__(self, plan: Plan, momentum: float, every: int) -> None:
        self.halves = plan.replicas * plan.config.accumulate == 1  # whether a batch has one part, which is halved
        self.every = every
        self._strategy = plan.strategy or tf.distribute.get_strategy()
        self._kept = np.array([momentum, momentum**2, *[momentum] * 5, 1.0])
        with self._strategy.scope():
            self._sums = tf.Variable(
                tf.zeros(8, tf.float64),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,  # all replicas add the same
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )

    def estimate(self) -> NoiseEstimate:
        """Returns the present estimate."""
        return NoiseEstimate.of_sums(self._strategy.experimental_local_results(self._sums)[0].numpy().tolist())

    def of_part(self, gradients: Sequence[Any], share: Any, size: Any) -> tf.Tensor:
        """Returns the figures of a part of a batch, which are summed over the parts as its gradients are.

        They are its part of `a` above, 1 for the part itself, and the number of its examples.

        Args:
            gradients: The gradients of the part, weighted by its share of the examples.
            share, size: The share, and the number of examples.
        """
        weighed = tf.cast(squared_norm(gradients), tf.float32) / tf.cast(share, tf.float32)
        return tf.stack([weighed, 1.0, tf.cast(size, tf.float32)])

    def note(self, of_batch: Callable[[], Sequence[Any]], optimizer: Any, size: Any) -> None:
        """Adds the noise of a step to the sums.

        Args:
            of_batch: Returns the gradients of the batch, and after them the figures of its parts.
            optimizer: Scales the loss.
            size: The number of examples on this replica. One example cannot be halved, and is not measured.
        """

        def added() -> tf.Tensor:
            *gradients, figures = of_batch()
            scale = tf.cast(optimizer.scale_loss(tf.constant(1.0)), tf.float64)
            of_parts, parts, examples = tf.unstack(tf.cast(figures, tf.float64))
            small, large = of_parts / scale**2, squared_norm(gradients) / scale**2
            s = examples * (small - large) / (parts - 1)
            q = (parts * large - small) / (parts - 1)
            one = tf.ones((), tf.float64)
            sums = self._sums * self._kept + tf.stack([one, one, s, q, s * s, s * q, q * q, one])
            # Not a number where a batch has one example, where float16 overflowed, or where the training diverged.
            return tf.where(tf.reduce_all(tf.math.is_finite(sums)), sums, self._sums)

        self._sums.assign(tf.cond(size > 1, added, lambda: tf.identity(self._sums)) if self.halves else added())


def squared_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the sum of the squares of gradients, those that are there, in float64.

    Example:
        >>> float(squared_norm([tf.constant([1.0, 2.0]), None, tf.IndexedSlices([[1.0], [1.0]], [3, 3], [4, 1])]))
        9.0
    """
    dense = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
    # In float16 the squares would overflow.
    wide = [each if each.dtype == tf.float64 else tf.cast(each, tf.float32) for each in dense]
    return tf.add_n([tf.zeros((), tf.float64), *(2 * tf.cast(tf.nn.l2_loss(each), tf.float64) for each in wide)])


@contextlib.contextmanager
def without_changes(model: keras.Model) -> Iterator[None]:
    """Lets a model run once more in a step, so that none of its variables and metrics changes.

    Raises:
        UnsupportedModelError: A layer in half precision adds a loss, which Keras cannot add up in such a scope.
    """
    half = next((each for each in layers_inside(model) if _is_half(each) and added_losses(each)), None)
    if half is not None:
        raise UnsupportedModelError(
            "NoiseScale needs float32 for the losses that layers add, where it halves the batch. Received: "
            f"{half.name!r} in {half.compute_dtype}. Set accumulate=2, or give this layer dtype='float32'."
        )
    with keras.StatelessScope(collect_losses=True, initialize_variables=False) as scope:
        for weight in model.trainable_weights:
            if weight.regularizer is not None:  # in this scope, Keras reads its value from here alone
                scope.add_update((weight, weight.value))
        yield


def _is_half(layer: keras.Layer) -> bool:
    return layer.compute_dtype in ("float16", "bfloat16")


def check_measurable(model: keras.Model, plan: Plan) -> None:
    """Raises UnsupportedModelError if the noise of a model's gradients cannot be measured under a plan."""
    reason = ""
    if plan.stage_devices:
        reason = "no pipeline, whose stages sum the gradients of micro-batches as they come. Set strategy='none'"
    elif plan.replicas * plan.config.accumulate == 1:
        fixed = [each for each in getattr(model, "inputs", None) or () if each.shape[0] is not None]
        if fixed:
            reason = (
                "a batch that can be halved, and an input has a fixed batch size. Leave batch_size out of keras.Input"
            )
    if reason:
        raise UnsupportedModelError(f"NoiseScale needs {reason}. Received: {model.name!r}.")
