"""Pruning during training: `PruningSchedule` raises the sparsity in steps, so that the kept weights can adapt."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from tfopt.compat.kinds import is_tf_keras
from tfopt.compat.replace import forget
from tfopt.compat.trainer import running_callbacks
from tfopt.errors import ConfigError, UnsupportedModelError, warn
from tfopt.pruning.config import PruningConfig
from tfopt.pruning.criteria import needs_data
from tfopt.pruning.gradients import check_data
from tfopt.pruning.masks import attach_counter, attach_mask, attach_movement
from tfopt.pruning.prune import PASS_A_CONFIG
from tfopt.pruning.schedules import SCHEDULES, Schedule, from_callable
from tfopt.pruning.updates import MaskUpdates, share_at
from tfopt.pruning.weights import make_report, select_weights
from tfopt.report import PassReport
from tfopt.settings.validation import check_type


@dataclass(kw_only=True)
class _Fit:
    """The state of one fit.

    Attributes:
        schedule: Function from a step to its sparsity.
        end_step: Step from which the sparsity stays at the target; infinite for a callable, which may never stay.
        exchanges_end: Step from which updates exchange no weights.
        updates: Changes the masks.
        epoch_begin: First step of the current epoch.
        steps_done: Number of steps done, those of earlier epochs included.
        next_update: Next step before which the masks change; None before the first epoch.
        updated_to: Number of steps whose updates are in the masks. A resumed fit that replays them changes nothing.
    """

    schedule: Schedule
    end_step: float
    exchanges_end: float
    updates: MaskUpdates
    epoch_begin: int = 0
    steps_done: int = 0
    next_update: int | None = None
    updated_to: int = 0


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
        self._state: _Fit | None = None
        forget(model, "train_function")

    @property
    def _fit(self) -> _Fit:
        assert self._state is not None  # Keras calls on_train_begin first
        return self._state

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        trained = {id(variable) for variable in self.model.variables}
        if any(id(weight.variable) not in trained for weight in self._weights):
            raise ConfigError(
                "The model that is fitted must be, or contain, the model that PruningSchedule was made for. "
                f"Received: {self.model.name!r}, with other weights. Make the callback for this model."
            )
        self._check_is_the_only_one()
        schedule, end_step = self._plan_schedule()
        exchanges_end = self._find_end_step() if self.config.regrowth else end_step
        updates = MaskUpdates(self.model, self._weights, self._masks, self.config, self._data)
        self._state = _Fit(schedule=schedule, end_step=end_step, exchanges_end=exchanges_end, updates=updates)
        self._stand_last()

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
        fit, steps_per_epoch = self._fit, self.params.get("steps")
        if fit.next_update is None and self._counter is not None:
            fit.updated_to = int(keras.ops.convert_to_numpy(self._counter)[2])
            if not fit.updated_to:
                fit.updates.forget()
        if steps_per_epoch or epoch == 0:
            fit.epoch_begin = epoch * (steps_per_epoch or 0)
            if fit.next_update is None:
                fit.next_update = self._update_after(self._boundary_before(fit.epoch_begin, steps_per_epoch))
        else:
            fit.epoch_begin, fit.next_update = self._counted(epoch)
        fit.steps_done = fit.epoch_begin

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        fit = self._fit
        step = fit.epoch_begin + batch
        if fit.next_update is None or step < fit.next_update:
            return
        fit.next_update = self._update_after(step)
        if step < max(self.config.begin_step, fit.updated_to):
            return
        share = share_at(step, self.config.regrowth, self.config.begin_step, fit.exchanges_end)
        fit.updates(fit.schedule(step), share, sample=step < fit.end_step)
        if self._counter is not None:
            fit.updated_to = step + 1
            done, due, _ = keras.ops.convert_to_numpy(self._counter)
            self._counter.assign([done, due, fit.updated_to])

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._fit.steps_done = max(self._fit.steps_done, self._fit.epoch_begin + batch + 1)  # in any order

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        fit = self._fit
        if self._counter is not None:
            self._counter.assign([fit.steps_done, fit.next_update, fit.updated_to])
        unknown = not self.params.get("steps")
        if unknown and epoch == 0 and not self.model.stop_training:  # now the length of an epoch is known
            self._warn_if_beyond(self.config.end_step, fit.steps_done * self.params["epochs"])
        if logs is not None:
            logs["sparsity"] = fit.updates.sparsity

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        fit = self._fit
        fit.updates(self.config.target_sparsity)
        if self._counter is not None:
            self._counter.assign([fit.steps_done, fit.next_update or 0, 0])  # a later fit makes updates of its own
        self._enforce().warn_if_unchanged()

    def _enforce(self) -> PassReport:
        """Applies the masks and makes the report again, after code other than the optimizer has written the weights."""
        for mask in self._masks:
            mask.enforce()
        self.report = make_report(self._weights, self._skipped)
        return self.report

    def _stand_last(self) -> None:
        """Adds a callback at the end of the list, because a later one may restore weights when the training ends."""
        if (running := running_callbacks()) is not None:
            running.callbacks.append(_Last(self._enforce, running))

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
        return int(min(due, self._fit.end_step)) if step < self._fit.end_step else due

    def _boundary_before(self, step: int, steps_per_epoch: int | None) -> int:
        """Returns the first step of the execution before the epoch that begins with this step."""
        if step == 0 or not steps_per_epoch:
            return step - 1
        # The last execution of an epoch has fewer steps if steps_per_execution does not divide the epoch.
        return step - 1 - (steps_per_epoch - 1) % self.model.steps_per_execution

    def _plan_schedule(self) -> tuple[Schedule, float]:
        """Returns the schedule, and the step from which it stays at the target: see `_Fit`."""
        config = self.config
        if not isinstance(config.schedule, str):
            return from_callable(config.schedule), math.inf
        end_step = self._find_end_step()
        make = SCHEDULES[config.schedule]
        return make(config.initial_sparsity, config.target_sparsity, config.begin_step, end_step), end_step

    def _find_end_step(self) -> int:
        steps_per_epoch = self.params.get("steps")
        total = steps_per_epoch * self.params["epochs"] if steps_per_epoch else None
        begin_step, end_step = self.config.begin_step, self.config.end_step
        if end_step is not None:
            self._warn_if_beyond(end_step, total)
            return end_step
        if total is None:
            raise ConfigError(
                "end_step must be given when the number of steps is unknown. Received: end_step=None and a data set of "
                "unknown size. Give end_step, or give steps_per_epoch to fit."
            )
        end_step = max(1, 2 * total // 3)
        if end_step <= begin_step:
            raise ConfigError(
                f"begin_step must come before the end of pruning. Received: begin_step={begin_step}, and pruning ends "
                f"at step {end_step}, after two thirds of the fit. Set a smaller begin_step, or set end_step."
            )
        return end_step

    def _warn_if_beyond(self, end_step: int | None, total: int | None) -> None:
        if end_step is not None and total is not None and end_step > total:
            warn(
                f"end_step={end_step} lies beyond the {total} steps of this fit. The last weights are pruned at its "
                f"end, with no step to recover. Set end_step to {total} or less."
            )


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
