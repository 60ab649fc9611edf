"""Pruning during training: `PruningSchedule` raises the sparsity in steps, so that the kept weights can adapt.

Regrowth exchanges some kept weights for pruned ones that the loss asks for. A weight that was pruned too early returns
in this way. The number of zeros does not change. The method is that of RigL, except that a weight dropped by an update
cannot return in the same update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfopt.compat.kinds import is_tf_keras
from tfopt.compat.replace import forget
from tfopt.compat.trainer import running_callbacks
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.pruning.config import PruningConfig
from tfopt.pruning.criteria import Products, needs_data, score_weights
from tfopt.pruning.gradients import LossGradients, check_data
from tfopt.pruning.masks import Mask, attach_counter, attach_mask, attach_movement, holds
from tfopt.pruning.patterns import parse_pattern
from tfopt.pruning.prune import PASS_A_CONFIG, set_sparsity
from tfopt.pruning.schedules import SCHEDULES, Schedule, from_callable, last_step, warn_if_beyond
from tfopt.pruning.weights import Weight, layer_sparsities, make_report, select_weights
from tfopt.report import PassReport
from tfopt.settings.validation import check_type

LAST = "The last weights are pruned"


class PruningSchedule(keras.callbacks.Callback):
    """Prunes a model while it trains in Keras' own `fit`.

    Before each step whose number is a multiple of `frequency`, and before `end_step`, the callback chooses new masks
    for the sparsity that the schedule gives for this step. The compiled step applies the masks after each update of the
    optimizer. With `steps_per_execution` the masks change at the next boundary between executions. The epoch logs get
    "sparsity", the share of zeros that the masks hold.

    - Steps are counted from the first epoch. A fit with `initial_epoch` continues where an earlier fit stopped: with
      the same weights and masks it chooses the same masks as a fit without the break. If the size of the data is
      unknown, the steps that the earlier fit counted are used; the last execution of an epoch then counts as a full
      one. A mask holds the count: checkpoints of tfopt save it, and a later fit in the same process finds it.
    - Sparsity never falls, also in a second fit: a masked weight stays masked. Call `keep_zeros` on a loaded model.
    - Every fit ends at `target_sparsity`, also a fit that is stopped early. If the schedule was not finished, the last
      weights are pruned with no step to recover.
    - A callback that restores weights at the end, such as EarlyStopping, may come before or after this one in the list:
      the masks are applied to the weights that it restores.
    - A criterion that needs gradients, and regrowth, read the first `gradient_batches` of the data at each update. Give
      data that is not shuffled, or a resumed fit will see other batches, and choose other masks.

    Args:
        model: The built Keras 3 model to prune. `fit` may be called on another model that contains it.
        config: Settings of the pruning.
        data: Batches of (inputs, targets) or (inputs, targets, weights) as a `tf.data.Dataset` or a list, for a
            criterion that needs gradients of the loss that is trained, and for regrowth.

    Attributes:
        report: The pruned weights after a fit; None before.

    Raises:
        UnsupportedModelError: The model is not a Keras 3 model or is not built.
        ConfigError: `exclude` names no layer; data is needed, and is missing, empty, an iterator or without targets. At
            the start of the fit: `end_step` is needed or leaves no step, the number of earlier steps is unknown, or
            another schedule prunes the same weight.

    Example:
        >>> x, y = keras.ops.ones((32, 8)), keras.ops.ones((32, 4))
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> model.compile("sgd", "mse")
        >>> pruning = PruningSchedule(model, PruningConfig(target_sparsity=0.5, frequency=1))
        >>> history = model.fit(x, y, batch_size=8, callbacks=[pruning], verbose=0)
        >>> history.history["sparsity"], pruning.report.metrics
        ([0.5], {'sparsity': 0.5})

    Reference:
        Zhu & Gupta, "To prune, or not to prune", arXiv:1710.01878.
    """

    _follows_several_steps = True  # of a call into TensorFlow

    def __init__(self, model: Any, config: PruningConfig | None = None, data: Any = None) -> None:
        super().__init__()
        # Keras then need not wait for the logs of a step before it begins the next one.
        self.async_safe = True
        if is_tf_keras(model):
            raise UnsupportedModelError(
                f"model must be a Keras 3 model. Received: the tf_keras model {model.name!r}. Wrap it with "
                "tfmot.sparsity.keras.prune_low_magnitude and use tfmot.sparsity.keras.UpdatePruningStep."
            )
        self.config = PruningConfig() if config is None else config
        check_type("config", self.config, PruningConfig, PASS_A_CONFIG)
        self.report: PassReport | None = None
        self._data = data
        self._weights, self._skipped = select_weights(model, self.config)
        if needs_data(self.config.criterion) or self.config.regrowth:
            check_data(data)
        # Attached here, because Keras has made its train function when the fit begins.
        self._masks = [attach_mask(weight.variable) for weight in self._weights]
        self._counter = attach_counter(self._masks[0]) if self._masks else None
        if self.config.criterion == "movement":
            for mask in self._masks:
                attach_movement(mask)
        self._updates: MaskUpdates  # changes the masks; this and what follows is of one fit, and made when it begins
        self._schedule: Schedule  # function from a step to its sparsity
        self._end_step: float  # from here the sparsity stays at the target; infinite for a callable, which may not stay
        self._exchanges_end: float  # from here updates exchange no weights
        self._epoch_begin = 0  # first step of the current epoch
        self._steps_done = 0  # with those of earlier epochs
        self._next_update: int | None = None  # before this step the masks change; None before the first epoch
        self._updated_to = 0  # steps whose updates are in the masks: a resumed fit that replays them changes nothing
        forget(model, "train_function")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        trained = {id(variable) for variable in self.model.variables}
        if any(id(weight.variable) not in trained for weight in self._weights):
            raise ConfigError(
                "The model that is fitted must be, or contain, the model that PruningSchedule was made for. "
                f"Received: {self.model.name!r}, with other weights. Make the callback for this model."
            )
        self._check_is_the_only_one()
        config = self.config
        if isinstance(config.schedule, str):
            self._end_step = end_step = self._find_end_step()
            make = SCHEDULES[config.schedule]
            self._schedule = make(config.initial_sparsity, config.target_sparsity, config.begin_step, end_step)
        else:
            self._schedule, self._end_step = from_callable(config.schedule), math.inf
        self._exchanges_end = self._find_end_step() if config.regrowth else self._end_step
        self._updates = MaskUpdates(self.model, self._weights, self._masks, config, self._data)
        self._epoch_begin = self._steps_done = self._updated_to = 0
        self._next_update = None
        if (running := running_callbacks()) is not None:
            running.callbacks.append(_Last(self._enforce, running))  # a later callback may restore weights at the end

    def _check_is_the_only_one(self) -> None:
        running = running_callbacks()
        own = {id(weight.variable) for weight in self._weights}
        for other in () if running is None else running.callbacks:
            if isinstance(other, PruningSchedule) and other is not self:
                twice = [weight for weight in other._weights if id(weight.variable) in own]
                if twice:
                    raise ConfigError(
                        "A weight must have one schedule in a fit. Received: two PruningSchedule callbacks for the "
                        f"{twice[0]}. Remove one, or give each its own layers with include or exclude."
                    )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        steps_per_epoch = self.params.get("steps")
        if self._next_update is None and self._counter is not None:
            self._updated_to = int(keras.ops.convert_to_numpy(self._counter)[2])
            if not self._updated_to:
                self._updates.forget()
        if steps_per_epoch or epoch == 0:
            self._epoch_begin = epoch * (steps_per_epoch or 0)
            if self._next_update is None:
                self._next_update = self._update_after(self._boundary_before(self._epoch_begin, steps_per_epoch))
        else:
            self._epoch_begin, self._next_update = self._counted(epoch)
        self._steps_done = self._epoch_begin

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        step = self._epoch_begin + batch
        if self._next_update is None or step < self._next_update:
            return
        self._next_update = self._update_after(step)
        if step < max(self.config.begin_step, self._updated_to):
            return
        share = share_at(step, self.config.regrowth, self.config.begin_step, self._exchanges_end)
        self._updates(self._schedule(step), share, sample=step < self._end_step)
        if self._counter is not None:
            self._updated_to = step + 1
            done, due, _ = keras.ops.convert_to_numpy(self._counter)
            self._counter.assign([done, due, self._updated_to])

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps_done = max(self._steps_done, self._epoch_begin + batch + 1)  # in any order

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._counter is not None:
            self._counter.assign([self._steps_done, self._next_update, self._updated_to])
        unknown = not self.params.get("steps")
        if unknown and epoch == 0 and not self.model.stop_training:  # now the length of an epoch is known
            warn_if_beyond(self.config.end_step, self._steps_done * self.params["epochs"], LAST)
        if logs is not None:
            logs["sparsity"] = self._updates.sparsity

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._updates(self.config.target_sparsity)
        if self._counter is not None:
            self._counter.assign([self._steps_done, self._next_update or 0, 0])  # a later fit makes updates of its own
        self._enforce().warn_if_unchanged()

    def _enforce(self) -> PassReport:
        """Applies the masks and makes the report again, after code other than the optimizer has written the weights."""
        for mask in self._masks:
            mask.enforce()
        self.report = make_report(self._weights, self._skipped)
        return self.report

    def _counted(self, epoch: int) -> tuple[int, int]:
        """Returns the number of steps counted before this epoch, and the next step before which the masks change."""
        steps, due = (0, 0) if self._counter is None else map(int, keras.ops.convert_to_numpy(self._counter)[:2])
        if not steps and self._counter is not None:
            raise ConfigError(
                f"The number of steps before epoch {epoch} must be known, because the schedule counts them. Received: "
                f"initial_epoch={epoch} and a data set of unknown size, with masks that were not trained before. "
                "Give steps_per_epoch to fit, or begin at initial_epoch=0."
            )
        return steps, due

    def _update_after(self, step: int) -> int:
        """Returns the first step after this one before which the masks change. A negative step is before all steps."""
        due = (step // self.config.frequency + 1) * self.config.frequency
        return int(min(due, self._end_step)) if step < self._end_step else due

    def _boundary_before(self, step: int, steps_per_epoch: int | None) -> int:
        """Returns the first step of the execution before the epoch that begins with this step."""
        if step == 0 or not steps_per_epoch:
            return step - 1
        # The last execution of an epoch has fewer steps if steps_per_execution does not divide the epoch.
        return step - 1 - (steps_per_epoch - 1) % self.model.steps_per_execution

    def _find_end_step(self) -> int:
        end_step, begin_step = last_step(self.config.end_step, self.params, LAST), self.config.begin_step
        if end_step <= begin_step:
            raise ConfigError(
                f"begin_step must come before the end of pruning. Received: begin_step={begin_step}, and pruning ends "
                f"at step {end_step}, after two thirds of the fit. Set a smaller begin_step, or set end_step."
            )
        return end_step


class _Last(keras.callbacks.Callback):
    """Applies the masks after all other callbacks, and leaves their list."""

    def __init__(self, enforce: Callable[[], PassReport], running: keras.callbacks.CallbackList) -> None:
        super().__init__()
        self._enforce = enforce
        self._running = running

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._enforce()
        # A new list: Keras is walking over the old one, and would miss the next if this one left it.
        self._running.callbacks = [each for each in self._running.callbacks if each is not self]


class MaskUpdates:
    """Changes the masks of a model that is in training.

    `sparsity` is the share of the prunable weights that the masks hold at zero. The data is None if neither the
    criterion nor regrowth needs gradients.
    """

    def __init__(
        self, model: keras.Model, weights: Sequence[Weight], masks: Sequence[Mask], config: PruningConfig, data: Any
    ) -> None:
        self._weights, self._masks, self._config, self._data = weights, masks, config, data
        self._gradients: LossGradients | None = None
        if weights and (needs_data(config.criterion) or config.regrowth):
            self._gradients = LossGradients(model, [weight.variable for weight in weights])
        self.sparsity = self._measured()

    def __call__(self, sparsity: float, exchanged: float = 0.0, *, sample: bool = False) -> None:
        """Makes one update.

        Args:
            sparsity: Share of zeros. Masks that hold enough stay, except that the schedule "cyclic" releases weights.
            exchanged: Share of the kept weights to exchange for pruned ones.
            sample: Whether to add to the movements, also if the masks stay.
        """
        config = self._config
        releases = config.schedule == "cyclic" and sparsity < self.sparsity
        if releases:
            for mask in self._masks:
                mask.assign(np.ones(mask.kept.shape, dtype=bool))
        # Masks that already hold enough zeros stay. A resumed fit replays steps, with weights that were trained
        # further; masks of the same size, chosen again from these weights, could differ.
        pattern = parse_pattern(config.pattern, config.transposable)
        each = layer_sparsities(self._weights, config, sparsity)
        rises = not holds(self._weights, self._masks, sparsity, config.scope, pattern, each)
        scored = rises or (sample and config.criterion == "movement")
        products = None
        if self._gradients is not None and (exchanged or (scored and needs_data(config.criterion))):
            products = self._gradients.mean_products(self._data, config.gradient_batches)
        before = [keras.ops.convert_to_numpy(mask.kept) for mask in self._masks] if exchanged else []
        if scored:
            scores = self._scores(products)
            if rises:
                set_sparsity(self._weights, scores, sparsity, config)
        if exchanged and products is not None:
            self._exchange(before, products, exchanged)
        if rises or releases:
            self.sparsity = self._measured()

    def forget(self) -> None:
        """Sets the sums of movements to zero, which may be those of an earlier fit."""
        for mask in self._masks:
            if mask.movement is not None:
                mask.movement.assign(keras.ops.zeros_like(mask.movement))

    def _scores(self, products: Sequence[Products] | None) -> list[np.ndarray]:
        scores = score_weights(self._weights, self._config.criterion, products)
        if self._config.criterion != "movement":
            return scores
        summed = []
        for mask, score in zip(self._masks, scores, strict=True):
            movement = attach_movement(mask)
            movement.assign(keras.ops.convert_to_numpy(movement) + score)
            summed.append(keras.ops.convert_to_numpy(movement))
        return summed

    def _exchange(self, before: Sequence[np.ndarray], products: Sequence[Products], share: float) -> None:
        for weight, mask, old, means in zip(self._weights, self._masks, before, products, strict=True):
            mask.assign(exchange(keras.ops.convert_to_numpy(mask.kept), old, weight.read(), means.gradient, share))

    def _measured(self) -> float:
        kept = [keras.ops.convert_to_numpy(mask.kept) for mask in self._masks]
        size = sum(one.size for one in kept)
        return sum(int(np.count_nonzero(~one)) for one in kept) / size if size else 0.0


def share_at(step: int, share: float, begin_step: int, end_step: float) -> float:
    """Returns the share of the kept weights to exchange at a step: a half cosine from `share` to zero at `end_step`.

    Example:
        >>> [round(share_at(step, 0.3, 0, 100), 3) for step in (0, 50, 99, 100)]
        [0.3, 0.15, 0.0, 0.0]
    """
    if not begin_step <= step < end_step:
        return 0.0
    return share * (1 + math.cos(math.pi * (step - begin_step) / (end_step - begin_step))) / 2


def exchange(
    kept: np.ndarray, before: np.ndarray, weights: np.ndarray, gradients: np.ndarray, share: float
) -> np.ndarray:
    """Returns a mask with as many kept weights, of which a share was pruned before.

    The kept weights with the smallest absolute value are dropped. Of those that the mask `before` does not keep, the
    ones with the largest absolute gradients are regrown.

    Example:
        >>> mask = np.array([True, True, False, False])
        >>> exchange(mask, mask, np.array([3.0, 0.1, 0.0, 0.0]), np.array([0.0, 0.0, 1.0, -2.0]), share=0.5)
        array([ True, False, False,  True])

    Reference:
        Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020, arXiv:1911.11134.
    """
    count = min(round(share * np.count_nonzero(kept)), int(np.count_nonzero(~before)))
    if not count:
        return kept
    return (kept & ~_highest(-np.abs(weights), kept, count)) | _highest(np.abs(gradients), ~before, count)


def _highest(scores: np.ndarray, among: np.ndarray, count: int) -> np.ndarray:
    """Returns True at the `count` highest scores among some."""
    ranked = np.where(among, scores, -np.inf)
    chosen = np.zeros(ranked.size, dtype=bool)
    chosen[np.argpartition(ranked, -count, axis=None)[-count:]] = True
    return chosen.reshape(ranked.shape)
