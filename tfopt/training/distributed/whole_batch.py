"""Finds losses and metrics that are functions of the whole batch: what a step computes of its parts is something else.

A batch is divided over replicas and into micro-batches. The losses of the parts add up to that of the batch if it is a
mean over examples, or over the items that count (losses.py). It is something else if examples meet in it: Dice divides
sums over the batch, Circle compares pairs of examples. No property of a loss tells. So it is computed for random
outputs, at once and in two parts, and the results are compared.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import keras
import numpy as np

from tfopt.compat.trainer import losses_not_scaled
from tfopt.errors import ConfigError
from tfopt.report import Skip
from tfopt.training.losses import Part, counts_of, loss_of_part

# Those of Keras in which examples may meet, by class and by name. Their argument `axis` decides.
OF_KERAS = (keras.losses.Dice, keras.losses.Tversky, keras.losses.Circle, keras.losses.CosineSimilarity)
NAMES = tuple(each.__name__.lower() for each in OF_KERAS[:3])
# Class numbers that most losses take, and numbers that a loss may leave out.
LABELS = ((0, 1), (-1, 0, 1), (0, 1, 255), (0, 1, -100), (0, 1, -999), (0, 1, float("nan")))
OPEN_SIZE = 5
SECONDS = 5.0  # A loss that holds a large network is tried with fewer labels.

Shape = tuple[int | None, ...]


def adds_up(loss: keras.losses.Loss, y_true: Shape, y_pred: Shape, sample_weight: Shape | None = None) -> bool | None:
    """Returns whether the losses of a batch's parts add up to that of the batch; None if it cannot be computed.

    Args:
        loss: A loss that averages.
        y_true, y_pred, sample_weight: The shapes of its arguments; None is an open size, as that of the batch.
    """

    def compare(batch: Sequence[Any]) -> bool | None:
        def of(begin: int, end: int) -> Callable[[], Any]:
            part = [None if each is None else each[begin:end] for each in batch]
            return lambda: loss(part[0], part[1], part[2])

        size = len(batch[1])
        with keras.StatelessScope():  # a loss may count its calls
            counts = counts_of(of(0, size))
            totals = keras.ops.stack(counts) if counts else None
            whole = float(of(0, size)())
            found = []
            for cut in (3, size - 3):  # at one of them, the parts may be alike by chance
                shares = [(begin, end, (end - begin) / size) for begin, end in ((0, cut), (cut, size))]
                parts = [share * float(loss_of_part(of(*ends), Part(share, totals))) for *ends, share in shares]
                found.append(_same(whole, sum(parts)))
            if False in found and float(of(0, size)()) != whole:  # a random loss
                return None
        return False if False in found else found[0]

    with losses_not_scaled():
        return _compared(compare, y_true, y_pred, sample_weight)


def metric_adds_up(metric: keras.metrics.Metric, y_true: Shape, y_pred: Shape) -> bool | None:
    """Returns whether a metric of a batch's parts is that of the batch; None if it cannot be computed.

    Example:
        >>> metric_adds_up(keras.metrics.MeanMetricWrapper(keras.losses.dice), (None, 8), (None, 8))
        False
    """

    def compare(batch: Sequence[Any]) -> bool | None:
        y, predicted, _ = batch
        results = []
        for edges in ((0, len(predicted)), (0, 3, len(predicted))):
            state = [np.zeros(each.shape, each.dtype) for each in metric.variables]
            for begin, end in pairwise(edges):
                state = metric.stateless_update_state(state, y[begin:end], predicted[begin:end])
            results.append(float(metric.stateless_result(state)))
        return _same(*results)

    return _compared(compare, y_true, y_pred, None)


def check_losses(calls: Iterable[tuple[keras.losses.Loss, tuple[Any, ...]]], how: str) -> None:
    """Refuses losses of a divided batch that are functions of the whole batch, and says `how` it is divided.

    The calls have each loss with its y_true, y_pred and sample_weight, or what has their shapes.

    Raises:
        ConfigError: The losses of the parts do not add up to that of the batch.
    """
    for loss, arguments in calls:
        if _is_mean_of_keras(loss) or any(keras.tree.is_nested(each) for each in arguments[:2]):
            continue
        y_true, y_pred, weight = (None if each is None else tuple(each.shape) for each in arguments)
        if y_true is not None and y_pred is not None and adds_up(loss, y_true, y_pred, weight) is False:
            raise refusal(loss, how, weighted=weight is not None)


def check_given_losses(model: keras.Model, loss: Any, how: str) -> None:
    """Refuses the same before a model is compiled, where it does not depend on the shape of the labels."""
    for given, outputs in _with_outputs(model, loss):
        made = _loss(given)
        if made is not None and not _is_mean_of_keras(made) and _never_adds_up(adds_up, made, outputs):
            raise refusal(made, how)


def approximated_metrics(model: keras.Model, metrics: Any, how: str) -> Iterator[Skip]:
    """Returns the metrics of a divided batch that are functions of the whole batch. They are shown for parts of it."""
    reason = f"a function of the whole batch: with {how}, the mean over the parts is shown in its place"
    for given, outputs in _with_outputs(model, metrics):
        made = _metric(given)
        if made is not None and _never_adds_up(metric_adds_up, made, outputs):
            name = getattr(given, "name", None) or getattr(given, "__name__", given)  # or a name already
            yield Skip(name=str(name), kind="metric", reason=reason)


def _never_adds_up(check: Callable[..., bool | None], made: Any, outputs: Iterable[Shape]) -> bool:
    """Returns whether a loss or metric of an output adds up for none of the labels that are likely."""
    for y_pred in outputs:
        # A number for each output, or one for each example.
        likely = [y_pred, y_pred[:-1], (*y_pred[:-1], 1)] if len(y_pred) > 1 else [y_pred]
        found = [check(made, y_true, y_pred) for y_true in dict.fromkeys(likely)]
        if False in found and True not in found:
            return True
    return False


def refusal(loss: keras.losses.Loss, how: str, weighted: bool = False) -> ConfigError:
    """Returns the error for a loss that is a function of the whole batch."""
    name = getattr(getattr(loss, "fn", None), "__name__", type(loss).__name__)
    remedy = "or return a value for each example"
    if isinstance(loss, OF_KERAS[:2]) or name in NAMES[:2]:
        remedy = f"or sum over each example alone, for example keras.losses.{name.capitalize()}(axis=-1)"
    elif weighted:
        remedy = "or return a value for each example, which sample_weight and class_weight can weight"
    return ConfigError(
        "loss must be a mean over examples where a batch is divided over replicas or micro-batches. Received: "
        f"{name} with {how}, a function of the whole batch: the losses of the parts do not add up to it. Train on one "
        f"device with accumulate=1, {remedy}."
    )


def _compared(
    compare: Callable[[Sequence[Any]], bool | None], y_true: Shape, y_pred: Shape, weight: Shape | None
) -> bool | None:
    """Returns False if any random batch shows a difference, True if none does, None if nothing can be computed."""
    size = next(n for n in range(8, 99) if n not in (*y_true, *y_pred))  # an example is mistaken for no other axis
    random = np.random.default_rng(0)
    begin, found = time.monotonic(), []
    for labels in LABELS:
        places = (len(labels) * _uneven(random, _sizes(y_true, size))).astype(int)
        places.flat[: len(labels)] = places.flat[-len(labels) :] = range(len(labels))  # each occurs in each part
        batch = [
            np.array(labels, "float32")[places],
            (0.05 + 0.9 * _uneven(random, _sizes(y_pred, size))).astype("float32"),
            None if weight is None else random.uniform(0.5, 2.0, _sizes(weight, size)).astype("float32"),
        ]
        try:
            with warnings.catch_warnings(action="ignore"):
                result = compare([None if each is None else keras.ops.convert_to_tensor(each) for each in batch])
        except Exception:  # noqa: BLE001 - not what this function takes, or not in the range of its labels
            continue
        if result is False:
            return False
        found.append(result)
        if time.monotonic() - begin > SECONDS:
            break
    return True if True in found else None


def _uneven(random: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Returns numbers from 0 to 1, large in the first examples and small in the last, so that no part is like another.

    With equal parts, the root of a mean over the batch, or a mean over the labels that count, would add up.
    """
    exponents = np.geomspace(0.4, 2.5, shape[0]).reshape(-1, *(1 for _ in shape[1:]))
    return random.uniform(size=shape) ** exponents


def _same(one: float, other: float) -> bool | None:
    if not (np.isfinite(one) and np.isfinite(other)):
        return None
    return bool(np.isclose(one, other, rtol=1e-3, atol=1e-6))


def _sizes(shape: Shape, size: int) -> tuple[int, ...]:
    return (size, *(OPEN_SIZE if each is None else each for each in shape[1:]))


def _with_outputs(model: keras.Model, given: Any) -> Iterator[tuple[Any, list[Shape]]]:
    """Yields each loss or metric with the shapes of the outputs that it may be for."""
    try:
        shapes = [tuple(each.shape) for each in keras.tree.flatten(model.outputs)]
    except (AttributeError, ValueError):  # a model that is no graph knows its outputs when it is called
        return
    outputs = dict(zip(getattr(model, "output_names", range(len(shapes))), shapes, strict=True))
    items: list[Any] = []
    if isinstance(given, dict):
        items = [(each, [outputs[name]] if name in outputs else []) for name, each in given.items()]
    elif isinstance(given, list | tuple) and len(given) == len(outputs) > 1:
        items = [(each, [shape]) for each, shape in zip(given, outputs.values(), strict=True)]
    else:
        items = [(given, list(outputs.values()))]
    for item, shapes in items:
        for each in keras.tree.flatten(item):
            yield each, shapes


def _loss(given: Any) -> keras.losses.Loss | None:
    if isinstance(given, str):
        given = keras.losses.get(given) if given.lower() in NAMES else None
    if isinstance(given, keras.losses.Loss) or not callable(given):
        return given if isinstance(given, keras.losses.Loss) else None
    # The class by which Keras makes a loss of a function: the base of all that Keras has.
    return keras.losses.MeanSquaredError.__mro__[1](given)


def _metric(given: Any) -> keras.metrics.Metric | None:
    """Returns a metric in which examples may meet; None for Keras' own, which add up."""
    if isinstance(given, str):
        given = keras.losses.get(given) if given.lower() in NAMES else None
    if isinstance(given, keras.metrics.Metric):
        own = type(given).__module__.split(".")[0] != "keras" or type(given) is keras.metrics.MeanMetricWrapper
        return given if own and given.variables else None
    return keras.metrics.MeanMetricWrapper(given) if callable(given) else None


def _is_mean_of_keras(loss: keras.losses.Loss) -> bool:
    own = type(loss).__module__.split(".")[0] == "keras" and not isinstance(loss, OF_KERAS)
    function = getattr(loss, "fn", None)
    of_keras = (getattr(function, "__module__", None) or "").split(".")[0] == "keras"
    if not (own and of_keras) or getattr(function, "__name__", "") in NAMES:
        return False
    return loss.get_config().get("axis", -1) == -1
