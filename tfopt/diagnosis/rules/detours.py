"""Rules for the layers that Keras computes by a detour on a processor, one for each of `DETOURS`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import keras

from tfopt.compat.layers import layers_inside
from tfopt.compat.plain import DETOURS, Detour
from tfopt.compat.replace import replaced
from tfopt.diagnosis.experiments import CannotMeasureError
from tfopt.diagnosis.measured import Measured
from tfopt.models.structure import layer_path
from tfopt.report import Diagnosis
from tfopt.training.step.runtime import is_trained_by_tfopt

SAVED = 0.05
NAMED = 8  # layers


def taken(cause: str, measured: Measured) -> Diagnosis | str:
    """Names the layers of a training that take a detour, and times its step without the detour if there is a way to."""
    model, detour = measured.model, DETOURS[cause]
    found = [layer for layer in layers_inside(model) if detour.is_taken_by(layer)]
    if not found:
        return "no layer takes this detour"
    if model.jit_compile:
        return "XLA compiles the whole step"
    if measured.hardware.gpus:
        raise CannotMeasureError("it was measured on processors alone")
    if detour.in_training and is_trained_by_tfopt(model):
        return "tfopt's step computes these layers by plain operations"
    gain, figures, advice = _without(cause, found, measured)
    if gain is not None and gain < SAVED:
        return figures
    names = [layer_path(model, layer) for layer in found[:NAMED]]
    more = [f"{len(found) - NAMED} more"] if len(found) > NAMED else []
    return Diagnosis(
        cause=cause,
        title=f"{detour.what}: {len(found)} layer{'s' if len(found) > 1 else ''}",
        evidence=", ".join(names + more) + (f": {figures} (threshold {SAVED:.0%})" if figures else ""),
        gain=gain,
        advice=advice,
    )


def threshold(detour: Detour) -> str:
    """Returns what must hold for the diagnosis, in words."""
    is_timed = detour.in_training or detour.settings
    return f"{detour.what}, on a processor" + (f"; that costs {SAVED:.0%} of the step" if is_timed else "")


def remedy(detour: Detour) -> str:
    """Returns what to change, in words."""
    return "; or ".join(["tfopt's step"] * detour.in_training + [detour.instead] * bool(detour.instead))


def _without(cause: str, found: list[keras.Layer], measured: Measured) -> tuple[float | None, str, str]:
    """Returns the share of the step that is saved without a detour, the figures, and the advice.

    Without a way to time that, the share is None.
    """
    detour = DETOURS[cause]
    instead = f"in the script: {detour.instead}" if detour.instead else ""
    if detour.in_training and detour.plain is not None:
        pair = measured.experiments.within(cause, partial(detour.plain, True))
        own = type(measured.model).train_step is not keras.Model.train_step
        advice = "override compute_loss in place of train_step, then " if own else ""
        advice += "tfopt.compile, or tfopt accelerate with the script: the step computes them by plain operations"
        return *measured.gain_of(pair, "with plain operations"), "; or ".join(filter(None, [advice, instead]))
    if detour.settings:
        pair = measured.experiments.within(cause, partial(_set, found, detour.settings))
        words = ", ".join(f"{name}={value}" for name, value in detour.settings.items())
        return *measured.gain_of(pair, f"with {words}", "building the step"), instead
    return None, "", instead


@contextlib.contextmanager
def _set(layers: Sequence[keras.Layer], settings: dict[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as scopes:
        for layer in layers:
            scopes.enter_context(replaced(layer, **settings))
        yield
