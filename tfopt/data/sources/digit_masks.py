"""Masks of the handwritten digits: segmentation on real images that need no network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tfopt.data.examples import Examples
from tfopt.data.sources.digits import digits

# A pixel counts as paper or as ink where its grey leaves no doubt. Between the two lies the edge of a stroke.
PAPER, INK = 0.25, 0.5
EDGE = 255


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
    examples = digits(
        image_size=image_size, test_fraction=test_fraction, validation_fraction=validation_fraction, seed=seed
    )
    return replace(
        examples,
        name="digit_masks",
        outputs=11,
        class_names=("paper", *examples.class_names),
        ignored_target=EDGE,
        decode=_with_mask,
    )


def _with_mask(image: Any, digit: Any) -> Any:
    import tensorflow as tf

    grey = image[..., 0]
    return image, tf.where(grey >= INK, digit + 1, tf.where(grey < PAPER, 0, EDGE))
