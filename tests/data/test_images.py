"""Encoded images of every kind against Pillow, and files that are damaged or that TensorFlow cannot decode."""

import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from sklearn.datasets import load_sample_image

from tfopt.data.images import central_box, decode_image

PHOTO = Image.fromarray(load_sample_image("china.jpg")).crop((100, 100, 333, 301))
GREY, PALETTE = PHOTO.convert("L"), PHOTO.convert("P")
TRANSPARENT = PHOTO.convert("RGBA")
TRANSPARENT.putalpha(GREY.point(lambda value: value // 2))


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


FRAMES = {"save_all": True, "append_images": [Image.new("RGB", PHOTO.size)] * 2}
WHOLE = {
    "jpeg": encoded(PHOTO, "JPEG"),
    "grey_jpeg": encoded(GREY, "JPEG"),
    "cmyk_jpeg": encoded(PHOTO.convert("CMYK"), "JPEG"),
    "progressive_jpeg": encoded(PHOTO, "JPEG", progressive=True),
    "jpeg_with_data_behind": encoded(PHOTO, "JPEG") + b"data",
    "png": encoded(PHOTO, "PNG"),
    "grey_png": encoded(GREY, "PNG"),
    "png_with_alpha": encoded(PHOTO.convert("RGBA"), "PNG"),
    "grey_png_with_alpha": encoded(GREY.convert("LA"), "PNG"),
    "png_with_palette": encoded(PALETTE, "PNG"),
    "png_with_data_behind": encoded(PHOTO, "PNG") + b"data",
    "gif": encoded(PHOTO, "GIF"),
    "animated_gif": encoded(PHOTO, "GIF", **FRAMES),
    "bmp": encoded(PHOTO, "BMP"),
    "grey_bmp": encoded(GREY, "BMP"),
    "bmp_with_palette": encoded(PALETTE, "BMP"),
    "bmp_with_alpha": encoded(PHOTO.convert("RGBA"), "BMP"),
    "webp": encoded(PHOTO, "WEBP"),
    "webp_with_alpha": encoded(PHOTO.convert("RGBA"), "WEBP", lossless=True),
    "transparent_webp": encoded(TRANSPARENT, "WEBP", lossless=True, exact=True),
}
BROKEN = {
    "zero_bytes": (b"", "too short"),
    "text": (b"This is a file of text and not an image.", "starts like none"),
    "tiff": (encoded(PHOTO, "TIFF"), "starts like none"),
    "black_and_white_bmp": (encoded(PHOTO.convert("1"), "BMP"), "fewer than 8 bits"),
    "animated_webp": (encoded(PHOTO, "WEBP", **FRAMES), "an animated WebP"),
    **{f"half_a_{kind}": (WHOLE[kind][: len(WHOLE[kind]) // 2], "cut off") for kind in ("jpeg", "png", "bmp", "webp")},
}


def in_tf_data(contents, **options):
    dataset = tf.data.Dataset.from_tensor_slices(contents)
    return list(dataset.map(lambda content: decode_image(content, "a/b.jpg", **options)).as_numpy_iterator())


@pytest.mark.parametrize("channels", [1, 3])
def test_every_kind_of_file_gives_the_pixels_of_pillow(channels):
    for (kind, content), pixels in zip(
        WHOLE.items(), in_tf_data(list(WHOLE.values()), channels=channels, exact=True), strict=True
    ):
        image = Image.open(io.BytesIO(content)).convert("RGB" if channels == 3 else "L")
        expected = np.asarray(image, int).reshape(pixels.shape)
        assert pixels.dtype == np.uint8
        differences = np.abs(expected - pixels)
        # Decoders of JPEG may round; grey of a colour JPEG is its brightness channel, which Pillow computes back.
        assert differences.max() <= (16 if "jpeg" in kind else 1), kind
        assert differences.mean() <= 1, kind


def test_the_exact_way_is_that_of_keras():
    content = WHOLE["jpeg"]
    keras = tf.image.resize(tf.io.decode_image(content, channels=3, expand_animations=False), (64, 48))
    ours = decode_image(content, "", (64, 48), exact=True)
    np.testing.assert_array_equal(ours, np.round(keras.numpy()).astype("uint8"))


@pytest.mark.parametrize(("size", "ratio"), [((101, 117), 2), ((102, 117), 1), ((40, 40), 4), ((20, 20), 8)])
def test_a_large_jpeg_is_decoded_at_a_smaller_size(size, ratio):
    fast = decode_image(WHOLE["jpeg"], "", size).numpy()
    smaller = tf.io.decode_jpeg(WHOLE["jpeg"], 3, ratio=ratio, dct_method="INTEGER_FAST", fancy_upscaling=False)
    np.testing.assert_array_equal(fast, np.round(tf.image.resize(smaller, size)).astype("uint8"))
    averaged = np.asarray(PHOTO.resize(size[::-1], Image.Resampling.BOX), int)
    skipping = decode_image(WHOLE["jpeg"], "", size, exact=True).numpy()
    if ratio > 2:  # nearer to the mean over all pixels than bilinear resizing, which looks at four of them
        assert np.abs(fast - averaged).mean() < np.abs(skipping - averaged).mean()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", BROKEN)
def test_an_unusable_file_is_named(kind):
    content, words = BROKEN[kind]
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        in_tf_data([content], size=(8, 8))
    assert words in str(caught.value)
    assert "a/b.jpg" in str(caught.value)


@pytest.mark.parametrize("kind", ["jpeg", "png", "gif", "bmp", "webp"])
def test_no_damage_crashes(kind):
    """Cut off anywhere, or with any byte changed: pixels or an error."""
    random = np.random.default_rng(0)
    content = encoded(PHOTO.resize((40, 30)), kind.upper())
    for _ in range(12):
        damaged = bytearray(content)
        damaged[random.integers(len(content))] ^= 1 << random.integers(8)
        for each in (bytes(damaged), content[: random.integers(len(content))]):
            try:
                assert decode_image(each, "name", (8, 8)).shape == (8, 8, 3)
            except tf.errors.OpError as error:
                assert error.message  # noqa: PT017 (either is right)


@pytest.mark.parametrize("kind", ["jpeg", "png"])
@pytest.mark.parametrize(("size", "share"), [((40, 40), 0.875), ((30, 60), 1.0), ((90, 20), 0.5)])
def test_a_central_crop_is_the_centre_of_the_image_with_its_aspect_ratio(kind, size, share):
    pixels = tf.constant(np.asarray(PHOTO))
    content = tf.io.encode_png(pixels) if kind == "png" else tf.io.encode_jpeg(pixels, quality=100)
    height, width = pixels.shape[:2]
    scale = share * min(height / size[0], width / size[1])
    h, w = round(scale * size[0]), round(scale * size[1])
    top, left = (height - h) // 2, (width - w) // 2
    decoded = tf.io.decode_image(content).numpy()
    wanted = np.round(tf.image.resize(decoded[top : top + h, left : left + w], size))
    found = decode_image(content, "photo", size, exact=True, box=central_box(share, size))
    np.testing.assert_allclose(tf.cast(found, tf.float32), wanted, atol=1)
    if kind == "jpeg":
        # A large one is decoded at a smaller size, whose pixels are means. The box moves by less than one of them.
        means = tf.image.resize(decoded[top : top + h, left : left + w], size, "area")
        faster = tf.cast(decode_image(content, "photo", size, box=central_box(share, size)), tf.float32)
        assert np.corrcoef(np.ravel(faster), np.ravel(means))[0, 1] > 0.85
