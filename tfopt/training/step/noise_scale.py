"""A Keras callback that shows the noise scale of the gradients: above this batch size, a larger batch gains little.

In batches of B examples, a training needs 1 + B_simple / B times the fewest steps to reach a loss, and 1 + B / B_simple
times the fewest examples. So at the noise scale B_simple, each is twice its least. Batches far above it save hardly a
step, and batches far below it hardly an example.

The paper derives this for plain gradient descent at one point, with a curvature that is the same in all directions. For
real trainings it found the right order of magnitude, not the last factor of two or three. The noise scale depends on
the weights, and grows while the loss falls. It is measured with what the step has: with the augmentation, the dropout
and the regularization of the training, before gradients are clipped, without decoupled weight decay, and without what
optimizers such as Adam divide gradients by.

Reference:
    McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import keras
from annotated_types import Ge, Lt

from tfopt.errors import UnsupportedModelError
from tfopt.report import Record
from tfopt.report.sheet import Sheet, Shown, Table
from tfopt.settings.validation import check_value
from tfopt.training.plan import Plan
from tfopt.training.step.ledger import ATTRIBUTE
from tfopt.training.step.noise import EVERY, FEWEST, GradientNoise, NoiseEstimate, check_measurable

LOGGED = "noise_scale"
"""The name that the callback adds to the logs of an epoch."""


@dataclass(frozen=True, kw_only=True)
class NoiseScaleReport(Record, Shown):
    """The noise scale over a training.

    Attributes:
        last: The estimate at the end.
        epochs: The estimate at the end of each epoch. Each contains the steps before, newer ones with more weight.
        every: The number of steps from one measurement to the next.
        halves: Whether the noise was measured by a second pass over the halves of a batch, because a step has one part.
    """

    last: NoiseEstimate
    epochs: Sequence[NoiseEstimate]
    every: int
    halves: bool

    def _sheet(self) -> Sheet:
        parts = "the halves of a batch" if self.halves else "the parts of a batch"
        title = f"noise scale: {in_words(self.last)}"
        rows = [(str(number), in_words(each)) for number, each in enumerate(self.epochs, 1)]
        of_last = f"{self.last.steps} steps were measured, one in {self.every}, from {parts}"
        meaning = (
            "a batch of this size needs twice the fewest steps and twice the fewest examples; far larger batches save "
            "few steps (McCandlish et al. 2018; right in its order of magnitude)"
        )
        if self.last.steps < FEWEST and self.every > 1:
            meaning = f"so few steps say little: pass every={max(self.every // 100, 1)} in a short training"
        return Sheet(title=title, tables=[Table(rows=[(of_last,), (meaning,)]), Table(rows=rows, head=("epoch", ""))])


def noise_of_fit(model: keras.Model) -> NoiseEstimate | None:
    """Returns the noise scale that a callback of the model's last `fit` has measured; None if there was none."""
    noise: GradientNoise | None = getattr(getattr(model, ATTRIBUTE, None), "noise", None)
    return None if noise is None else noise.estimate()


def in_words(estimate: NoiseEstimate) -> str:
    """Returns an estimate in words.

    Example:
        >>> in_words(NoiseEstimate(noise_scale=812.4, least=640.0, most=1049.6, steps=90))
        '812 examples (95% interval 640 to 1,050)'
        >>> in_words(NoiseEstimate(trace=1.0, squared_norm=-0.1, steps=4))
        'unavailable (the mean gradient is smaller than its noise)'
    """
    if estimate.noise_scale is None:
        reason = "no step of two examples or more was measured"
        if estimate.steps:
            reason = "the mean gradient is smaller than its noise"
        return f"unavailable ({reason})"
    if estimate.least is None:
        return f"{estimate.noise_scale:,.3g} examples (no interval from fewer than {FEWEST} steps)"
    upper = "without an upper end" if estimate.most is None else f"to {_rounded(estimate.most)}"
    return f"{_rounded(estimate.noise_scale)} examples (95% interval {_rounded(estimate.least)} {upper})"


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class NoiseScale(keras.callbacks.Callback):
    """Measures the noise scale of the gradients during `fit`: above this batch size, a larger batch gains little.

    The noise scale is the trace of the covariance of the gradients of single examples, divided by the squared norm of
    their mean. tfopt's step measures it from the gradients of its micro-batches and replicas. The weights after the
    training are the same, bit for bit, as without this callback.

    In one of `every` steps, the step computes the norms of gradients that it has anyway. If a batch has one part only,
    because there is one device and `accumulate` is 1, then it computes the gradients of its halves once more, which is
    one more forward and backward pass. The other steps run as without this callback.

    At the end of each epoch, "noise_scale" is added to the logs. So History, TensorBoard and CSVLogger show it, if the
    callback comes before them in the list. It is NaN where it is unknown. Another `fit` of the same model with the same
    callback goes on with its averages.

    Args:
        momentum: The share of its weight that a measured step keeps when the next one is measured. The average is over
            about 1 / (1 - momentum) measured steps.
        every: The number of steps from one measurement to the next.
    Raises:
        ConfigError: An argument is out of range.
        UnsupportedModelError: At the start of `fit`, if tfopt's step does not train the model, if it runs in a
            pipeline, or if a batch cannot be halved.
    Reference:
        McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162, appendix A.1.
    Example:
        >>> import numpy as np
        >>> from tfopt.training import TrainingConfig, compile, plan
        >>> decided = plan(TrainingConfig(precision="float32", global_batch_size=8, accumulate=2))
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> _ = compile(model, decided, loss="mse")
        >>> x, noise = np.random.default_rng(0).normal(size=(256, 4)), NoiseScale(every=1)
        >>> history = model.fit(decided.pipeline((x, x[:, :1])), verbose=0, callbacks=[noise])
        >>> noise.report.last.noise_scale == history.history["noise_scale"][-1]
        True
    """

    def __init__(self, *, momentum: float = 0.99, every: int = EVERY) -> None:
        super().__init__()
        self.momentum = float(check_value("momentum", momentum, Annotated[float, Ge(0), Lt(1)]))
        self.every = check_value("every", every, Annotated[int, Ge(1)])
        self._noise: GradientNoise | None = None
        self._of: tuple[Any, Any] = (None, None)  # the model and the plan of what is measured
        self._epochs: list[NoiseEstimate] = []
        self._asked = False  # whether the step of the fit that begins measures

    def noise_of(self, model: keras.Model, plan: Plan) -> GradientNoise:
        """Returns what the step of a model measures. `fit` calls this before its first step."""
        if self._noise is None or self._of != (model, plan):
            check_measurable(model, plan)
            self._noise, self._of, self._epochs = GradientNoise(plan, self.momentum, self.every), (model, plan), []
        self._asked = True
        return self._noise

    @property
    def report(self) -> NoiseScaleReport:
        """The noise scale over the training until now.

        Raises:
            UnsupportedModelError: No `fit` by tfopt's step has had this callback.
        """
        if self._noise is None:
            raise _no_step("no such fit")
        return NoiseScaleReport(
            last=self._noise.estimate(),
            epochs=tuple(self._epochs),
            every=self._noise.every,
            halves=self._noise.halves,
        )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        asked, self._asked = self._asked, False
        if not asked:
            raise _no_step(f"a fit of {self.model.name!r} by Keras' step")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert self._noise is not None  # checked when the fit began
        self._epochs.append(self._noise.estimate())
        if logs is not None:
            value = self._epochs[-1].noise_scale
            logs[LOGGED] = math.nan if value is None else value


def _no_step(received: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"NoiseScale needs a fit by tfopt's step, which measures the gradients. Received: {received}. Compile the "
        "model with tfopt.compile; its class must have Keras' train_step."
    )
