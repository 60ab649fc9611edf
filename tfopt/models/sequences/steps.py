"""The input of a model of sequences: a row of values for each step, from an example of any shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfopt.errors import ConfigError

if TYPE_CHECKING:
    from keras import KerasTensor


def rows_of(inputs: KerasTensor, input_shape: Sequence[int | None], steps: int | None) -> KerasTensor:
    """Returns inputs as sequences [batch, steps, values].

    Args:
        inputs: [batch, *input_shape]. By default, the first axis is the steps, and the others are flattened.
        steps: Number of steps into which the values of an example are divided in their order.
    Raises:
        ConfigError: The number of values is unknown, or not a multiple of steps.
    """
    from keras import layers

    shape = tuple(input_shape)
    counted = [size for size in (shape if steps is not None else shape[1:]) if size is not None]
    whole = len(counted) == len(shape) - (steps is None)
    if not shape or not whole or (steps is not None and math.prod(counted) % steps):
        raise ConfigError(
            "input_shape must be (steps, ...) with a known number of values per step, and the number of values must be "
            f"a multiple of steps if it is given. Received: input_shape={shape}, steps={steps}."
        )
    if steps is not None:
        return layers.Reshape((steps, math.prod(counted) // steps), name="steps")(inputs)
    if len(shape) == 2:
        return inputs
    return layers.Reshape((shape[0] or -1, math.prod(counted)), name="steps")(inputs)
