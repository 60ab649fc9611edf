"""Cutout, mixup and cutmix: what they draw, and that images and targets are mixed by the same numbers."""

import numpy as np
import pytest
import tensorflow as tf

from tfopt.data.augment.augmentation import Augmentation
from tfopt.data.augment.config import AugmentConfig
from tfopt.data.augment.mixing import cut_out, draw_beta, draw_cutout, draw_mixture
from tfopt.errors import ConfigError

RNG = np.random.default_rng(0)
IMAGES = RNG.random((8, 6, 7, 3)).astype("float32")
LABELS = np.array([0, 1, 2, 3, 0, 1, 2, 3], "int32")
SEED = tf.constant([3, 4])
COUNT = 10_000


@pytest.mark.parametrize("alpha", [0.001, 0.2, 1.0, 4.0])
def test_weights_have_the_mean_and_variance_of_beta(alpha):
    drawn = draw_beta(SEED, tf.constant(COUNT), alpha).numpy()
    assert np.isfinite(drawn).all()
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(drawn.mean() - 0.5) < 4 * np.sqrt(variance / COUNT)
    assert abs(drawn.var() / variance - 1) < 0.08


def test_a_square_is_cut_out_with_its_centre_anywhere():
    boxes = draw_cutout(SEED, 4, tf.constant(COUNT), tf.constant([10, 12]))
    heights, widths = (boxes.bottom - boxes.top).numpy(), (boxes.right - boxes.left).numpy()
    assert set(heights.tolist()) == set(widths.tolist()) == {2, 3, 4}  # 2 and 3 at the edge
    for begin, size in ((boxes.top.numpy(), 10), (boxes.left.numpy(), 12)):
        counts = np.bincount(begin)  # the centre is two pixels further, except at the edge
        assert abs(counts[1:] - COUNT / size).max() < 4 * np.sqrt(COUNT / size)
    cut = cut_out(tf.ones((COUNT, 10, 12, 1)), boxes).numpy()
    np.testing.assert_array_equal((cut == 0.5).sum((1, 2, 3)), heights * widths)


@pytest.mark.parametrize(("side", "pixels"), [(0.5, 3), (3, 3), (0.01, 1), (100, 100)])
def test_the_side_of_a_square_is_a_fraction_or_pixels(side, pixels):
    boxes = draw_cutout(SEED, side, tf.constant(50), tf.constant([6, 7]))
    assert (boxes.bottom - boxes.top).numpy().max() == min(pixels, 6)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16", "bfloat16"])
def test_cutout_fills_with_grey(dtype):
    images = tf.zeros((2, 4, 4, 3), dtype)
    boxes = draw_cutout(SEED, 100, tf.constant(2), tf.constant([4, 4]))
    assert np.unique(tf.cast(cut_out(images, boxes), tf.float32)).tolist() == [128 if dtype == "uint8" else 0.5]


def mixed(config, targets=LABELS, weight=None, images=IMAGES, **options):
    augmentation = Augmentation(config, outputs=4, **options)
    example = (tf.constant(images), tf.constant(targets), *([] if weight is None else [tf.constant(weight)]))
    return augmentation(example, SEED)


def mixture_of(config):
    seed = tf.random.experimental.stateless_fold_in(SEED, 4)
    return draw_mixture(seed, config, tf.constant(len(IMAGES)), tf.constant(IMAGES.shape[1:3]))


def test_mixup_averages_images_and_targets_by_the_same_weights():
    config = AugmentConfig(mixup=1.0)
    images, targets = mixed(config)
    mixture = mixture_of(config)
    keep = mixture.keep.numpy()
    partner = mixture.partner.numpy()
    assert sorted(partner.tolist()) == list(range(8))
    wanted = keep[:, None, None, None] * IMAGES + (1 - keep)[:, None, None, None] * IMAGES[partner]
    np.testing.assert_allclose(images, wanted, atol=1e-6)
    one_hot = np.eye(4)[LABELS]
    np.testing.assert_allclose(targets, keep[:, None] * one_hot + (1 - keep)[:, None] * one_hot[partner], atol=1e-6)


def test_cutmix_pastes_a_box_whose_share_is_that_of_the_targets():
    config = AugmentConfig(cutmix=1.0)
    images, targets = mixed(config)
    partner = mixture_of(config).partner.numpy()
    is_own, is_partners = (images == IMAGES).numpy().all(-1), (images == IMAGES[partner]).numpy().all(-1)
    assert (is_own | is_partners).all()
    keep = is_own.mean((1, 2))
    one_hot = np.eye(4)[LABELS]
    np.testing.assert_allclose(targets, keep[:, None] * one_hot + (1 - keep)[:, None] * one_hot[partner], atol=1e-6)
    assert len(np.unique(keep)) > 3


def test_a_batch_has_mixup_or_cutmix_equally_often():
    config = AugmentConfig(mixup=0.2, cutmix=1.0)

    @tf.function
    def is_cutmix(number):
        seed = tf.random.experimental.stateless_fold_in(SEED, number)
        return draw_mixture(seed, config, tf.constant(2), tf.constant([4, 4])).is_cutmix

    share = np.mean([is_cutmix(tf.constant(number)).numpy() for number in range(1000)])
    assert abs(share - 0.5) < 4 * 0.5 / np.sqrt(1000)


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_the_weights_of_examples_weight_the_mixture(name):
    weight = RNG.random(8).astype("float32")
    weight[3] = 0
    config = AugmentConfig(**{name: 1.0})
    _, targets, weights = mixed(config, weight=weight)
    mixture = mixture_of(config)
    keep, partner = mixture.keep.numpy(), mixture.partner.numpy()
    own, other = keep * weight, (1 - keep) * weight[partner]
    np.testing.assert_allclose(weights, own + other, atol=1e-6)
    one_hot = np.eye(4)[LABELS]
    summed = own[:, None] * one_hot + other[:, None] * one_hot[partner]
    np.testing.assert_allclose(targets * weights[:, None], summed, atol=1e-6)  # a loss that is linear in the targets


def test_values_and_several_labels_are_mixed_as_they_are():
    config = AugmentConfig(mixup=1.0)
    mixture = mixture_of(config)
    keep, partner = mixture.keep.numpy(), mixture.partner.numpy()
    values = RNG.random(8).astype("float32")
    np.testing.assert_allclose(
        mixed(config, targets=values)[1], keep * values + (1 - keep) * values[partner], atol=1e-6
    )
    several = RNG.integers(0, 2, (8, 4)).astype("int32")
    found = mixed(config, targets=several)[1]
    np.testing.assert_allclose(found, keep[:, None] * several + (1 - keep)[:, None] * several[partner], atol=1e-6)


def test_one_hot_gives_validation_targets_of_the_same_form():
    augmentation = Augmentation(AugmentConfig(cutmix=1.0), outputs=4)
    assert augmentation.needs_one_hot
    for targets in (LABELS, LABELS[:, None]):
        images, found = augmentation.one_hot((tf.constant(IMAGES), tf.constant(targets)))
        np.testing.assert_array_equal(found, np.eye(4)[LABELS])
        np.testing.assert_array_equal(images, IMAGES)
    plain = Augmentation(AugmentConfig(crop=1))
    assert not plain.needs_one_hot
    assert plain.one_hot((1, 2)) == (1, 2)


def test_cutmix_pastes_masks_as_images():
    masks = RNG.integers(0, 4, (8, 6, 7)).astype("uint8")
    images = np.repeat(masks[..., None], 3, -1)
    found, moved = mixed(AugmentConfig(cutmix=1.0), targets=masks, images=images, masks=True)
    assert moved.dtype == tf.uint8
    np.testing.assert_array_equal(found[..., 0], moved)
    assert not np.array_equal(moved, masks)


def test_what_cannot_be_mixed_is_refused():
    with pytest.raises(ConfigError, match="outputs must be given"):
        Augmentation(AugmentConfig(mixup=1))((tf.constant(IMAGES), tf.constant(LABELS)), SEED)
    for name in ("mixup", "aug_mix"):
        with pytest.raises(ConfigError, match=f"{name} must be 0 for masks"):
            Augmentation(AugmentConfig(**{name: 1}), masks=True)
    inputs = {"image": tf.constant(IMAGES), "size": tf.zeros((8, 2))}
    with pytest.raises(ConfigError, match="must all be images for mixup and cutmix"):
        Augmentation(AugmentConfig(mixup=1), outputs=4)((inputs, tf.constant(LABELS)), SEED)
