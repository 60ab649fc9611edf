"""How an example is stored in place of a record that names a file: the content of the file, and its decoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tfopt.errors import ConfigError

if TYPE_CHECKING:
    import tensorflow as tf

    from tfopt.data.images import Box

JPEG_QUALITY = 95


@dataclass(frozen=True, kw_only=True)
class EncodedImage:
    """Decodes the content of an image file to float32 [height, width, channels] in [0, 1].

    Attributes:
        size: (height, width) of the result.
        channels: 3 for colour, 1 for grey.
        exact: Whether to decode JPEGs exactly as Keras does, see `tfopt.data.images.decode_image`.
        dtype: "float32" gives values in [0, 1]. "uint8" gives pixels in 0 to 255, a quarter of the bytes.
        only_jpegs: Whether all files are JPEGs with no other data behind them. They are decoded faster then, see
            `tfopt.data.images.decode_jpeg`.
        stored_size: (height, width) of all images in the files, if they are known to be equal. None if not.
        central_crop: Share of the largest centred part with the aspect ratio of `size`, which alone is resized. None
            resizes the whole image. A `box` in a call comes before it, see `tfopt.data.images.decode_image`.
    """

    kind: ClassVar[str] = "image"
    size: tuple[int, int]
    channels: int = 3
    exact: bool = False
    dtype: str = "float32"
    only_jpegs: bool = False
    stored_size: tuple[int, int] | None = None
    central_crop: float | None = None

    def __call__(self, content: Any, name: Any, box: Box | None = None) -> tf.Tensor:
        pixels = self.pixels(content, name, box)
        return pixels if self.dtype == "uint8" else Scaled(divisor=255)(pixels, name)

    def pixels(self, content: Any, name: Any, box: Box | None = None) -> tf.Tensor:
        """Returns the image as uint8 [height, width, channels]."""
        import tensorflow as tf

        from tfopt.data.images import central_box, decode_image, decode_jpeg

        decode = decode_jpeg if self.only_jpegs else decode_image
        if box is None and self.central_crop is not None:
            box = central_box(self.central_crop, self.size)
        if box is None and self.stored_size == self.size:  # nothing to resize
            return tf.ensure_shape(decode(content, name, None, self.channels, exact=self.exact), (*self.size, None))
        return decode(content, name, self.size, self.channels, exact=self.exact, box=box)


@dataclass(frozen=True, kw_only=True)
class EncodedMask:
    """Decodes a grey PNG of class numbers to int32 `size`, (height, width). Resizing takes the nearest pixel."""

    kind: ClassVar[str] = "mask"
    size: tuple[int, int]

    def __call__(self, content: Any, name: Any) -> tf.Tensor:
        import tensorflow as tf

        mask = tf.image.resize(tf.io.decode_png(content, channels=1), self.size, method="nearest")
        return tf.cast(mask[..., 0], tf.int32)


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Divides whole numbers, such as uint8 pixels, by `divisor`; the result is float32."""

    kind: ClassVar[str] = "scaled"
    divisor: float = 255.0

    def __call__(self, value: Any, name: Any) -> tf.Tensor:
        import tensorflow as tf

        return tf.cast(value, tf.float32) / self.divisor


Decoder = EncodedImage | EncodedMask | Scaled
DECODERS: dict[str, type[Decoder]] = {each.kind: each for each in (EncodedImage, EncodedMask, Scaled)}
STORED = ("name", "inputs", "targets", "weight")
"""What `Stored.read` returns; the last one may be missing."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What `convert` stores in place of a record, and how an example is made of it.

    A source whose records name a file has this, because the files of `convert` must not depend on other files. So has
    a source whose records are smaller than its examples. `decode` of the source and the decoders here must give the
    same example.

    Attributes:
        read: Function in TensorFlow from a record (one argument for each component) to (name, inputs, targets[,
            weight]). The name is a string for error messages. Inputs or targets may be encoded.
        inputs: Decoder of the inputs. None means that they are stored as they are.
        targets: Decoder of the targets.
    """

    read: Callable[..., Any]
    inputs: Decoder | None = None
    targets: Decoder | None = None

    def decode(self, name: Any, inputs: Any, targets: Any, *, box: Box | None = None, **weight: Any) -> tuple[Any, ...]:
        """Returns the example of what `read` returned. A box takes a part of an encoded image."""
        options = {} if box is None else {"box": box}
        decoded = inputs if self.inputs is None else self.inputs(inputs, name, **options)
        return decoded, targets if self.targets is None else self.targets(targets, name), *weight.values()

    def with_images(self, kind: Literal["jpeg", "pixels"]) -> Stored:
        """Returns how to store resized images in place of the content of their files.

        Args:
            kind: "pixels" stores uint8 pixels, which give the same examples. "jpeg" stores a JPEG of high quality.
        Raises:
            ConfigError: The inputs are no encoded images.
        """
        import tensorflow as tf

        image = self.inputs
        if not isinstance(image, EncodedImage):
            raise no_encoded_images(kind, "a source whose inputs are stored as arrays")
        decoder: Decoder | None = None if image.dtype == "uint8" else Scaled(divisor=255)
        if kind == "jpeg":
            decoder = replace(image, exact=False, only_jpegs=True, stored_size=image.size, central_crop=None)

        def read(*record: Any) -> tuple[Any, ...]:
            name, inputs, *others = self.read(*record)
            pixels = image.pixels(inputs, name)
            return name, pixels if kind == "pixels" else tf.io.encode_jpeg(pixels, quality=JPEG_QUALITY), *others

        return Stored(read=read, inputs=decoder, targets=self.targets)


def no_encoded_images(kind: str, received: str) -> ConfigError:
    """Returns the error for a source without encoded images."""
    return ConfigError(
        f"images={kind!r} needs a source of encoded images. Received: {received}. Leave images out; arrays are stored "
        "as they are."
    )


def decoder_to_json(decoder: Decoder | None) -> dict[str, Any] | None:
    """Returns a decoder in terms of JSON.

    Example:
        >>> decoder_to_json(EncodedMask(size=(8, 8)))
        {'kind': 'mask', 'size': (8, 8)}
    """
    if decoder is None:
        return None
    settings = {"kind": decoder.kind, **asdict(decoder)}
    if settings.get("central_crop", 0) is None:  # schemas written before this setting do not have it
        del settings["central_crop"]
    return settings


def decoder_of_json(settings: dict[str, Any] | None) -> Decoder | None:
    """Returns the decoder of `decoder_to_json`. Raises ConfigError if this version of tfopt has no such decoder."""
    if settings is None:
        return None
    arguments: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    try:
        return DECODERS[arguments.pop("kind")](**arguments)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"The decoder of a schema must be one that this version of tfopt knows. Received: {settings}. "
            "Update tfopt, or convert the examples again."
        ) from error
