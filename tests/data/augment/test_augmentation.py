"""Every setting of AugmentConfig through the same tests: eagerly, in tf.data and in a traced step, for every dtype."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.data.augment.augmentation import Augmentation
from tfopt.data.augment.config import AugmentConfig
from tfopt.errors import ConfigError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 12, 10, 3)).astype("uint8")
LABELS = np.arange(6, dtype="int32") % 4
SEED = tf.constant([3, 4], tf.int64)
SETTINGS = {
    "crop": {"crop": 2},
    "resized_crop": {"crop_scale": (0.2, 0.9), "crop_ratio": (0.8, 1.5)},
    "flip": {"flip": "both"},
    "crop_and_flip": {"crop": 2, "flip": "horizontal", "fill_mode": "reflect"},
    "transform": {"rotation_degrees": 30, "zoom": 0.2, "translation": 0.1, "shear_degrees": 10, "flip": "horizontal"},
    "wrap": {"translation": 0.3, "fill_mode": "wrap"},
    "colour": {"brightness": 0.2, "contrast": 0.2, "saturation": 0.5, "hue": 0.1},
    "cutout": {"cutout": 0.5},
    "mixup": {"mixup": 0.4},
    "cutmix": {"cutmix": 1.0},
    "either": {"mixup": 0.4, "cutmix": 1.0},
    "rand_augment": {"rand_augment": 2},
    "aug_mix": {"aug_mix": 3},
    "all": {"crop": 1, "flip": "both", "zoom": 0.1, "hue": 0.1, "cutout": 3, "mixup": 1, "rand_augment": 1},
}
EVERY = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
# "all" has most of the stages.
SOME = ("resized_crop", "all")
SOME_FAST = pytest.mark.parametrize(
    "settings",
    [pytest.param(each, id=name, marks=() if name in SOME else pytest.mark.slow) for name, each in SETTINGS.items()],
)


def augmentation_of(settings, **options):
    return Augmentation(AugmentConfig(**settings), outputs=4, **options)


def batch(dtype="uint8"):
    images = tf.constant(IMAGES) if dtype == "uint8" else tf.cast(tf.constant(IMAGES / 255, tf.float32), dtype)
    return images, tf.constant(LABELS)


def test_every_setting_that_changes_examples_is_in_the_table():
    tested = {name for settings in SETTINGS.values() for name in settings}
    assert tested == {field.name for field in dataclasses.fields(AugmentConfig)} - {
        "fill_value",
        "rand_augment_magnitude",
        "where",
    }


@pytest.mark.one_in(2)
@SOME_FAST
def test_the_result_is_the_same_eagerly_in_tf_data_and_in_a_traced_step_of_open_sizes(settings):
    augment = augmentation_of(settings)
    eager = augment(batch(), SEED)
    assert not np.array_equal(eager[0], IMAGES)
    mapped = tf.data.Dataset.from_tensors(batch()).map(lambda *example: augment(example, SEED))
    assert mapped.element_spec[0].shape.as_list() == [6, 12, 10, 3]
    signature = [
        (tf.TensorSpec([None, None, None, 3], tf.uint8), tf.TensorSpec([None], tf.int32)),
        tf.TensorSpec([2], tf.int64),
    ]
    traced = tf.function(augment.__call__, input_signature=signature)
    for found in (traced(batch(), SEED), next(iter(mapped))):
        for one, two in zip(tf.nest.flatten(found), tf.nest.flatten(eager), strict=True):
            assert one.dtype == two.dtype
            if one.dtype == tf.uint8:
                np.testing.assert_array_equal(one, two)
            else:  # a graph multiplies by 1 / n where eager code divides by n
                np.testing.assert_allclose(one, two, atol=1e-6)
    # A replica without examples.
    nothing = tf.zeros((0, 8, 8, 3), tf.uint8), tf.zeros((0,), tf.int32)
    for images, labels in (traced(nothing, SEED), augment(nothing, SEED)):
        assert images.shape == (0, 8, 8, 3)
        assert labels.shape[0] == 0


@pytest.mark.parametrize("name", ["crop_and_flip", pytest.param("rand_augment", marks=pytest.mark.slow)])
def test_groups_of_any_size_have_their_own_length_in_a_traced_step(name):
    images = tf.constant(RNG.integers(0, 256, (17, 6, 6, 3)).astype("uint8"))
    augment = augmentation_of(SETTINGS[name])
    example = images, tf.zeros(17, tf.int32)
    np.testing.assert_array_equal(tf.function(augment.__call__)(example, SEED)[0], augment(example, SEED)[0])


@pytest.mark.gpu
@EVERY
def test_a_gpu_gives_the_same_images(settings):
    with tf.device("CPU:0"):
        wanted = augmentation_of(settings)(batch(), SEED)
    with tf.device("GPU:0"):
        found = tf.function(augmentation_of(settings, on_gpu=True).__call__)(batch(), SEED)
    # Its sums have another order, so that a value between two levels may become either.
    difference = np.abs(found[0].numpy().astype(int) - wanted[0].numpy())
    assert (difference > 1).mean() < 0.001
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-4)


@SOME_FAST
def test_the_same_seed_gives_the_same_result_and_another_one_another(settings):
    augment = augmentation_of(settings)
    first = augment(batch(), SEED)[0]
    np.testing.assert_array_equal(first, augment(batch(), [3, 4])[0])
    assert any(not np.array_equal(first, augment(batch(), [3, other])[0]) for other in (5, 6, 7))


@SOME_FAST
@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_half_precision_gives_the_images_of_float32_rounded(settings, dtype):
    augment = augmentation_of(settings)
    images, labels = batch(dtype)
    found = augment((images, labels), SEED)
    assert found[0].dtype == dtype
    exact = augment((tf.cast(images, tf.float32), labels), SEED)
    step = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    # RandAugment and AugMix work on 256 levels, and later stages begin from rounded values.
    several_stages = len(settings) > 1 or "rand_augment" in settings or "aug_mix" in settings
    atol = 16 * step if several_stages else step
    np.testing.assert_allclose(tf.cast(found[0], tf.float32), exact[0], atol=atol)
    np.testing.assert_allclose(found[1], exact[1], atol=1e-6)


@EVERY
def test_uint8_images_are_changed_as_floating_point_images(settings):
    if {"rand_augment", "aug_mix"} & {*settings}:
        return  # tested in test_colour.py
    augment = augmentation_of(settings)
    levels = tf.cast(augment(batch(), SEED)[0], tf.float32)
    floats = augment(batch("float32"), SEED)[0]
    np.testing.assert_allclose(levels, floats * 255, atol=0.51)


@pytest.mark.one_in(3)
@EVERY
def test_all_images_of_an_example_get_the_same_change_and_other_inputs_none(settings):
    if {"mixup", "cutmix"} & {*settings}:
        return  # refused: other inputs cannot be mixed
    augment = augmentation_of(settings)
    images, labels = batch()
    size = tf.random.stateless_uniform((6, 2), (0, 1))
    inputs = {"left": images, "size": size, "right": images}
    found, kept, weight = augment((inputs, labels, size[:, 0]), SEED)
    np.testing.assert_array_equal(found["left"], found["right"])
    np.testing.assert_array_equal(found["left"], augment((images, labels), SEED)[0])
    np.testing.assert_array_equal(found["size"], size)
    np.testing.assert_array_equal(kept, labels)
    np.testing.assert_array_equal(weight, size[:, 0])


MASKED = [name for name, settings in SETTINGS.items() if not {"mixup", "aug_mix"} & {*settings}]


@pytest.mark.parametrize("form", ["rank 3", pytest.param("rank 4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MASKED)
def test_masks_follow_exactly(name, form):
    settings = SETTINGS[name]
    augment = augmentation_of(settings, masks=True, ignored_target=255)
    masks = np.zeros((6, 24, 20), "uint8")
    for place, mask in enumerate(masks):
        mask[3 + place : 15, 4:16] = 1
    images = tf.constant(np.repeat(masks[..., None] * 200 + 30, 3, -1).astype("uint8"))
    targets = tf.constant(masks if form == "rank 3" else masks[..., None])
    weight = tf.ones((6, 24, 20))
    found, moved, weights = augment((images, targets, weight), SEED)
    assert moved.shape == targets.shape
    assert moved.dtype == tf.uint8
    moved = np.reshape(moved, masks.shape)
    is_inside = moved != 255
    if name in ("colour", "rand_augment"):
        assert is_inside.all() or name == "rand_augment"
    elif name != "cutout":
        # What the mask calls an object is bright in the image. Between the two, interpolation is grey.
        bright = found.numpy()[..., 0] > 130
        equal = (bright == (moved == 1))[is_inside].mean()
        # At an edge halfway between two pixels, either may be the nearest one.
        assert equal > (0.96 if "translation" in settings else 0.999 if "crop_scale" in settings else 0.9999)
    if not {"cutmix", "cutout"} & {*settings}:
        assert weights.shape == weight.shape
        np.testing.assert_array_equal(weights.numpy() == 1, is_inside)
    if name in ("crop", "transform"):
        assert not is_inside.all(), "the free border has the class that does not count"


def test_a_mask_without_an_ignored_class_has_class_0_at_the_border():
    augment = augmentation_of({"crop": 4}, masks=True)
    _, moved = augment((tf.constant(IMAGES), tf.ones((6, 12, 10), tf.int32)), SEED)
    assert sorted(np.unique(moved)) == [0, 1]


def test_each_stage_has_random_numbers_of_its_own():
    crop = augmentation_of({"crop": 2})(batch(), SEED)[0]
    both = augmentation_of({"crop": 2, "cutout": 3})(batch(), SEED)[0]
    is_cut = (both == 128).numpy().all(-1)
    np.testing.assert_array_equal(both[~is_cut], crop[~is_cut])


def test_nothing_changes_without_a_setting():
    example = batch()
    assert AugmentConfig().is_off
    assert Augmentation(AugmentConfig())(example, SEED) is example


def test_a_crop_of_the_whole_image_is_refused():
    with pytest.raises(ConfigError, match=r"crop must be smaller than the sides.*crop=8, with a side of 8 pixels"):
        augmentation_of({"crop": 8})((tf.zeros((2, 8, 9, 3)), tf.zeros(2)), SEED)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ((tf.zeros((2, 3, 8, 8)), tf.zeros(2)), r"Images .* Received: images of shape \(2, 3, 8, 8\), whose channels"),
        ((tf.zeros((2, 8)), tf.zeros(2)), r"Inputs must be images .* Received: inputs of shape \(2, 8\)"),
        ((tf.zeros((2, 8, 8, 3), tf.int32), tf.zeros(2)), "images of dtype int32"),
    ],
)
def test_inputs_that_are_not_images_are_refused(example, message):
    with pytest.raises(ConfigError, match=message):
        augmentation_of({"zoom": 0.1})(example, SEED)


def test_masks_of_the_wrong_form_are_refused():
    with pytest.raises(ConfigError, match=r"Targets must be masks .* shape \(6,\)"):
        augmentation_of({"crop": 1}, masks=True)(batch(), SEED)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fill_mode": "wrap", "fill_value": 0.5}, "fill_value must be 0 unless fill_mode is 'constant'"),
        ({"cutout": 2.5}, "cutout must be a whole number of pixels"),
        ({"rand_augment": 1, "aug_mix": 1}, "must not both be on"),
        ({"zoom": 1}, r"zoom must be in \[0, 1\)"),
        ({"flip": "sideways"}, "flip must be 'horizontal', 'vertical', 'both' or None"),
        ({"mixup": float("inf")}, "mixup must be"),
    ],
)
def test_settings_without_meaning_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        AugmentConfig(**settings)


def test_the_settings_are_public():
    assert tfopt.data.AugmentConfig is AugmentConfig
    assert tfopt.data.Augmentation is Augmentation


@pytest.mark.parametrize(
    ("name", "scale", "offset"),
    [
        ("colour", 2 / 255, -1.0),
        ("cutout", 1.0, 0.0),
        pytest.param("rand_augment", 1.0, 0.0, marks=pytest.mark.slow),
        pytest.param("aug_mix", 2 / 255, -1.0, marks=pytest.mark.slow),
    ],
    ids=["colour, -1 to 1", "cutout, 0 to 255", "rand_augment, 0 to 255", "aug_mix, -1 to 1"],
)
def test_floating_point_images_of_another_range_are_refused_where_they_would_be_clipped(name, scale, offset):
    images = tf.constant(IMAGES.astype("float32") * scale + offset)
    augment = augmentation_of(SETTINGS[name])
    for call in (augment.__call__, tf.function(augment.__call__)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be floating-point numbers from 0 to 1"):
            call((images, tf.constant(LABELS)), SEED)


def test_geometry_and_mixing_take_images_of_any_range():
    images = IMAGES.astype("float32") - 100
    for name in ("transform", "either"):
        changed, _ = augmentation_of(SETTINGS[name])((tf.constant(images), tf.constant(LABELS)), SEED)
        assert changed.numpy().max() > 50


def test_a_label_without_an_output_does_not_become_a_target_of_zeros():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"class numbers from 0 to 3.*4"):
        augmentation_of(SETTINGS["mixup"])((batch()[0], tf.constant(LABELS + 1)), SEED)


def test_targets_of_the_size_of_the_images_that_stay_in_their_place_are_named():
    masks = tf.constant(IMAGES[..., 0].astype("int32"))
    with pytest.warns(tfopt.TfoptWarning, match="do not follow their moves"):
        augmentation_of(SETTINGS["flip"])((batch()[0], masks), SEED)
    with pytest.raises(ConfigError, match="Masks must have the height and width of the images"):
        augmentation_of(SETTINGS["crop"], masks=True)((batch()[0], masks[:, ::2, ::2]), SEED)


def test_a_pipeline_says_that_settings_are_no_augmentation():
    with pytest.raises(ConfigError, match=r"augment=AugmentConfig\(...\). Pass tfopt.data.Augmentation"):
        tfopt.data.pipeline((IMAGES, LABELS), batch_size=2, augment=AugmentConfig(flip="both"))


@pytest.mark.parametrize("data", [IMAGES, (IMAGES,)], ids=["array", "tuple"])
def test_images_without_targets_are_refused(data):
    with pytest.raises(ConfigError, match=r"must be \(inputs, targets\) .* Received: inputs alone"):
        tfopt.data.pipeline(data, batch_size=4, random_shift=2)
