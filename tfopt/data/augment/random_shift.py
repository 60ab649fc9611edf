"""Random changes of training examples, one example at a time, inside tf.data."""

from __future__ import annotations

import tensorflow as tf

from tfopt.errors import ConfigError


def random_shift(dataset: tf.data.Dataset, pixels: int, seed: int | tf.Tensor = 0) -> tf.data.Dataset:
    """Shifts each image by a random number of pixels in each direction, and fills the free border with zeros.

    Every epoch has new shifts. Runs with the same seed have the same shifts.

    Args:
        dataset: (image [height, width, channels], label, ...) of single examples.
        pixels: The largest shift.
        seed: Seed of the shifts. Inside a function of tf.data, such as the one of flat_map, it may be a tensor.
    Raises:
        ConfigError: The inputs are not images.
    Example:
        >>> import numpy as np
        >>> images = tf.data.Dataset.from_tensor_slices((np.ones((2, 8, 8, 1), "float32"), [0, 1]))
        >>> [image.shape.as_list() for image, label in random_shift(images, pixels=2)]
        [[8, 8, 1], [8, 8, 1]]
    """
    check_images(dataset, pixels)
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).batch(2, drop_remainder=True)

    def shift(example: tuple[tf.Tensor, ...], drawn: tf.Tensor) -> tuple[tf.Tensor, ...]:
        image, *others = example
        padded = tf.pad(image, [[pixels, pixels], [pixels, pixels], [0, 0]])
        shifted = tf.image.stateless_random_crop(padded, tf.shape(image), seed=drawn)
        return tf.ensure_shape(shifted, image.shape), *others

    return tf.data.Dataset.zip(dataset, seeds).map(shift, num_parallel_calls=tf.data.AUTOTUNE)


def check_images(dataset: tf.data.Dataset, pixels: int) -> None:
    """Raises ConfigError unless the inputs of single examples are images."""
    image = tf.nest.flatten(dataset.element_spec)[0]
    if image.shape.rank not in (3, None):
        raise ConfigError(
            "random_shift must be 0 unless the inputs are images [height, width, channels]. "
            f"Received: random_shift={pixels} and inputs of shape {tuple(image.shape)}. Set random_shift=0."
        )
