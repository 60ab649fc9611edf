"""Random boxes of image files are cut out of the full image, and depend on the seed and the epoch alone."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from tfopt.data import Augmentation, AugmentConfig, DataConfig, EpochCounter, convert, image_folder, pipeline, tfrecord
from tfopt.data.config import cuts_boxes
from tfopt.data.images import decode_image
from tfopt.data.pipeline import decide
from tfopt.errors import TfoptWarning

SIDE, SIZE, COUNT = 80, 20, 5
# A sixteenth of 80x80 pixels is a box of 20x20, whose pixels are those of the file.
ONE_TO_ONE = AugmentConfig(crop_scale=(1 / 16, 1 / 16), crop_ratio=(1, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Noise, in which every box is another one. Half of the files are JPEGs."""
    root = tmp_path_factory.mktemp("noise")
    for number in range(COUNT):
        pixels = tf.constant(np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3)), tf.uint8)
        for ending, encode in (("jpg", tf.io.encode_jpeg), ("png", tf.io.encode_png)):
            (root / ending).mkdir(exist_ok=True)
            (root / ending / f"{number}.{ending}").write_bytes(encode(pixels).numpy())
    return root


@pytest.fixture(scope="module")
def files(folder):
    return image_folder(directory=folder, image_size=SIZE, central_crop=0.5)


@pytest.fixture(scope="module")
def windows(folder):
    """Every box of 20x20 of the decoded files, by its first pixels."""
    found = {}
    for path in sorted(folder.glob("*/*")):
        image = decode_image(path.read_bytes(), str(path)).numpy()
        rows = np.lib.stride_tricks.sliding_window_view(image, (SIZE, SIZE), axis=(0, 1))
        found |= {rows[i, j].tobytes(): path.name for i in range(rows.shape[0]) for j in range(rows.shape[1])}
    return found


def read(examples, config=ONE_TO_ONE, **settings):
    return images_of(pipeline(examples, batch_size=4, augment=Augmentation(config), **settings))


def images_of(batches):
    images = np.concatenate([np.round(x.numpy() * 255).astype("uint8") for x, _ in batches])
    return images.transpose(0, 3, 1, 2)


@pytest.mark.slow
def test_the_arguments_of_a_configuration_hold_its_augmentation(folder, files, windows):
    """With the examples; without them a warning says so."""
    config = DataConfig(source="image_folder", arguments={"directory": str(folder)}, augment=ONE_TO_ONE)
    for x, _ in pipeline(files, batch_size=4, **config.pipeline_arguments(files)):
        boxes = np.round(x.numpy() * 255).astype("uint8").transpose(0, 3, 1, 2)
        assert all(box.tobytes() in windows for box in boxes)
    with pytest.warns(TfoptWarning, match=r"config.pipeline_arguments\(examples\)"):
        assert "augment" not in config.pipeline_arguments()
    with pytest.warns(TfoptWarning, match=r"config.pipeline_arguments\(examples\)"):
        DataConfig(random_shift=2).pipeline_arguments()
    on_device = DataConfig(augment=AugmentConfig(flip="both", where="device"))
    with pytest.warns(TfoptWarning, match="Give tfopt.compile augment="):
        assert "augment" not in on_device.pipeline_arguments(files)


def test_a_box_is_cut_out_of_the_file_and_not_of_the_resized_image(files, windows):
    images = read(files)
    assert len({windows[image.tobytes()] for image in images}) == files.size("train")
    whole = np.round(255 * files.x_test).astype("uint8").transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(read(files, training=False), whole)


@pytest.mark.slow
def test_decoded_examples_are_cached_as_they_are_resized(files, windows):
    assert not any(image.tobytes() in windows for image in read(files, cache="memory"))


def test_the_seed_and_the_epoch_decide_the_boxes(files):
    counter = EpochCounter()
    batches = pipeline(files, batch_size=4, augment=Augmentation(ONE_TO_ONE), epoch=counter)
    epochs = []
    for number in (0, 1, 0):
        counter.assign(number)
        epochs.append(images_of(batches))
    np.testing.assert_array_equal(epochs[0], epochs[2])
    assert not {image.tobytes() for image in epochs[0]} & {image.tobytes() for image in epochs[1]}
    again = EpochCounter()  # as in a process that resumes
    again.assign(1)
    np.testing.assert_array_equal(read(files, epoch=again), epochs[1])


@pytest.mark.slow
def test_records_of_files_have_boxes_too_and_the_other_changes_follow(files, windows, tmp_path):
    convert(files, tmp_path / "records")
    flipped = read(tfrecord(directory=tmp_path / "records"), replace(ONE_TO_ONE, flip="horizontal"))
    as_they_are = [image.tobytes() in windows for image in flipped]
    mirrored = [image[:, :, ::-1].tobytes() in windows for image in flipped]
    assert all(np.add(as_they_are, mirrored))
    assert 0 < sum(mirrored) < len(flipped)


@pytest.mark.parametrize("ending", ["jpg", "png"])
@pytest.mark.parametrize(("exact", "channels"), [(False, 3), (True, 3), (False, 1)])
def test_a_fixed_box_is_resized_as_the_part_of_the_decoded_image(ending, exact, channels, folder):
    content = (folder / ending / "0.jpg").with_suffix(f".{ending}").read_bytes()
    part = top, left, height, width = 3, 17, 31, 24  # less than twice the size, so nothing is decoded at a smaller size

    whole = decode_image(content, "noise", None, channels, exact=exact)
    wanted = tf.round(tf.image.resize(whole[top : top + height, left : left + width], (SIZE, SIZE)))
    found = decode_image(content, "noise", (SIZE, SIZE), channels, exact=exact, box=lambda sides: tf.constant(part))
    np.testing.assert_array_equal(found, tf.cast(wanted, tf.uint8))


def test_a_large_box_of_a_jpeg_is_decoded_at_a_smaller_size(folder):
    content = (folder / "jpg" / "0.jpg").read_bytes()
    means = tf.image.resize(decode_image(content, "noise")[5:76, 8:78], (SIZE, SIZE), "area")
    found, plain = (
        decode_image(content, "noise", (SIZE, SIZE), exact=exact, box=lambda sides: tf.constant([5, 8, 71, 70]))
        for exact in (False, True)
    )
    errors = [np.abs(tf.cast(each, tf.float32) - means).mean() for each in (found, plain)]
    assert errors[0] < 0.7 * errors[1]


def test_no_decoded_examples_are_kept_and_a_gpu_does_not_cut(files):
    crop, other = (DataConfig(augment=AugmentConfig(**each)) for each in ({"crop_scale": (0.1, 1)}, {"crop": 2}))
    caches = [decide(files, config)[0] for config in (crop, other)]
    assert [cache.value for cache in caches] == ["off", "memory"]
    assert "each epoch decodes other boxes" in caches[0].reason
    assert [cuts_boxes(config, files) for config in (crop, other)] == [True, False]
    assert not cuts_boxes(replace(crop, cache="memory"), files)  # of images that are resized already
    assert not cuts_boxes(DataConfig(augment=AugmentConfig(crop_scale=(0.1, 1), where="device")), files)
