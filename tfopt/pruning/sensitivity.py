"""Measures the sensitivity of a model: each layer or group is pruned alone, and the model is scored."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import keras
import numpy as np
import tensorflow as tf
from annotated_types import Gt, Lt

from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.pruning.config import PruningConfig, StructuredPruningConfig
from tfopt.pruning.gradients import check_data
from tfopt.pruning.masks import choose_masks
from tfopt.pruning.patterns import parse_pattern
from tfopt.pruning.prune import scores_of
from tfopt.pruning.sensitivity_curves import Sensitivity
from tfopt.pruning.structured.choice import counts_at, kept_units, rank
from tfopt.pruning.structured.shrink import find_groups
from tfopt.pruning.weights import Weight, select_weights
from tfopt.report.formatting import is_share
from tfopt.settings.validation import check_value

SHARES = (0.25, 0.5, 0.75, 0.9)
LOWER_IS_BETTER = ("loss", "error", "per_byte", "perplexity")

Masks = list[tuple[Any, np.ndarray]]
ScoreName = str | Callable[[keras.Model], float]


def sensitivity(
    model: keras.Model,
    data: Any,
    config: PruningConfig | StructuredPruningConfig | None = None,
    *,
    shares: Sequence[float] = SHARES,
    score: ScoreName | None = None,
    higher_is_better: bool | None = None,
) -> Sensitivity:
    """Scores a model with each layer, or each group of channels, pruned alone to several shares.

    The model is the same afterwards. It is evaluated once for each layer and share, so a part of the validation data
    is enough. `Sensitivity.allocate` makes a config from the result that prunes insensitive layers more.

    Args:
        model: A built and compiled Keras 3 model.
        data: Batches of (inputs, targets) as a `tf.data.Dataset` or a list. It is read many times. A criterion that
            needs gradients reads its first batches too.
        config: What is pruned, and in which order: a `PruningConfig` for zeros, a `StructuredPruningConfig` for
            channels. Its targets are not used.
        shares: Shares of zeros, or of removed channels, above 0 and below 1.
        score: Name of a result of `model.evaluate`, or a function from the model to a number. By default the first
            accuracy or IoU of `compile`, or else the loss.
        higher_is_better: Whether higher scores are better. By default known from the name of the score.

    Returns: The curves. They print as a table, and `plot` draws them.

    Raises:
        UnsupportedModelError: The model cannot be pruned in this way, or is not compiled.
        ConfigError: The data cannot be read more than once, a share is out of range, or the score is unknown.

    Example:
        >>> keras.utils.set_random_seed(0)
        >>> from keras import layers
        >>> model = keras.Sequential([keras.Input((8,)), layers.Dense(8, name="a"), layers.Dense(1, name="b")])
        >>> model.compile(loss="mse")
        >>> data = [(np.ones((4, 8)), np.ones((4, 1)))]
        >>> found = sensitivity(model, data, shares=(0.5, 0.9))
        >>> list(found.curves), len(found.curves["a"])
        (['a', 'b'], 2)

    Reference:
        Han et al., "Learning both Weights and Connections for Efficient Neural Networks", arXiv:1506.02626.
    """
    config = PruningConfig() if config is None else config
    if not isinstance(config, PruningConfig | StructuredPruningConfig):
        raise ConfigError(
            "config must be a PruningConfig or a StructuredPruningConfig. Received: "
            f"config={type(config).__name__}(...). Pass for example tfopt.PruningConfig()."
        )
    shares = tuple(sorted(check_value("shares", shares, tuple[Annotated[float, Gt(0), Lt(1)], ...])))
    if not shares:
        raise ConfigError("shares must not be empty. Received: shares=(). Pass for example (0.5, 0.9).")
    measure = _Scorer(model, data, score)
    cases: Mapping[str, Callable[[float], Masks]]
    sizes: Counter[str] = Counter()
    cost = None
    if isinstance(config, PruningConfig):
        weights, _ = select_weights(model, config)
        zeros = parse_pattern(config.pattern, config.transposable).zeros
        shares = tuple(sorted({min(share, zeros) for share in shares}))
        cases = _weight_cases(model, weights, config, data)
        for weight in weights:
            sizes[weight.path] += math.prod(weight.variable.shape)
    else:
        cases, cost = _channel_cases(model, config, data)
    if not cases:
        raise UnsupportedModelError(f"The model must have a layer to prune. Received: {model.name!r} without one.")
    baseline = measure()
    return Sensitivity(
        score=measure.name,
        higher_is_better=_higher_is_better(measure.name, higher_is_better),
        baseline=baseline,
        shares=shares,
        curves={name: tuple(_pruned(masks(share), measure) for share in shares) for name, masks in cases.items()},
        config=config,
        sizes=sizes,
        cost=cost,
    )


class _Scorer:
    """A function that scores the model as it is now."""

    def __init__(self, model: keras.Model, data: Any, score: ScoreName | None) -> None:
        self._model, self._data, self._score = model, data, score
        self.name = getattr(score, "__name__", "score") if callable(score) else score or ""
        if not callable(score):
            if not getattr(model, "compiled", False):
                raise UnsupportedModelError(
                    f"model must be compiled, because it is evaluated. Received: {getattr(model, 'name', model)!r} "
                    "without a loss. Call model.compile, or pass a function as score."
                )
            check_data(data)
            if not isinstance(data, tf.data.Dataset | keras.utils.PyDataset):
                self._data = _Batches(data)

    def __call__(self) -> float:
        if callable(self._score):
            value = float(self._score(self._model))
        else:
            results = self._model.evaluate(self._data, verbose=0, return_dict=True)
            self.name = self.name or next((name for name in results if is_share(name)), "loss")
            if self.name not in results:
                raise ConfigError(
                    f"score must be a result of evaluate. Received: score={self.name!r}. The results are "
                    f"{', '.join(map(repr, results))}."
                )
            value = float(results[self.name])
        if math.isnan(value):
            raise ConfigError(f"The score must be a number. Received: {self.name}=nan. Look for NaN in the data.")
        return value


class _Batches(keras.utils.PyDataset):
    """Batches as a data set of Keras, which takes a list for arrays."""

    def __init__(self, batches: Any) -> None:
        super().__init__()
        self._batches = [tuple(batch) for batch in batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def _higher_is_better(name: str, given: bool | None) -> bool:
    if given is not None:
        return given
    if name.endswith(LOWER_IS_BETTER):
        return False
    if is_share(name):
        return True
    raise ConfigError(
        f"higher_is_better must be given for a score that tfopt does not know. Received: score={name!r}. Pass True "
        "or False."
    )


def _weight_cases(
    model: keras.Model, weights: Sequence[Weight], config: PruningConfig, data: Any
) -> dict[str, Callable[[float], Masks]]:
    """Returns for each layer a function from a share of zeros to the masks of its weights."""
    scores = scores_of(model, weights, config, data)
    pattern = parse_pattern(config.pattern, config.transposable)

    def masks(path: str, share: float) -> Masks:
        own = [number for number, weight in enumerate(weights) if weight.path == path]
        found = [weights[number] for number in own]
        chosen = choose_masks(found, [scores[number] for number in own], share, "layer", pattern)
        return [(weight.variable, mask) for weight, mask in zip(found, chosen, strict=True)]

    return {weight.path: functools.partial(masks, weight.path) for weight in weights}


def _channel_cases(
    model: keras.Model, config: StructuredPruningConfig, data: Any
) -> tuple[dict[str, Callable[[float], Masks]], Callable[[Mapping[str, float]], float]]:
    """Returns for each group a function from a share of channels to masks, and the cost of shares for all groups.

    The masked model computes what the smaller one would, so none needs to be built.
    """
    channels, groups, _ = find_groups(model, config)
    ranked = rank(model, groups, config, data)

    def kept(ratios: Mapping[str, float]) -> Any:
        own = config.with_ratios({each.group.name: ratios.get(each.group.name, 0.0) for each in ranked})
        return kept_units(channels, ranked, counts_at(ranked, own))

    def masks(name: str, share: float) -> Masks:
        left = kept({name: share})
        every = [(weight.variable, channels.mask(weight, left)) for weight in channels.trace.weights.values()]
        return [(variable, mask) for variable, mask in every if not mask.all()]

    def cost(ratios: Mapping[str, float]) -> float:
        return channels.multiply_adds(kept(ratios)) / channels.multiply_adds(channels.all_kept)

    return {group.name: functools.partial(masks, group.name) for group in groups}, cost


def _pruned(masks: Masks, measure: Callable[[], float]) -> float:
    """Returns the score with masked weights. The weights are the same afterwards."""
    before = [variable.numpy() for variable, _ in masks]
    try:
        for (variable, mask), value in zip(masks, before, strict=True):
            variable.assign(np.where(mask, value, value.dtype.type(0)))
        return measure()
    finally:
        for (variable, _), value in zip(masks, before, strict=True):
            variable.assign(value)
