"""The crop, the flip and the fused transform against NumPy, and the distribution of what they draw."""

import numpy as np
import numpy_reference as reference
import pytest
import tensorflow as tf

from tfopt.data.augment.config import AugmentConfig
from tfopt.data.augment.geometry import MOST_SLICES, Moves, crop_and_flip, draw_moves, project, transforms

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (9, 11, 14, 3)).astype("uint8")
SEED = tf.constant([3, 4])
MODES = ("constant", "reflect", "nearest", "wrap")


def moves_of(config, count):
    moves = draw_moves(config, SEED, tf.constant(count))
    each = [{name: value[place].numpy() for name, value in named(moves, count)} for place in range(count)]
    return moves, each


def named(moves, count):
    return [(name, tf.broadcast_to(value, (count,))) for name, value in moves._asdict().items()]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("pixels", "flip"), [(3, None), (0, "both"), (2, "horizontal"), (4, "both")])
def test_crop_and_flip_copy_pixels_as_numpy_does(pixels, flip, mode, on_gpu):
    moves, each = moves_of(AugmentConfig(crop=pixels, flip=flip), len(IMAGES))
    fill = 7 if mode == "constant" else 0
    moved = crop_and_flip(
        tf.constant(IMAGES), moves, crop=pixels, flip=flip, fill_mode=mode, fill_value=fill, on_gpu=on_gpu
    )
    for image, drawn, found in zip(IMAGES, each, moved.numpy(), strict=True):
        numbers = (drawn[name] for name in ("offset_y", "offset_x", "mirror_y", "mirror_x"))
        np.testing.assert_array_equal(found, reference.crop_and_flip(image, pixels, *numbers, mode, fill))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("size", "is_known"), [(1, True), (17, True), (MOST_SLICES + 1, True), (1, False), (16, False), (17, False)]
)
def test_a_crop_of_any_number_of_images_and_any_padding(size, is_known):
    images = RNG.integers(0, 256, (size, 4, 5, 1)).astype("uint8")
    moves, each = moves_of(AugmentConfig(crop=9, flip="horizontal"), size)  # more padding than image
    spec = tf.TensorSpec([size if is_known else None, 4, 5, 1], tf.uint8)

    @tf.function(input_signature=[spec])
    def crop(images):
        return crop_and_flip(images, moves, crop=9, flip="horizontal", fill_mode="reflect", fill_value=0)

    wanted = [
        reference.crop_and_flip(image, 9, drawn["offset_y"], drawn["offset_x"], False, drawn["mirror_x"], "reflect")
        for image, drawn in zip(images, each, strict=True)
    ]
    np.testing.assert_array_equal(crop(tf.constant(images)), wanted)


ALL = AugmentConfig(crop=2, flip="both", rotation_degrees=40, zoom=0.3, translation=0.2, shear_degrees=20)
PROJECTIVE = [
    AugmentConfig(rotation_degrees=90),
    AugmentConfig(zoom=0.4),
    AugmentConfig(translation=0.3),
    AugmentConfig(shear_degrees=30),
    ALL,
]


@pytest.mark.parametrize("config", PROJECTIVE)
@pytest.mark.parametrize(
    ("mode", "nearest"),
    [
        ("constant", False),
        ("nearest", True),
        pytest.param("nearest", False, marks=pytest.mark.slow),
        pytest.param("constant", True, marks=pytest.mark.slow),
    ],
)
def test_one_transform_does_what_the_changes_do_one_by_one(config, mode, nearest):
    images = IMAGES[:4]
    moves, each = moves_of(config, len(images))
    fill = 9 if mode == "constant" else 0
    matrices = transforms(moves, tf.constant(len(images)), tf.constant(images.shape[1:3]))
    moved = project(tf.constant(images), matrices, fill_mode=mode, fill_value=fill, nearest=nearest).numpy()
    for image, drawn, found in zip(images, each, moved, strict=True):
        wanted = reference.project(image, drawn, mode, fill, nearest)
        if nearest:  # a place between two pixels may be rounded to either
            assert (found == wanted).all(-1).mean() > 0.98
        else:
            np.testing.assert_allclose(found, wanted, atol=0.6)  # rounded to whole numbers


@pytest.mark.parametrize("mode", MODES)
def test_the_transform_moves_by_whole_pixels_exactly_as_the_crop(mode):
    config = AugmentConfig(crop=3, flip="both")
    moves, _ = moves_of(config, len(IMAGES))
    matrices = transforms(moves, tf.constant(len(IMAGES)), tf.constant(IMAGES.shape[1:3]))
    projected = project(tf.constant(IMAGES), matrices, fill_mode=mode, fill_value=0.0)
    cropped = crop_and_flip(tf.constant(IMAGES), moves, crop=3, flip="both", fill_mode=mode, fill_value=0)
    np.testing.assert_array_equal(projected, cropped)


def test_a_transform_that_changes_nothing_is_exact():
    matrices = transforms(Moves(), tf.constant(len(IMAGES)), tf.constant(IMAGES.shape[1:3]))
    for nearest in (False, True):
        same = project(tf.constant(IMAGES), matrices, fill_mode="constant", fill_value=0.0, nearest=nearest)
        np.testing.assert_array_equal(same, IMAGES)


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64", "uint16"])
def test_masks_of_any_whole_numbers_are_copied(dtype):
    masks = RNG.integers(0, 300, (4, 8, 8, 1)).astype(dtype)
    moves, each = moves_of(AugmentConfig(flip="both"), 4)
    matrices = transforms(moves, tf.constant(4), tf.constant([8, 8]))
    moved = project(tf.constant(masks), matrices, fill_mode="constant", fill_value=0, nearest=True)
    assert moved.dtype.name == dtype
    for mask, drawn, found in zip(masks, each, moved.numpy(), strict=True):
        wanted = reference.crop_and_flip(mask, 0, 0, 0, drawn["mirror_y"], drawn["mirror_x"])
        np.testing.assert_array_equal(found, wanted)


def test_the_draws_are_even_over_their_ranges():
    count = 10_000
    moves = draw_moves(ALL, SEED, tf.constant(count))
    for is_mirrored in (moves.mirror_x, moves.mirror_y):
        assert abs(is_mirrored.numpy().mean() - 0.5) < 4 * 0.5 / np.sqrt(count)
    for offsets in (moves.offset_x, moves.offset_y):
        places, counts = np.unique(offsets, return_counts=True)
        assert places.tolist() == [-2, -1, 0, 1, 2]
        assert abs(counts - count / 5).max() < 4 * np.sqrt(count * 0.2 * 0.8)
    ranges = {"radians": np.radians(40), "shift_x": 0.2, "shift_y": 0.2}
    drawn = {name: getattr(moves, name).numpy() / largest for name, largest in ranges.items()}
    drawn["size"] = (moves.size.numpy() - 1) / 0.3
    drawn["shear_x"] = np.arctan(moves.shear_x.numpy()) / np.radians(20)
    for values in drawn.values():
        evenly = np.linspace(-1, 1, count)
        assert np.abs(np.sort(values) - evenly).max() < 0.04  # the Kolmogorov-Smirnov distance, twice
    both = np.corrcoef(list(drawn.values()))
    assert np.abs(both - np.eye(len(both))).max() < 0.05
