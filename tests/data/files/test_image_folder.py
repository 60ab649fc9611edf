"""Folders of images: what is read, how it is split, and what is said of files that cannot be read."""

import os
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tfopt.data import convert, image_folder, tfrecord
from tfopt.data.files.image_files import header_problem
from tfopt.data.images import central_box, decode_image
from tfopt.data.stored import decoder_to_json
from tfopt.errors import ConfigError

ENDINGS = ("jpg", "png", "gif", "bmp", "webp")


@pytest.fixture
def folder(tmp_path, save):
    """Two classes of ten images each; the names begin with the class."""
    for number in range(20):
        name = ("cats", "dogs")[number % 2]
        save(tmp_path / "images" / name / f"{name}_{number}.{ENDINGS[number % 5]}", number)
    return tmp_path / "images"


def all_decoded(examples):
    return list(replace(examples, train=examples.train.concatenate(examples.test)).decoded("train"))


def paths(dataset):
    return [record[0].decode() for record in dataset.as_numpy_iterator()]


def test_pixels_are_those_of_the_file(tmp_path, save):
    for number in range(20):
        save(tmp_path / "ab"[number % 2] / f"{number}.{ENDINGS[number % 5]}", number, lossless=True)
    examples = image_folder(directory=tmp_path, image_size=(40, 60), test_fraction=0.5, exact=True)
    for path, (image, label) in zip(paths(examples.train), examples.decoded("train"), strict=True):
        with Image.open(path) as opened:
            expected = np.asarray(opened.convert("RGB")) / 255
        tolerance = 0.02 if path.endswith("jpg") else 1e-6
        np.testing.assert_allclose(image, expected, atol=tolerance)
        assert image.dtype == tf.float32
        assert examples.class_names[int(label)] == path.split("/")[-2]


def test_parts_are_fair_and_do_not_overlap(folder):
    examples = image_folder(directory=folder, image_size=8, test_fraction=0.2, validation_fraction=0.2)
    parts = [paths(examples.records(part)) for part in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [12, 4, 4]
    assert len(set().union(*parts)) == 20
    for part in parts:
        assert sum("cats_" in path for path in part) * 2 == len(part)
    assert (examples.outputs, examples.class_names, examples.input_shape) == (2, ("cats", "dogs"), (8, 8, 3))
    assert examples.size("train") == 12
    first = parts[0][:6]
    assert 0 < sum("cats_" in path for path in first) < 6  # the order is not by class
    again = image_folder(directory=folder, image_size=8, test_fraction=0.2, validation_fraction=0.2)
    assert paths(again.train) == parts[0]
    other = image_folder(directory=folder, image_size=8, test_fraction=0.2, validation_fraction=0.2, seed=1)
    assert paths(other.train) != parts[0]


@pytest.mark.parametrize(
    "folders",
    [
        ("train", "val", "test"),
        ("TRAIN", "valid", "Testing"),
        ("Training_Set", "dev", "eval"),
        ("training", "Validation", "test data"),
    ],
)
def test_folders_of_parts_are_the_parts(folders, tmp_path, save):
    train, validation, test = folders
    for number in range(12):
        part = folders[number % 3]
        save(tmp_path / part / "ab"[number // 3 % 2] / f"{part}_{number}.png", number)
    examples = image_folder(directory=tmp_path, image_size=8)
    assert examples.notes == ()
    for part, prefix in (("train", train), ("validation", validation), ("test", test)):
        names = paths(examples.records(part))
        assert len(names) == 4
        assert all(f"/{prefix}/" in name for name in names)
    save(tmp_path / test / "c" / "0.png")
    with pytest.raises(ConfigError, match=rf"{test}/c, which is no class of the training part"):
        image_folder(directory=tmp_path)


def test_what_lies_beside_the_parts_is_noted(tmp_path, save):
    for number in range(12):
        save(tmp_path / ("train", "valid", "extra")[number % 3] / "ab"[number // 3 % 2] / f"{number}.png", number)
    save(tmp_path / "train" / "stray.png")
    (tmp_path / "readme.md").write_text("words")
    note = (
        "Files and folders beside those of the parts or classes were not used: 3 (extra, readme.md, train/stray.png)."
    )
    assert image_folder(directory=tmp_path, image_size=8, test_fraction=0.5).notes == (note,)
    save(tmp_path / "VAL" / "a" / "0.png")
    with pytest.raises(ConfigError, match=r"Each part must have one folder. Received: 'VAL', 'train', 'valid'"):
        image_folder(directory=tmp_path)
    save(tmp_path / "other" / "valid" / "0.png")
    save(tmp_path / "other" / "test" / "0.png")
    with pytest.raises(ConfigError, match="must include one for training"):
        image_folder(directory=tmp_path / "other")


def test_a_missing_part_is_taken_from_the_training_folder(tmp_path, save):
    for number in range(20):
        save(tmp_path / "train" / "ab"[number % 2] / f"{number}.png", number)
    examples = image_folder(directory=tmp_path, image_size=8, test_fraction=0.2)
    assert (examples.size("train"), examples.size("test"), examples.validation) == (16, 4, None)


def damage(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "empty":
        content = b""
    elif kind == "cut":
        content = content[: len(content) // 2]
    elif kind == "other":
        content = b"<html>404 not found</html>" * 9
    elif kind == "flipped":
        content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", ["empty", "cut", "other"])
def test_an_unreadable_file_is_an_error_or_counted(kind, ending, folder, save):
    damage(save(folder / "cats" / f"broken.{ending}", 3), kind)
    with pytest.raises(ConfigError, match=rf"1 of 21 that cannot be read: cats/broken.{ending} \("):
        image_folder(directory=folder)
    for limit in (1, 0.1):
        examples = image_folder(directory=folder, image_size=8, max_unreadable=limit)
        assert "1 of 21 images was left out: cats/broken" in examples.notes[0]
        assert "broken" not in str(paths(examples.train) + paths(examples.test))
    with pytest.raises(ConfigError, match=r"At most 0.01 of the images"):
        image_folder(directory=folder, max_unreadable=0.01)


@pytest.mark.parametrize(
    ("ending", "kind"), [("png", "flipped"), pytest.param("gif", "flipped", marks=pytest.mark.slow)]
)
def test_decoding_finds_what_the_ends_of_a_file_do_not_show(ending, kind, folder, save):
    damage(save(folder / "cats" / f"broken.{ending}", 3), kind)
    with pytest.raises(ConfigError, match=rf"cats/broken.{ending} \("):
        image_folder(directory=folder, check="decode")


def test_a_file_that_breaks_later_is_an_error_that_names_it(folder):
    examples = image_folder(directory=folder, image_size=8)
    broken = paths(examples.train)[3]
    damage(folder.joinpath(broken), "empty")
    with pytest.raises(tf.errors.InvalidArgumentError, match=broken.rsplit("/", 1)[1]):
        examples.arrays("train")
    folder.joinpath(broken).unlink()
    with pytest.raises(tf.errors.NotFoundError, match=broken.rsplit("/", 1)[1]):
        examples.arrays("train")


def test_folders_that_hold_no_classes_are_refused(tmp_path, folder, save):
    with pytest.raises(ConfigError, match="directory must be an existing folder"):
        image_folder(directory=tmp_path / "missing")
    (folder / "birds").mkdir()
    with pytest.raises(ConfigError, match=r"Every class folder must hold readable images .* without images in 'birds'"):
        image_folder(directory=folder)
    Image.fromarray(np.zeros((4, 4, 3), "uint8")).save(folder / "birds" / "a.tiff")
    with pytest.raises(ConfigError, match="without images in 'birds'"):
        image_folder(directory=folder)
    save(tmp_path / "flat" / "one.jpg")
    with pytest.raises(ConfigError, match="with 0 folders"):
        image_folder(directory=tmp_path / "flat")


def test_formats_that_are_not_decoded_are_noted(folder, save):
    save(folder / "cats" / "scan.tiff")
    examples = image_folder(directory=folder)
    assert examples.notes == ("Images in formats that TensorFlow does not decode were left out: 1 (.tiff).",)


def test_images_are_found_whatever_their_name(folder, save, tmp_path):
    for number, name in enumerate(("a.JPG", "b.jfif", "c.JPG.jpeg", "no_ending", "photo.jpg.1", "d.bmp_old")):
        image = save(tmp_path / f"{number}.{'bmp' if 'bmp' in name else 'jpg'}", number)
        image.rename(folder / "cats" / name)
    elsewhere = save(tmp_path / "elsewhere" / "linked.png").parent
    (folder / "cats" / "more").symlink_to(elsewhere)
    (folder / "cats" / "round").symlink_to(folder / "cats")
    for clutter in (".ipynb_checkpoints/a.jpg", "__MACOSX/b.jpg", ".hidden.jpg", "more/._c.jpg"):
        save(folder / "cats" / clutter)
    save(folder / "__MACOSX" / "d.jpg")
    save(folder / ".ipynb_checkpoints" / "e.jpg")
    (folder / "cats" / "Thumbs.db").write_bytes(b"thumbs")
    (folder / "dogs" / "list.txt").write_text("no image")
    (folder / "labels.csv").write_text("no image")
    os.mkfifo(folder / "dogs" / "pipe")
    examples = image_folder(directory=folder, image_size=8)
    assert (examples.size("train") + examples.size("test"), examples.class_names) == (27, ("cats", "dogs"))
    assert examples.notes == (
        "Files that are no images were not used: 2 (dogs/list.txt, dogs/pipe).",
        "Files and folders beside those of the parts or classes were not used: 1 (labels.csv).",
    )
    assert len(examples.x_train) == examples.size("train")


@pytest.mark.parametrize("masked", ["palette"], indirect=True)
def test_names_may_be_no_utf_8(masked):
    odd = b"\xff \n.png"
    for folder in ("images", "masks"):
        (masked / folder / "a" / "3.png").rename(masked / folder / "a" / os.fsdecode(odd))
    segmented = image_folder(directory=masked / "images", masks=masked / "masks", ignored_target=255, image_size=8)
    assert len(all_decoded(segmented)) == 10
    (masked / "images" / "b").mkdir()
    for number in range(5):
        (masked / "images" / "a" / f"{number + 5}.png").rename(masked / "images" / "b" / f"{number}.png")
    examples = image_folder(directory=masked / "images", image_size=8)
    records = [record for part in (examples.train, examples.test) for record in part.as_numpy_iterator()]
    assert any(path.endswith(odd) for path, _ in records)
    assert len(all_decoded(examples)) == 10


def test_broken_links_and_pipes_are_counted_as_unreadable(folder):
    (folder / "cats" / "gone.jpg").symlink_to(folder / "cats" / "missing.jpg")
    os.mkfifo(folder / "dogs" / "pipe.png")
    for words in (
        "2 of 22",
        r"cats/gone.jpg \(it is a link to a missing file\)",
        r"pipe.png \(it is no regular file\)",
    ):
        with pytest.raises(ConfigError, match=words):
            image_folder(directory=folder)
    assert "gone.jpg" in image_folder(directory=folder, max_unreadable=2).notes[0]


@pytest.mark.parametrize(
    "arguments",
    [{"channels": 2}, {"check": "all"}, {"max_unreadable": -1}, {"max_unreadable": 1.5}, {"image_size": 0},
     {"test_fraction": 1.0}, {"test_fraction": 0.0}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(arguments, folder):
    with pytest.raises(ConfigError, match="Received"):
        image_folder(directory=folder, **arguments)


def mask_pixels(number):
    mask = np.zeros((40, 60), np.uint8)
    mask[10:30, 5 + number : 25 + number] = 1 + number % 2
    mask[0] = 255
    return mask


@pytest.fixture(params=["grey", "palette", "16 bits"])
def masked(request, tmp_path, save):
    tmp_path = tmp_path / "segmentation"
    for number in range(10):
        save(tmp_path / "images" / "a" / f"{number}.png", number)
        path = tmp_path / "masks" / "a" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(mask_pixels(number))
        if request.param == "palette":
            image = image.convert("P")
            image.putdata(mask_pixels(number).ravel().tolist())
            image.putpalette(list(np.random.default_rng(0).integers(0, 256, 768)))
        elif request.param == "16 bits":
            image = Image.fromarray(mask_pixels(number).astype(np.uint16))
        image.save(path)
    return tmp_path


def test_masks_hold_the_class_numbers(masked):
    examples = image_folder(
        directory=masked / "images", masks=masked / "masks", image_size=(40, 60), ignored_target=255
    )
    assert (examples.outputs, examples.ignored_target, examples.size("train")) == (3, 255, 8)
    for path, (image, mask) in zip(paths(examples.train), examples.decoded("train"), strict=True):
        number = int(path.rsplit("/", 1)[1].removesuffix(".png"))
        np.testing.assert_array_equal(mask, mask_pixels(number))
        assert (image.shape, mask.shape, mask.dtype) == ((40, 60, 3), (40, 60), tf.int32)
    assert examples.notes == ()


@pytest.mark.parametrize("masked", ["grey"], indirect=True)
def test_masks_of_another_size_hold_the_same_classes_and_a_border_that_counts_is_noted(masked):
    white = image_folder(directory=masked / "images", masks=masked / "masks", image_size=8)
    assert white.outputs == 256
    assert "hold 4 of the class numbers 0 to 255" in white.notes[0]
    half = image_folder(directory=masked / "images", masks=masked / "masks", image_size=(20, 30), ignored_target=255)
    assert {0, 1, 2} <= set(np.unique(half.y_train)) <= {0, 1, 2, 255}  # nearest: no number between two classes


@pytest.mark.parametrize("masked", ["grey"], indirect=True)
def test_masks_that_do_not_fit_are_counted_or_refused(masked, save):
    directory, masks = masked / "images", masked / "masks"
    (masks / "a" / "3.png").unlink()
    Image.fromarray(np.zeros((40, 30), np.uint8)).save(masks / "a" / "4.png")
    Image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(masks / "a" / "5.png")
    damage(masks / "a" / "6.png", "cut")
    with pytest.raises(ConfigError) as caught:
        image_folder(directory=directory, masks=masks)
    for words in ("4 of 10", "its mask a/3.png is missing", "60x40 pixels, its mask 30x40", "must be grey", "cut off"):
        assert words in str(caught.value)
    save(masks / "a" / "10.png")
    (directory / "notes.txt").write_text("no image")
    (masks / "a" / "7.png").rename(masks / "a" / "7.PNG")
    examples = image_folder(directory=directory, masks=masks, max_unreadable=4, ignored_target=255)
    assert examples.notes[:2] == (
        "Files that are no images were not used: 1 (notes.txt).",
        "Masks that belong to no image were not used: 1 (a/10.png).",
    )
    assert examples.size("train") + examples.size("test") == 6
    few = image_folder(directory=directory, masks=masks, max_unreadable=4, class_names=("sky", "house"))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"class numbers below 2. .*masks/a/\d.png"):
        few.arrays("train")


def test_a_gif_of_too_many_pixels_is_not_decoded(tmp_path):
    file = tmp_path / "huge.gif"
    file.write_bytes(b"GIF89a" + 2 * (30_000).to_bytes(2, "little") + b";")
    assert header_problem(file) == "it has 30,000 x 30,000 pixels, and may have 536,870,912"


def test_a_folder_of_jpegs_has_a_path_of_its_own_and_the_same_pixels(tmp_path, save):
    for number in range(8):
        save(tmp_path / "ab"[number % 2] / f"{number}.jpg", number, height=60 + 20 * number, width=90 + 30 * number)
    quick = image_folder(directory=tmp_path, image_size=(40, 60), test_fraction=0.5)
    with (tmp_path / "a" / "0.jpg").open("ab") as file:
        file.write(b"other data behind the image")
    slow = image_folder(directory=tmp_path, image_size=(40, 60), test_fraction=0.5)
    np.testing.assert_array_equal(quick.x_train, slow.x_train)
    damage(tmp_path / paths(quick.test)[0], "cut")
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"cut off, or no JPEG.*[ab]/\d.jpg"):
        quick.arrays("test")


@pytest.mark.slow
@pytest.mark.parametrize("masked", ["grey", "palette"], indirect=True)
def test_converted_folders_hold_the_files_and_give_the_same_examples(folder, masked, tmp_path):
    for number, examples in enumerate(
        [
            image_folder(directory=folder, image_size=8),
            image_folder(directory=masked / "images", masks=masked / "masks", image_size=8, ignored_target=255),
        ]
    ):
        convert(examples, tmp_path / f"records{number}")
        again = tfrecord(directory=tmp_path / f"records{number}")
        for one, other in zip(examples.arrays("train"), again.arrays("train"), strict=True):
            np.testing.assert_array_equal(one, other)
    assert again.ignored_target == 255


def test_names_of_classes_in_another_order_than_the_folders_are_refused(folder):
    names = image_folder(directory=folder, image_size=8).class_names
    assert image_folder(directory=folder, image_size=8, class_names=names).class_names == names
    with pytest.raises(ConfigError, match="class_names must be left out without masks"):
        image_folder(directory=folder, image_size=8, class_names=names[::-1])


def test_the_working_directory_has_its_name_and_that_of_its_files(folder, monkeypatch):
    monkeypatch.chdir(folder)
    examples = image_folder(directory=".", image_size=8)
    assert examples.name == "image_folder images"
    path, label = next(iter(examples.train))
    assert examples.stored.read(path, label)[0] == path  # such as cats/cats_0.jpg


@pytest.mark.slow
def test_a_central_crop_keeps_the_aspect_ratio_also_in_a_conversion(tmp_path, save):
    folder = tmp_path / "images"
    for number in range(20, 28):  # below the sky
        save(folder / "ab"[number % 2] / f"{number}.jpg", number)
    whole = image_folder(directory=folder, image_size=24)
    examples = image_folder(directory=folder, image_size=24, central_crop=0.5)
    path, (image, _) = next(zip(paths(examples.test), examples.decoded("test"), strict=True))
    content = tf.io.read_file(path)
    np.testing.assert_allclose(
        image, decode_image(content, path, (24, 24), box=central_box(0.5, (24, 24))) / 255, atol=1e-6
    )
    assert np.abs(whole.x_test - examples.x_test).mean() > 0.02
    for form in ("files", "pixels"):
        convert(examples, tmp_path / f"records_{form}", images=form)
        records = tfrecord(directory=tmp_path / f"records_{form}")
        np.testing.assert_array_equal(records.x_test, examples.x_test)
    # A schema says nothing of a setting that older versions do not know, if it is off.
    assert "central_crop" not in (decoder_to_json(whole.stored.inputs) or {})
    assert (decoder_to_json(examples.stored.inputs) or {})["central_crop"] == 0.5


def test_a_central_crop_that_is_no_share_or_would_leave_the_masks_behind_is_refused(folder, tmp_path):
    with pytest.raises(
        ConfigError, match=r"central_crop must be in \(0, 1\] or None\. Received: .*=1\.5.*0\.875 is usual"
    ):
        image_folder(directory=folder, central_crop=1.5)
    with pytest.raises(ConfigError, match=r"central_crop must be None with masks.*central_crop=0\.5"):
        image_folder(directory=folder, masks=folder, central_crop=0.5)
