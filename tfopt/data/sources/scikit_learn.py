"""Real examples that scikit-learn holds, so that they need no network: digits, masks of them, and diabetes patients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tfopt.data.arguments import Size, check_arguments
from tfopt.data.examples import Examples
from tfopt.data.in_memory import arrays
from tfopt.settings.validation import check_value

# A pixel counts as paper or as ink where its grey leaves no doubt. Between the two lies the edge of a stroke.
PAPER, INK = 0.25, 0.5
EDGE = 255


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
    check_arguments(locals())
    check_value("image_size", image_size, Size)
    import tensorflow as tf  # this import and sklearn's take seconds, and a list of the sources needs neither
    from sklearn.datasets import load_digits

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


def digit_masks(
    *, image_size: int = 32, test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0
) -> Examples:
    """Loads the handwritten digits with a mask for each image. Ink has the class of its digit.

    Class 0 is paper, and class 1 + d is the ink of digit d, so a model must find the strokes and recognise the digit.
    The edge of a stroke, grey from 0.25 to 0.5, has the class 255, which counts neither in the loss nor in the score.

    Args:
        image_size: Side of the images and of the masks, in pixels.
        test_fraction: Share of the test part, the same for every digit.
        validation_fraction: Share of the validation part. With 0 there is none.
        seed: Seed of the split.
    Returns: Images [n, image_size, image_size, 1], float32 in [0, 1], and masks [n, image_size, image_size], int32.
    Example:
        >>> digit_masks().y_train.shape
        (1437, 32, 32)
    """
    import tensorflow as tf

    examples = digits(
        image_size=image_size, test_fraction=test_fraction, validation_fraction=validation_fraction, seed=seed
    )

    def with_mask(image: Any, digit: Any) -> Any:
        grey = image[..., 0]
        return image, tf.where(grey >= INK, digit + 1, tf.where(grey < PAPER, 0, EDGE))

    return replace(
        examples,
        name="digit_masks",
        outputs=11,
        class_names=("paper", *examples.class_names),
        ignored_target=EDGE,
        decode=with_mask,
    )


def diabetes(*, test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Examples:
    """Loads scikit-learn's 442 records of diabetes patients: ten measurements, and the disease a year later.

    The columns are age, sex, body mass index, blood pressure and six blood serum values. The target is a measure of the
    progression of the disease, from 25 to 346. Each column has mean 0 and standard deviation 1 over all records, and so
    has the target: an absolute error of 0.5 is half a standard deviation, 38.5 in the unit of the measure.

    Args:
        test_fraction: Share of the test part.
        validation_fraction: Share of the validation part. With 0 there is none.
        seed: Seed of the split.
    Returns: Rows float32 [n, 10], and values float32 [n, 1].
    Example:
        >>> diabetes().x_train.shape
        (353, 10)

    Reference:
        Efron et al., "Least Angle Regression", Annals of Statistics, 2004.
    """
    check_arguments(locals())
    from sklearn.datasets import load_diabetes  # takes seconds, and a list of the sources needs it not

    rows, progression = load_diabetes(return_X_y=True, scaled=False)
    return arrays(
        _standardized(rows),
        _standardized(progression[:, None]),
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        seed=seed,
        name="diabetes",
    )


def _standardized(values: np.ndarray) -> np.ndarray:
    return ((values - values.mean(axis=0)) / values.std(axis=0)).astype(np.float32)
