"""The random resized crop against NumPy: how its boxes are distributed, and its pixels."""

import numpy as np
import pytest
import tensorflow as tf

from tfopt.data import Augmentation, AugmentConfig, DataConfig
from tfopt.data.augment.resized_crop import draw_boxes, resized_crop
from tfopt.errors import ConfigError

SEED = tf.constant([3, 4])
COUNT = 10_000


def reference_boxes(count, scale, ratio, height, width):
    """One box after the other, as the paper's authors and torchvision draw them."""
    rng, boxes = np.random.default_rng(0), []
    for _ in range(count):
        for _ in range(10):
            area = rng.uniform(*scale) * height * width
            aspect = np.exp(rng.uniform(*np.log(ratio)))
            h, w = round(np.sqrt(area / aspect)), round(np.sqrt(area * aspect))
            if 0 < h <= height and 0 < w <= width:
                boxes.append((rng.integers(0, height - h + 1), rng.integers(0, width - w + 1), h, w))
                break
        else:
            h, w = min(height, round(width / ratio[0])), min(width, round(height * ratio[1]))
            boxes.append(((height - h) // 2, (width - w) // 2, h, w))
    return np.array(boxes)


def reference_pixels(image, box, nearest):
    top, left, height, width = box
    part = image[top : top + height, left : left + width].astype(np.float64)
    for axis, (size, found) in enumerate(zip(image.shape, (height, width), strict=False)):
        if nearest:
            part = np.take(part, (2 * np.arange(size) + 1) * found // (2 * size), axis)
            continue
        at = np.clip((np.arange(size) + 0.5) * found / size - 0.5, 0, found - 1)
        low = np.floor(at).astype(int)
        share = np.expand_dims(at - low, [1, 2] if axis == 0 else [0, 2])
        part = np.take(part, low, axis) * (1 - share) + np.take(part, np.minimum(low + 1, found - 1), axis) * share
    return part


@pytest.mark.parametrize(("height", "width"), [(60, 90), (20, 200)])  # in the second one, few boxes fit
def test_the_boxes_are_distributed_as_those_of_the_reference(height, width):
    scale, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
    found = draw_boxes(SEED, scale, ratio, tf.constant(COUNT), tf.constant([height, width])).numpy()
    wanted = reference_boxes(COUNT, scale, ratio, height, width)
    assert (found[:, :2] >= 0).all()
    assert (found[:, :2] + found[:, 2:] <= [height, width]).all()
    levels = np.linspace(0.02, 0.98, 25)
    for side, (one, other) in enumerate(zip(found.T, wanted.T, strict=True)):
        at = np.unique(np.quantile(other, levels))
        shares = [(values[:, None] <= at).mean(0) for values in (one, other)]
        # Four standard deviations of the difference of two shares of 10,000.
        np.testing.assert_allclose(*shares, atol=4 * np.sqrt(0.5 / COUNT), err_msg=f"number {side} of a box")


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int32", "bool"])
def test_the_pixels_of_a_box_are_those_of_numpy(dtype):
    images = np.random.default_rng(0).integers(0, 256, (4, 9, 13, 3)).astype(dtype)
    boxes = np.array([(0, 0, 9, 13), (2, 3, 4, 5), (8, 12, 1, 1), (0, 6, 9, 7)])
    nearest = dtype in ("int32", "bool")  # a mask
    found = resized_crop(tf.constant(images), tf.constant(boxes, tf.int32), nearest=nearest)
    wanted = [reference_pixels(image, box, nearest) for image, box in zip(images, boxes, strict=True)]
    np.testing.assert_allclose(tf.cast(found, tf.float32), wanted, atol=0.5001 if dtype == "uint8" else 1e-3)


def test_images_of_two_sizes_show_the_same_part():
    """Their pixels are their own places, as shares of the size."""

    def places(size):
        rows = (tf.range(size, dtype=tf.float32) + 0.5) / size
        return tf.tile(tf.stack(tf.meshgrid(rows, rows, indexing="ij"), -1)[None], [50, 1, 1, 1])

    augment = Augmentation(AugmentConfig(crop_scale=(0.1, 0.5)))
    (small, large), _ = augment(((places(32), places(64)), tf.zeros(50)), seed=(0, 1))
    middles = [np.mean(each, axis=(1, 2)) for each in (small, large)]
    assert np.ptp(middles[0]) > 0.2
    np.testing.assert_allclose(*middles, atol=1 / 32)


def test_each_image_has_a_box_of_its_own():
    boxes = draw_boxes(SEED, (0.1, 0.5), (1, 1), tf.constant(50), tf.constant([64, 64])).numpy()
    assert len(np.unique(boxes, axis=0)) > 45
    assert (boxes[:, 2] == boxes[:, 3]).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop_scale": (0.5, 0.1)}, r"crop_scale must be \(smallest, largest\)\. Received: crop_scale=\(0\.5, 0\.1\)"),
        (
            {"crop_scale": (0, 1)},
            r"crop_scale must be a tuple of two numbers in \(0, 1\] or None\. Received: crop_scale=\(0, 1\).*share",
        ),
        ({"crop_ratio": 1}, r"crop_ratio must be a tuple of two positive numbers\. Received: crop_ratio=1"),
        ({"crop_scale": (0.1, 1), "crop_ratio": (2, 1)}, r"crop_ratio must be \(smallest, largest\)"),
        (
            {"crop_scale": (0.1, 1), "crop": 4},
            r"crop must be 0 with .* crop=4 and crop_scale=\(0\.1, 1.*Set crop to 0",
        ),
    ],
)
def test_settings_without_meaning_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        AugmentConfig(**settings)


def test_two_settings_that_move_the_images_are_refused():
    with pytest.raises(ConfigError, match=r"random_shift must be 0 with augment\.crop_scale.* random_shift=2"):
        DataConfig(random_shift=2, augment=AugmentConfig(crop_scale=(0.1, 1)))
