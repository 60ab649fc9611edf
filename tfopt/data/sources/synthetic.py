"""Random examples of any shape, which a model can learn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfopt.data.arguments import check_arguments
from tfopt.data.examples import Examples
from tfopt.data.in_memory import arrays


def synthetic(
    *,
    examples: int = 1024,
    input_shape: Sequence[int] = (32, 32, 3),
    num_classes: int = 10,
    noise: float = 0.3,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int = 0,
) -> Examples:
    """Makes examples that a model can learn: one random pattern per class, plus noise.

    They serve to time a model at any input shape, and for tests. Their accuracy says nothing about real data. The
    examples are made once and stay in memory, and no decoding follows. So a step with them shows the speed of a model
    without its input: the difference to a step with real data is the cost of that input.

    Args:
        examples: Number of examples, training and test part together.
        input_shape: Shape of one example.
        num_classes: Number of classes, all equally frequent.
        noise: Standard deviation of the noise. The patterns lie in [0, 1].
        test_fraction: Share of the test part.
        validation_fraction: Share of the validation part. With 0 there is none.
        seed: Seed of patterns, noise and split.
    Example:
        >>> synthetic(examples=100, input_shape=(8,)).x_train.shape
        (80, 8)
    """
    check_arguments(locals())
    generator = np.random.default_rng(seed)
    patterns = generator.random((num_classes, *input_shape), dtype=np.float32)
    labels = np.arange(examples, dtype=np.int32) % num_classes
    x = patterns[labels] + noise * generator.standard_normal((examples, *input_shape), dtype=np.float32)
    return arrays(
        x,
        labels,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        outputs=num_classes,
        seed=seed,
        name="synthetic",
    )
