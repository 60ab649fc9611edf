"""Handwritten digits: real images that scikit-learn holds, so that they need no network."""

from __future__ import annotations

import numpy as np

from tfopt.data.arguments import Size, check_arguments
from tfopt.data.examples import Examples
from tfopt.data.files.in_memory import arrays
from tfopt.settings.validation import check_value


def digits(
    *, image_size: int = 32, test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0
) -> Examples:
    """Loads the 1,797 real handwritten digits of scikit-learn, 8x8 pixels each, and enlarges them bilinearly.

    Args:
        image_size: Side of the images, in pixels.
        test_fraction: Share of the test part, the same for every class.
        validation_fraction: Share of the validation part. With 0 there is none.
        seed: Seed of the split.
    Returns: Images [n, image_size, image_size, 1], float32 in [0, 1].
    Example:
        >>> digits().x_train.shape
        (1437, 32, 32, 1)

    Reference:
        Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
    """
    import tensorflow as tf  # this import and sklearn's take seconds, and a list of the sources needs neither
    from sklearn.datasets import load_digits

    check_value("image_size", image_size, Size)
    check_arguments(test_fraction=test_fraction, validation_fraction=validation_fraction, seed=seed)
    images, labels = load_digits(return_X_y=True)
    pixels = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    enlarged = tf.image.resize(pixels, (image_size, image_size)).numpy()
    return arrays(
        enlarged,
        labels.astype(np.int32),
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        class_names=tuple(map(str, range(10))),
        seed=seed,
        name="digits",
    )
