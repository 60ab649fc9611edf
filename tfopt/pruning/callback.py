"""Pruning during training: `PruningSchedule` raises the sparsity step by step, so that the kept weights can adapt."""

from __future__ import annotations

import math
import warnings
from typing import Any

import keras
import numpy as np

from tfopt.compat.kinds import is_tf_keras
from tfopt.errors import ConfigError, TfoptWarning, UnsupportedModelError, check_type
from tfopt.pruning.config import PruningConfig
from tfopt.pruning.masks import attach_counter, attach_mask
from tfopt.pruning.prune import retrace, set_sparsity
from tfopt.pruning.schedules import SCHEDULES, Schedule, from_callable
from tfopt.pruning.weights import find_weights, make_report
from tfopt.report import PassReport


class PruningSchedule(keras.callbacks.Callback):
    """Prunes a model while it trains: Keras' own `fit` with this callback, nothing else changes.

    Before each step whose number is a multiple of `frequency`, and before `end_step`, new masks are chosen for the
    sparsity that the schedule names; the compiled step applies them after each update of the optimizer. With
    `steps_per_execution` this happens at the next boundary between executions. Epoch logs gain "sparsity", the share
    of zeros that the masks hold.

    - Steps are counted from the first epoch, so a fit with `initial_epoch` goes on where an earlier one stopped: with
      the same weights and masks it chooses the masks that a fit without the break would have. Where the size of the
      data is unknown, the steps before are those that were counted, where an epoch's last execution counts as a whole
      one. A mask holds the count: checkpoints of tfopt save it, and in one process a later fit finds it.
    - Sparsity never falls, also in a second fit: what is masked stays masked.
    - A fit, stopped early or not, ends at `target_sparsity`, with no step to recover if the schedule was not done.
    - A callback that restores weights at the end, such as EarlyStopping, must stand before this one in the list.

    Args:
        model: The built Keras 3 model to prune. `fit` may be called on another one that contains it.
        config: How many weights, which, and when.

    Attributes:
        report: After a fit, what was pruned; None before.

    Raises:
        UnsupportedModelError: The model is not a Keras 3 model or is not built.
        ConfigError: `exclude` names no layer; or, when the fit begins, `end_step` is needed or leaves no step, or the
            steps before it are unknown.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> model.compile("sgd", "mse")
        >>> pruning = PruningSchedule(model, PruningConfig(target_sparsity=0.5, frequency=1))
        >>> history = model.fit(np.ones((32, 8)), np.ones((32, 4)), batch_size=8, callbacks=[pruning], verbose=0)
        >>> history.history["sparsity"], pruning.report.metrics
        ([0.5], {'sparsity': 0.5})

    Reference:
        Zhu & Gupta, "To prune, or not to prune", arXiv:1710.01878.
    """

    def __init__(self, model: Any, config: PruningConfig | None = None) -> None:
        super().__init__()
        if is_tf_keras(model):
            raise UnsupportedModelError(
                f"model must be a Keras 3 model. Received: the tf_keras model {model.name!r}. Wrap it with "
                "tfmot.sparsity.keras.prune_low_magnitude and use tfmot.sparsity.keras.UpdatePruningStep."
            )
        self.config = PruningConfig() if config is None else config
        check_type("config", self.config, PruningConfig)
        self.report: PassReport | None = None
        self._weights, self._skipped = find_weights(model, self.config.exclude)
        # Attached now, not when the fit begins: by then Keras has taken up its train function.
        self._masks = [attach_mask(weight.variable) for weight in self._weights]
        self._counter = attach_counter(self._masks[0]) if self._masks else None
        retrace(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        trained = {id(variable) for variable in self.model.variables}
        if any(id(weight.variable) not in trained for weight in self._weights):
            raise ConfigError(
                "The model that is fitted must be, or contain, the model that PruningSchedule was made for. "
                f"Received: {self.model.name!r}, with other weights. Make the callback for this model."
            )
        self._schedule, self._end_step = self._plan_schedule()
        self._counts = self._count()
        self._next_update: int | None = None  # known when the first epoch begins

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        steps_per_epoch = self.params.get("steps")
        if steps_per_epoch or epoch == 0:
            self._epoch_begin = epoch * (steps_per_epoch or 0)
            if self._next_update is None:
                self._next_update = self._update_after(self._boundary_before(self._epoch_begin, steps_per_epoch))
        else:
            self._epoch_begin, self._next_update = self._counted(epoch)
        self._seen = self._epoch_begin

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        step = self._epoch_begin + batch
        if self._next_update is None or step < self._next_update:
            return
        self._next_update = self._update_after(step)
        if step >= self.config.begin_step:
            self._raise_to(self._schedule(step))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._seen = self._epoch_begin + batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._counter is not None:
            self._counter.assign([self._seen, self._next_update])
        unknown = not self.params.get("steps")
        if unknown and epoch == 0 and not self.model.stop_training:  # the length of an epoch is known from now on
            self._warn_if_beyond(self.config.end_step, self._seen * self.params["epochs"])
        if logs is not None:
            logs["sparsity"] = self._sparsity

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._raise_to(self.config.target_sparsity)
        for mask in self._masks:
            # The optimizer's moving averages or another callback may just have written the weights.
            mask.enforce()
        self.report = make_report(self._weights, self._skipped)
        self.report.warn_if_unchanged()

    def _counted(self, epoch: int) -> tuple[int, int]:
        """The steps counted before this epoch, and the first step after them at which the masks are due."""
        steps, due = (0, 0) if self._counter is None else map(int, keras.ops.convert_to_numpy(self._counter))
        if not steps and self._counter is not None:
            raise ConfigError(
                f"The number of steps before epoch {epoch} must be known, since the schedule counts them. Received: "
                f"initial_epoch={epoch} and a data set of unknown size, with masks that were not trained before. "
                "Give steps_per_epoch to fit, or begin at initial_epoch=0."
            )
        return steps, due

    def _update_after(self, step: int) -> int:
        """The first step after this one at which the masks are due; negative steps are before all."""
        due = (step // self.config.frequency + 1) * self.config.frequency
        return int(min(due, self._end_step)) if step < self._end_step else due

    def _boundary_before(self, step: int, steps_per_epoch: int | None) -> int:
        """The first step of the execution before the one that begins an epoch with this step."""
        if step == 0 or not steps_per_epoch:
            return step - 1
        # The last execution of an epoch holds fewer steps where they do not divide.
        return step - 1 - (steps_per_epoch - 1) % self.model.steps_per_execution

    def _plan_schedule(self) -> tuple[Schedule, float]:
        """The schedule, and the step from which it stays at the target (infinite for a callable, which may not)."""
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
                "unknown size. Give end_step, or steps_per_epoch to fit."
            )
        end_step = max(1, 2 * total // 3)
        if end_step <= begin_step:
            raise ConfigError(
                f"begin_step must come before the end of pruning. Received: begin_step={begin_step}, with pruning to "
                f"end at step {end_step}, two thirds of the fit."
            )
        return end_step

    def _warn_if_beyond(self, end_step: int | None, total: int | None) -> None:
        if end_step is not None and total is not None and end_step > total:
            warnings.warn(
                f"end_step={end_step} lies beyond the {total} steps of this fit; the last weights are pruned at "
                "its end, with no step to recover.",
                TfoptWarning,
                stacklevel=2,
            )

    def _raise_to(self, sparsity: float) -> None:
        # Not where the masks hold as many zeros already, which is so for all steps that a resumed fit replays: chosen
        # anew from weights trained further, masks of the same size could differ.
        if any(_zeros_at(sparsity, size) > masked for masked, size in self._groups()):
            set_sparsity(self._weights, sparsity, self.config)
            self._counts = self._count()

    @property
    def _sparsity(self) -> float:
        """Share of the prunable weights that the masks hold at zero."""
        (masked, size) = _total(self._counts)
        return masked / size if size else 0.0

    def _groups(self) -> list[tuple[int, int]]:
        """Masked weights and all weights of what is pruned together: each layer, or with the global scope the model."""
        return self._counts if self.config.scope == "layer" else [_total(self._counts)]

    def _count(self) -> list[tuple[int, int]]:
        kept = [mask.kept.numpy() for mask in self._masks]
        return [(int(np.count_nonzero(~one)), one.size) for one in kept]


def _zeros_at(sparsity: float, size: int) -> int:
    """How many weights `masks.keep_highest` drops."""
    return min(round(sparsity * size), size - 1)


def _total(counts: list[tuple[int, int]]) -> tuple[int, int]:
    return sum(masked for masked, _ in counts), sum(size for _, size in counts)
