"""The colour matrix and the operations of RandAugment and AugMix against NumPy."""

import math

import numpy as np
import numpy_reference as reference
import pytest
import tensorflow as tf

from tfopt.data.augment.config import AugmentConfig
from tfopt.data.augment.pixels import change_colours
from tfopt.data.augment.rand_augment import (
    AUG_MIX_OPERATIONS,
    BITS,
    COLOUR,
    DEGREES,
    OPERATIONS,
    SHEAR,
    apply_operations,
    aug_mix,
    chain_weights,
    rand_augment,
)
from tfopt.errors import ConfigError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(20, 230, (6, 9, 10, 3)).astype("uint8")
SEED = tf.constant([3, 4])
CONFIG = AugmentConfig(brightness=0.3, contrast=0.5, saturation=0.8, hue=0.4)


def drawn_colours(config, count):
    """The random numbers of change_colours, as it draws them."""
    ranges = np.array([config.brightness, config.contrast, config.saturation, 2 * math.pi * config.hue])
    return (tf.random.stateless_uniform((4, count), SEED, -1.0, 1.0).numpy() * ranges[:, None]).T


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16"])
def test_one_matrix_does_what_four_changes_of_colour_do(dtype):
    images = IMAGES if dtype == "uint8" else (IMAGES / 255).astype(dtype)
    white = 255 if dtype == "uint8" else 1
    changed = change_colours(tf.constant(images), SEED, CONFIG)
    assert changed.dtype.name == dtype
    tolerance = {"uint8": 0.51, "float32": 2e-5, "float16": 1e-3}[dtype]
    for image, numbers, found in zip(images, drawn_colours(CONFIG, 6), changed.numpy(), strict=True):
        wanted = reference.change_colours(image, *numbers, white)
        np.testing.assert_allclose(found.astype("float64"), wanted, atol=tolerance)


@pytest.mark.parametrize("channels", [1, 4])
def test_brightness_and_contrast_of_images_that_are_not_colour_images(channels):
    images = RNG.random((3, 5, 6, channels)).astype("float32") / 2
    config = AugmentConfig(brightness=0.1, contrast=0.2)
    changed = change_colours(tf.constant(images), SEED, config)
    for image, (brightness, contrast, *_), found in zip(images, drawn_colours(config, 3), changed, strict=True):
        brighter = image + brightness
        wanted = np.clip((brighter - brighter.mean()) * (1 + contrast) + brighter.mean(), 0, 1)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_grey_has_no_hue_and_no_saturation():
    grey = np.repeat(RNG.random((3, 5, 6, 1)).astype("float32"), 3, -1)
    changed = change_colours(tf.constant(grey), SEED, AugmentConfig(saturation=1, hue=0.5))
    np.testing.assert_allclose(changed, grey, atol=1e-5)


def test_channels_without_meaning_are_refused():
    with pytest.raises(ConfigError, match=r"1 or 3 channels .* Received: images of shape \(1, 2, 2, 4\)"):
        change_colours(tf.zeros((1, 2, 2, 4)), SEED, AugmentConfig(hue=0.1))


def applied(name, images, magnitude):
    operation = tf.fill((len(images),), OPERATIONS.index(name))
    magnitudes = tf.fill((len(images),), tf.cast(magnitude, tf.float32))
    return apply_operations(tf.constant(images), None, operation, magnitudes, AugmentConfig())[0].numpy()


STILL = dict.fromkeys(("offset_y", "offset_x", "radians", "shift_y", "shift_x", "shear_y", "shear_x"), 0.0)
STILL |= {"mirror_y": False, "mirror_x": False, "size": 1.0}


def expected(name, image, magnitude):
    """One operation on one image, in NumPy. Values are not yet rounded."""
    by_channel = {"equalize": reference.equalize, "autocontrast": reference.autocontrast}
    moved = {
        "rotate": {"radians": math.radians(DEGREES) * magnitude},
        "shear_x": {"shear_x": SHEAR * magnitude},
        "shear_y": {"shear_y": SHEAR * magnitude},
        "translate_x": {"shift_x": magnitude * 150 / 331},
        "translate_y": {"shift_y": magnitude * 150 / 331},
    }
    factor = COLOUR * magnitude
    if name in by_channel:
        return np.stack([by_channel[name](channel) for channel in np.moveaxis(image, -1, 0)], -1)
    if name in moved:
        return reference.project(image, STILL | moved[name])
    if name == "posterize":
        return image & (255 << round(BITS * abs(magnitude)) & 255)
    if name == "solarize":
        threshold = math.floor(255 * (1 - abs(magnitude)) + 0.25)
        return np.where(image >= threshold, 255 - image, image)
    if name == "sharpness":
        return reference.sharpen(image, factor)
    if name == "brightness":
        return np.clip(image * (1 + factor), 0, 255)
    if name == "identity":
        return image
    numbers = {"saturation": (0, 0, factor, 0), "contrast": (0, factor, 0, 0)}[name]
    return reference.change_colours(image, *numbers, 255)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("magnitude", [0.6, -0.8])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_does_what_it_does_in_numpy(name, magnitude):
    found = applied(name, IMAGES[:3], magnitude)
    for image, changed in zip(IMAGES, found, strict=False):
        np.testing.assert_allclose(changed, np.asarray(expected(name, image, magnitude), "float64"), atol=0.51)


@pytest.mark.parametrize("name", ["equalize", "autocontrast", "contrast", "sharpness"])
def test_an_image_of_one_value_stays(name):
    image = np.full((1, 6, 6, 3), 77, "uint8")
    np.testing.assert_array_equal(applied(name, image, 0.9), image)


def test_a_magnitude_of_zero_changes_nothing():
    for name in set(OPERATIONS) - {"equalize", "autocontrast"}:
        images = np.minimum(IMAGES, 254)  # solarize inverts the values from 255 on
        np.testing.assert_array_equal(applied(name, images, 0.0), images)


def test_each_image_of_a_batch_gets_its_own_operation():
    operation = tf.constant(
        [OPERATIONS.index(name) for name in ("solarize", "rotate", "identity", "equalize", "rotate")]
    )
    magnitude = tf.constant([0.5, 0.5, 0.5, 0.5, -0.5])
    masks = tf.constant((IMAGES[:5, :, :, :1] > 128).astype("int32"))
    changed, moved = apply_operations(tf.constant(IMAGES[:5]), masks, operation, magnitude, AugmentConfig())
    for place, name in enumerate(("solarize", "rotate", "identity", "equalize", "rotate")):
        wanted = applied(name, IMAGES[place : place + 1], magnitude[place])
        np.testing.assert_array_equal(changed[place], wanted[0])
        is_same = np.array_equal(moved[place], masks[place])
        assert is_same == (name != "rotate"), "masks follow the geometric operations, and no other"


def test_rand_augment_draws_every_operation_equally_often():
    count = 10_000
    operations = tf.random.stateless_uniform(
        (1, count), tf.random.experimental.stateless_fold_in(SEED, 0), 0, len(OPERATIONS), tf.int32
    )[0].numpy()
    share = 1 / len(OPERATIONS)
    counts = np.bincount(operations, minlength=len(OPERATIONS))
    assert abs(counts - count * share).max() < 4 * np.sqrt(count * share * (1 - share))
    # These are the operations that the images get.
    images = np.broadcast_to(IMAGES[:1], (40, *IMAGES.shape[1:]))
    changed, _ = rand_augment(tf.constant(images), None, SEED, AugmentConfig(rand_augment=1, rand_augment_magnitude=8))
    operations = tf.random.stateless_uniform(
        (1, 40), tf.random.experimental.stateless_fold_in(SEED, 0), 0, len(OPERATIONS), tf.int32
    )[0].numpy()
    for image, found, operation in zip(images, changed.numpy(), operations, strict=True):
        wanted = [expected(OPERATIONS[operation], image, sign * 0.8) for sign in (1, -1)]
        assert min(np.abs(found - np.asarray(each, "float64")).max() for each in wanted) < 0.52


def test_rand_augment_rounds_floating_point_images_to_levels():
    levels, _ = rand_augment(tf.constant(IMAGES), None, SEED, AugmentConfig(rand_augment=2))
    floats = tf.constant((IMAGES / 255).astype("float32"))
    changed, _ = rand_augment(floats, None, SEED, AugmentConfig(rand_augment=2))
    np.testing.assert_allclose(changed * 255, levels, atol=1e-3)


def test_aug_mix_averages_an_image_with_its_copies():
    chains, share = chain_weights(SEED, tf.constant(10_000))
    np.testing.assert_allclose(tf.reduce_sum(chains, 0), 1, atol=1e-5)
    # Evenly among all weights that sum to 1: each has mean 1/3 and variance 1/18; the share is uniform.
    assert abs(chains.numpy().mean(1) - 1 / 3).max() < 0.01
    assert abs(chains.numpy().var(1) - 1 / 18).max() < 0.003
    assert abs(np.sort(share) - np.linspace(0, 1, 10_000)).max() < 0.02
    flat = np.full((4, 6, 6, 3), 100, "uint8")
    border = AugmentConfig(aug_mix=1, fill_mode="nearest")
    mixed = aug_mix(tf.constant(flat), SEED, border).numpy()
    assert np.ptp(mixed.reshape(4, -1), axis=1).max() == 0, "copies of a flat image are flat, and so is their average"
    weak, strong = (
        np.abs(aug_mix(tf.constant(IMAGES), SEED, AugmentConfig(aug_mix=level)).numpy() - IMAGES.astype(float)).mean()
        for level in (0.5, 10)
    )
    assert weak < strong
    assert AUG_MIX_OPERATIONS == 10
