"""The TFRecord source: damaged, missing and exchanged files are named; encoded images; files of other programs."""

import io
import json
import shutil
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from sklearn.datasets import load_sample_image

from tfopt.data import EncodedImage, EncodedMask, Examples, Stored, convert, digits, tfrecord, tfrecord_files
from tfopt.data.images import decode_image
from tfopt.data.records.frames import frames_of
from tfopt.errors import ConfigError

SHARDS, TRAIN = 4, 200


def some_digits(seed=0):
    return digits(image_size=8, seed=seed).limit(TRAIN)


@pytest.fixture(scope="module", params=["", "GZIP"])
def converted(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("converted") / "digits"
    convert(some_digits(), directory, shards=SHARDS, compression=request.param)
    return directory


@pytest.fixture
def directory(converted, tmp_path):
    shutil.copytree(converted, tmp_path / "copy")
    return tmp_path / "copy"


def is_compressed(directory):
    return bool(json.loads((directory / "schema.json").read_text())["compression"])


def shard(directory, number=1):
    return directory / f"train-{number:05d}-of-{SHARDS:05d}.tfrecord"


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 16
    path.write_bytes(content)


def read(directory, **options):
    return tfrecord(directory=directory, files_at_a_time=1, **options)


def count(examples):
    return sum(1 for _ in examples.decoded("train"))


def test_a_truncated_file_is_named(directory):
    path = shard(directory)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ConfigError) as caught:
        read(directory)
    for words in (path.name, "damaged at record", "bytes", "skip_damaged"):
        assert words in str(caught.value)


def test_a_flipped_bit_is_found_by_the_checksum_and_the_record_is_named(directory):
    path = shard(directory)
    flip(path, path.stat().st_size - 100)
    with pytest.raises(ConfigError) as caught:
        read(directory, check="checksum")
    assert f"{path}: it is damaged at record" in str(caught.value)


def test_a_file_that_is_gone_when_the_examples_are_read_is_named(directory):
    examples = read(directory)
    shard(directory).unlink()
    with pytest.raises(tf.errors.NotFoundError, match=shard(directory).name):  # and TensorFlow does not try for ever
        count(examples)


def test_a_flipped_bit_is_named_while_streaming(directory):
    path = shard(directory)
    position = path.stat().st_size - 100
    flip(path, position)
    examples = read(directory, check="off")
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        count(examples)
    assert path.name in str(caught.value)
    if not is_compressed(directory):
        number = next(i for i, frame in enumerate(frames_of(path)) if frame.start + frame.size > position)
        assert f"damaged at record] [{number}]" in str(caught.value)


def test_a_file_that_is_cut_off_while_it_is_read_is_named(directory):
    examples = read(directory)
    path = shard(directory, 3)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(tf.errors.InvalidArgumentError, match=path.name):
        count(examples)


@pytest.mark.one_in(2)
def test_damaged_records_are_left_out_within_the_limit(directory):
    whole = [x.tobytes() for x, _ in read(directory).decoded("train").as_numpy_iterator()]
    path = shard(directory)
    records = len(whole) // SHARDS
    frames = frames_of(path)
    if is_compressed(directory):
        flip(path, path.stat().st_size - 100)
        examples = read(directory, skip_damaged=records)
        assert "the file is compressed" in examples.notes[-1]
    else:
        for number in (5, 6, 40):
            flip(path, frames[number].start + 30)
        with pytest.raises(ConfigError, match="skip_damaged=2 records may be left out"):
            read(directory, skip_damaged=2)
        examples = read(directory, skip_damaged=3)
        assert "Damaged records (counted from 0): 5, 6, 40. Left out: 3 of" in examples.notes[-1]
        first = len(frames_of(shard(directory, 0)))
        left = [x.tobytes() for x, _ in examples.decoded("train").as_numpy_iterator()]
        assert left == [x for i, x in enumerate(whole) if i - first not in (5, 6, 40)]
    assert count(examples) == examples.size("train") < len(whole)


def test_a_damaged_length_costs_the_rest_of_the_file(directory):
    if is_compressed(directory):
        pytest.skip("lengths inside a compressed file are compressed")
    path = shard(directory)
    frames = frames_of(path)
    flip(path, frames[-10].start + 2)
    assert len(frames_of(path)) == len(frames) - 10
    examples = read(directory, skip_damaged=10)
    assert f"Nothing can be read from record {len(frames) - 10} on. Left out: 10 of {len(frames)}" in examples.notes[-1]
    assert count(examples) == examples.size("train") == TRAIN - 10


def test_missing_files_are_named_or_counted(directory):
    shard(directory).unlink()
    with pytest.raises(ConfigError, match=rf"{shard(directory).name}: it is missing"):
        read(directory)
    examples = read(directory, skip_damaged=TRAIN)
    assert "It is missing. Left out: 50 of 50 records." in examples.notes[-1]
    assert count(examples) == TRAIN - 50


def test_a_file_of_another_conversion_is_named(directory, tmp_path):
    compression = "GZIP" if is_compressed(directory) else ""
    convert(some_digits(seed=1), tmp_path / "other", shards=SHARDS, compression=compression)
    shutil.copy(shard(tmp_path / "other"), shard(directory))
    for options in ({}, {"check": "checksum"}, {"skip_damaged": 1000}):
        with pytest.raises(ConfigError, match="others than were written"):
            read(directory, **options)


def test_a_directory_that_is_no_conversion(tmp_path):
    with pytest.raises(ConfigError, match=r"has no schema.json"):
        read(tmp_path)
    with pytest.raises(ConfigError, match=r"which does not exist. Correct the path"):
        read(tmp_path / "missing")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], "A schema must be a file that tfopt.data.convert wrote"),
        (lambda text: text.replace('"outputs": 10', '"outputs": 11'), "its checksum does not match"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "with version 2"),
        (lambda text: "[]", "A schema must be a file"),
        (lambda text: "", "A schema must be a file"),
    ],
)
def test_a_damaged_schema_is_named(directory, change, words):
    schema = directory / "schema.json"
    schema.write_text(change(schema.read_text()))
    with pytest.raises(ConfigError) as caught:
        read(directory)
    assert words in str(caught.value)
    assert str(schema) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"check": "sizes"}, "Did you mean 'size'"),
        ({"skip_damaged": -1}, "skip_damaged=-1"),
        ({"files_at_a_time": 0}, "files_at_a_time=0"),
        ({"image_size": 8}, "image_size|size=(8, 8)"),
        ({"dtype": "uint8"}, "dtype='uint8'"),
    ],
)
def test_wrong_settings(converted, options, words):
    with pytest.raises(ConfigError) as caught:
        tfrecord(directory=converted, **options)
    assert any(each in str(caught.value) for each in words.split("|"))


def photo_folder(root, masks=False):
    """Photos as files, and a source of their names, as image_folder gives them."""
    photo = Image.fromarray(load_sample_image("china.jpg"))
    names = []
    for i in range(6):
        name = f"{i % 2}/{i}.jpg"
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        photo.crop((i, i, i + 120, i + 90)).save(path, quality=90)
        Image.fromarray(np.asarray(photo.crop((i, i, i + 120, i + 90)).convert("L")) // 64).save(
            path.with_suffix(".png")
        )
        names.append(str(path))
    targets = [name.replace(".jpg", ".png") for name in names] if masks else np.arange(6) % 2
    dataset = tf.data.Dataset.from_tensor_slices((names, targets))

    def stored(path, target):
        name = tf.strings.substr(path, len(str(root)) + 1, -1)
        return name, tf.io.read_file(path), tf.io.read_file(target) if masks else target

    def decode(path, target):
        image = tf.cast(decode_image(tf.io.read_file(path), path, (32, 40)), tf.float32) / 255
        if not masks:
            return image, target
        mask = tf.image.resize(tf.io.decode_png(tf.io.read_file(target), 1), (32, 40), method="nearest")
        return image, tf.cast(mask[..., 0], tf.int32)

    content = Stored(
        read=stored, inputs=EncodedImage(size=(32, 40)), targets=EncodedMask(size=(32, 40)) if masks else None
    )
    return Examples(name="photos", train=dataset, test=dataset, outputs=4, decode=decode, stored=content)


@pytest.mark.parametrize("masks", [pytest.param(False, marks=pytest.mark.slow), True])
def test_images_stay_encoded_and_need_their_folder_no_more(tmp_path, masks):
    source = photo_folder(tmp_path / "photos", masks)
    expected = source.arrays("train")
    size = sum(path.stat().st_size for path in (tmp_path / "photos").rglob("*" if masks else "*.jpg") if path.is_file())
    report = convert(source, tmp_path / "records")
    assert 2 * size < report.bytes < 2 * size + 12 * 200
    shutil.rmtree(tmp_path / "photos")
    for ours, theirs in zip(tfrecord(directory=tmp_path / "records").arrays("train"), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    other = tfrecord(directory=tmp_path / "records", image_size=24, dtype="uint8", exact=True)
    assert other.x_train.shape == (6, 24, 24, 3)
    assert other.x_train.dtype == np.uint8
    assert other.y_train.shape == ((6, 24, 24) if masks else (6,))
    convert(other, tmp_path / "again")  # still encoded
    assert sum(path.stat().st_size for path in (tmp_path / "again").glob("*.tfrecord")) == report.bytes


@pytest.mark.slow
def test_images_may_be_stored_as_pixels(tmp_path):
    source = photo_folder(tmp_path / "photos")
    report = convert(source, tmp_path / "records", images="pixels")
    read = tfrecord(directory=tmp_path / "records")
    assert 12 * 32 * 40 * 3 < report.bytes < 12 * (32 * 40 * 3 + 200)
    np.testing.assert_array_equal(read.x_train, source.x_train)
    np.testing.assert_array_equal(read.y_train, source.y_train)
    np.testing.assert_array_equal(
        tfrecord(directory=tmp_path / "records", dtype="uint8").x_train, np.round(read.x_train * 255)
    )
    with pytest.raises(ConfigError, match=r"size=\(8, 8\), but the examples are stored as arrays"):
        tfrecord(directory=tmp_path / "records", image_size=8)
    for arrays in (read, some_digits()):
        with pytest.raises(ConfigError, match="images='pixels' needs a source of encoded images"):
            convert(arrays, tmp_path / "other", images="pixels")


@pytest.mark.slow
def test_images_may_be_stored_as_small_jpegs(tmp_path):
    source = photo_folder(tmp_path / "photos")
    convert(source, tmp_path / "records", images="jpeg")
    read = tfrecord(directory=tmp_path / "records")
    assert read.x_train.shape == source.x_train.shape
    errors = 255 * np.abs(read.x_train - source.x_train)
    assert 0 < errors.mean() < 12  # the photos of the test are noise, the worst case for a JPEG
    np.testing.assert_array_equal(read.y_train, source.y_train)
    half = tfrecord(directory=tmp_path / "records", image_size=(16, 20))
    assert half.x_train.shape == (len(read.x_train), 16, 20, 3)
    with pytest.raises(ConfigError, match=r"Unknown images 'jpg'.*Did you mean 'jpeg'"):
        convert(source, tmp_path / "other", images="jpg")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["missing", "zero bytes", "cut off", "flipped"])
def test_an_unreadable_image_is_named_when_it_is_written(tmp_path, kind):
    source = photo_folder(tmp_path / "photos")
    path = tmp_path / "photos/1/3.jpg"
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    else:
        # The second byte of the frame header's length: the decoder alone finds that.
        start = content.index(b"\xff\xc0")
        broken = {
            "zero bytes": b"",
            "cut off": content[:500],
            "flipped": content[: start + 3] + b"\0" + content[start + 4 :],
        }
        path.write_bytes(broken[kind])
    with pytest.raises(ConfigError) as caught:
        convert(source, tmp_path / "records", shards=1)
    assert "record 3 of the train part" in str(caught.value)
    assert str(path) in str(caught.value)
    assert "Iterator::" not in str(caught.value)


def test_a_damaged_image_in_the_records_is_named(tmp_path):
    source = photo_folder(tmp_path / "photos")
    (tmp_path / "photos/1/3.jpg").write_bytes(b"\xff\xd8\xff and no image at all.......")
    convert(source, tmp_path / "records", check=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"cut off.*1/3.jpg"):
        count(tfrecord(directory=tmp_path / "records"))


def test_files_of_other_programs(tmp_path):
    def jpeg(value):
        file = io.BytesIO()
        Image.new("L", (8, 8), value).save(file, "PNG")
        return file.getvalue()

    for i in range(3):
        with tf.io.TFRecordWriter(str(tmp_path / f"part-{i}.tfrecord")) as writer:
            for j in range(5):
                feature = {
                    "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[jpeg(5 * i + j)])),
                    "image/class": tf.train.Feature(int64_list=tf.train.Int64List(value=[5 * i + j])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    layout = {
        "image/encoded": tf.io.FixedLenFeature((), tf.string),
        "image/class": tf.io.FixedLenFeature((), tf.int64),
    }

    def decode(record):
        parsed = tf.io.parse_single_example(record, layout)
        return decode_image(parsed["image/encoded"], "", (8, 8), 1), parsed["image/class"]

    options = {"test": [tmp_path / "part-0.tfrecord"], "decode": decode, "outputs": 15, "files_at_a_time": 1}
    examples = tfrecord_files(train=f"{tmp_path}/part-*", **options)
    assert (examples.size("train"), examples.size("test")) == (15, 5)
    assert examples.y_train.tolist() == list(range(15))
    assert examples.x_train[:, 0, 0, 0].tolist() == list(range(15))
    convert(examples, tmp_path / "mine", shards=1, compression="GZIP")
    with pytest.raises(ConfigError, match="matches none"):
        tfrecord_files(train=f"{tmp_path}/other-*", **options)
    path = tmp_path / "part-1.tfrecord"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ConfigError, match=r"part-1.tfrecord: it is cut off or damaged at record 4"):
        tfrecord_files(train=f"{tmp_path}/part-*", **options)
    partly = partial(
        tfrecord_files,
        **options
        | {
            "train": f"{tmp_path}/mine/train*",
            "test": f"{tmp_path}/mine/test*",
            "decode": lambda record: (record, 0),
        },
    )
    assert partly(compression="GZIP").size("train") == 15
    with pytest.raises(ConfigError, match="compression"):
        partly()


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A file of 300 records for each compression, with numbers that do not compress."""
    root = tmp_path_factory.mktemp("numbers")
    for compression in ("", "GZIP", "ZLIB"):
        with tf.io.TFRecordWriter(str(root / f"whole{compression}"), compression) as writer:
            for number in range(300):
                writer.write(np.random.default_rng(number).bytes(200))
    return root


def half(content):
    return content[: len(content) // 2 + 3]


def changed(place):
    def change(content):
        place_in_file = place if place < 0 else len(content) // place
        return content[:place_in_file] + bytes([content[place_in_file] ^ 1]) + content[place_in_file + 1 :]

    return change


@pytest.mark.one_in(2)
@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_no_record_of_a_damaged_file_is_lost_without_a_word(numbers, compression, tmp_path):
    whole, path = (numbers / f"whole{compression}").read_bytes(), tmp_path / "part"
    read = partial(
        tfrecord_files, test=numbers / "whole", decode=lambda record: (record, 0), outputs=2, compression=compression
    )
    damages = {
        "half": half(whole),
        "without its last byte": whole[:-1],
        "without its end marker": whole[:-8],
        "garbage": whole + b"garbage",
        "text": b"no records at all\n" * 20,
        "another compression": (numbers / ("whole" if compression else "wholeGZIP")).read_bytes(),
        "empty": b"",
    }
    if compression:  # TensorFlow finds the others by the checksum of a record, while it reads
        damages |= {"changed": changed(2)(whole), "changed at the end": changed(-3)(whole)}
    for damage, content in damages.items():
        path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            read(train=path, test=numbers / f"whole{compression}")
        assert str(path) in str(caught.value), damage
    assert "compression" in str(caught.value) or not compression
    path.write_bytes(whole)
    examples = read(train=path, test=path)
    assert examples.size("train") == count(examples) == 300
    for damage in (half, changed(2)):
        path.write_bytes(damage(whole))
        with pytest.raises(tf.errors.InvalidArgumentError, match=str(path)):
            count(examples)


def test_files_without_records_are_noted(numbers, tmp_path):
    shutil.copy(numbers / "whole", tmp_path / "part-0")
    (tmp_path / "part-1").touch()
    options = {"decode": lambda record: (record, 0), "outputs": 2}
    examples = tfrecord_files(train=f"{tmp_path}/part-*", test=numbers / "whole", **options)
    assert f"Files without records in the train part: 1 of 2: {tmp_path}/part-1." in examples.notes
    assert count(examples) == 300
    with pytest.raises(ConfigError, match=r"Unknown compression 'gzip'"):
        tfrecord_files(train=numbers / "whole", test=numbers / "whole", compression="gzip", **options)
