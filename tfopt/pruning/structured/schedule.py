"""Structured pruning during training: channels become zero in rounds while a model trains, and leave at the end."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from tfopt.compat.replace import forget
from tfopt.errors import ConfigError
from tfopt.models.copying import copy_model
from tfopt.pruning.config import StructuredPruningConfig
from tfopt.pruning.gradients import check_data
from tfopt.pruning.masks import attach_mask
from tfopt.pruning.schedules import last_step
from tfopt.pruning.structured.choice import choose, rank
from tfopt.pruning.structured.shrink import ShrinkResult, find_groups, finished


class ShrinkSchedule(keras.callbacks.Callback):
    """Shrinks a model while it trains in Keras' own `fit`, in rounds, so that the channels left can adapt.

    In each round the weights of the least important channels become zero, and stay zero. The first round is before the
    first step, the last one after two thirds of the fit, and the others lie between them at equal distances. The model
    keeps its shape until the fit ends; then `result` has the smaller model, which computes the same. It needs no
    further training.

    A channel that is zero never comes back. A second fit with a new callback goes on from the zeros of the first one.

    Args:
        model: A built functional or Sequential Keras 3 model. `fit` may be called on another model that contains it.
        config: How many channels, and which. `rounds` and `end_step` say when.
        data: Batches of (inputs, targets) for the criterion "taylor", read anew in each round.

    Attributes:
        result: What `tfopt.shrink` would return; None before the end of the fit.

    Raises:
        UnsupportedModelError: The model is subclassed or not built.
        ConfigError: A setting does not fit the model, or a target of latency is set: it needs `tfopt.shrink`. At the
            start of the fit: `end_step` is needed, because the size of the data is unknown.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32), keras.layers.Dense(4)])
        >>> model.compile("sgd", "mse")
        >>> shrinking = ShrinkSchedule(model, StructuredPruningConfig(ratio=0.5, rounds=2))
        >>> history = model.fit(np.ones((32, 8)), np.ones((32, 4)), batch_size=8, callbacks=[shrinking], verbose=0)
        >>> shrinking.result.model.layers[0].units
        16

    Reference:
        Molchanov et al., "Pruning Convolutional Neural Networks for Resource Efficient Inference", ICLR 2017,
        arXiv:1611.06440.
    """

    _follows_several_steps = True  # of a call into TensorFlow

    def __init__(self, model: keras.Model, config: StructuredPruningConfig | None = None, data: Any = None) -> None:
        super().__init__()
        self.config = StructuredPruningConfig() if config is None else config
        if self.config.target_latency is not None:
            raise ConfigError(
                "target_latency cannot be met during a fit, because each try would be timed. Received: target_latency="
                f"{self.config.target_latency:g}. Set target_flops, or call tfopt.shrink and train its result."
            )
        self._data = data
        if self.config.criterion == "taylor":
            check_data(data)
        self.result: ShrinkResult | None = None
        self._parent = model
        self._channels, self._groups, self._skipped = find_groups(model, self.config)
        copy_model(model, data)  # refuses a model whose copy computes something else, before the training
        held = {id(member.weight): member.weight for group in self._groups for member in group.members}
        self._masks = [(weight, attach_mask(weight.variable)) for weight in held.values() if weight.variable.trainable]
        self._kept = self._masked_units()
        self._rounds: list[int] = []
        self._done = self._epoch_begin = self._steps_done = 0
        forget(model, "train_function")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._choose(self.config)  # an unreachable target is an error now
        end = last_step(self.config.end_step, self.params, "The last channels leave") if self.config.rounds > 1 else 0
        self._rounds = np.linspace(0, end, self.config.rounds).round().astype(int).tolist()
        self._done = self._epoch_begin = self._steps_done = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        steps = self.params.get("steps")
        self._epoch_begin = epoch * steps if steps else self._steps_done

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        due = sum(step <= self._epoch_begin + batch for step in self._rounds)
        if due > self._done:
            self._done = due
            self._mask(due / len(self._rounds))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps_done = self._epoch_begin + batch + 1  # of an execution of several steps, this is the last one

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            with contextlib.suppress(ConfigError):  # an open size
                logs["multiply_adds"] = float(self._channels.multiply_adds(self._kept))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._done < len(self._rounds):
            self._mask(1.0)
        for _, mask in self._masks:
            mask.enforce()  # another callback may have written the weights
        self.result = finished(self._parent, self.config, self._channels, self._groups, self._kept, self._skipped)

    def _mask(self, progress: float) -> None:
        """Removes more channels: `progress` is the share of the way to the target."""
        name, value = self.config.target
        wanted = value * progress if name == "ratio" else 1 - (1 - value) * progress
        ratios = {group: ratio * progress for group, ratio in self.config.ratios.items()}
        change: dict[str, Any] = {name: wanted, "ratios": ratios}
        # From the weights, because a checkpoint may have been restored since.
        self._kept = self._masked_units()
        self._kept &= self._choose(replace(self.config, **change))
        for weight, mask in self._masks:
            mask.assign(self._channels.mask(weight, self._kept) & mask.kept.numpy())

    def _choose(self, config: StructuredPruningConfig) -> Any:
        ranked = rank(self._parent, self._groups, config, self._data, self._kept)
        return choose(self._channels, ranked, config)

    def _masked_units(self) -> Any:
        """Returns the units that earlier masks have left."""
        kept = self._channels.all_kept
        for group in self._groups:
            kept[group.units] = np.abs(group.values()).max(axis=1) > 0
        return kept
