"""The features of data set hubs as inputs and targets: images, text, classes and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tfopt.data.arguments import height_and_width
from tfopt.data.finite import narrowed
from tfopt.data.stored import EncodedImage
from tfopt.errors import ConfigError


@dataclass(frozen=True)
class Feature:
    """A feature of a data set of a hub: an encoded image, a string, a class number, or numbers of any shape.

    `shape` is that of an image or of values; None at an open size.
    """

    name: str
    kind: Literal["image", "text", "class", "values"]
    shape: tuple[int | None, ...] = ()
    class_names: tuple[str, ...] = ()


def named_feature(features: Sequence[str], name: str | None, usual: Sequence[str], argument: str) -> str:
    """Returns the name of a feature, or the first usual name that the data set has.

    Example:
        >>> named_feature(["img", "label"], None, ["image", "img"], "inputs")
        'img'
    """
    found = [each for each in (usual if name is None else [name]) if each in features]
    if not found:
        raise ConfigError(
            f"{argument} must name a feature of the data set. Received: {argument}={name!r}; its features are "
            f"{', '.join(map(repr, features))}."
        )
    return found[0]


def decoder(
    inputs: Feature,
    targets: Feature,
    image_size: int | Sequence[int] | None,
    length: int,
    central_crop: float | None = None,
) -> Callable[[Any, Any], Any]:
    """Returns the function from a record (inputs, targets) of a hub to an example. A text becomes `length` bytes.

    For images the function has the argument `box`, see `tfopt.data.Examples.decodes_boxes`.

    Raises:
        ConfigError: A model cannot have these kinds, or the images have no fixed size and `image_size` is None.
    """
    if inputs.kind == "class":
        raise ConfigError(
            f"inputs must name images, text or numbers. Received: inputs={inputs.name!r}, a class. "
            "Name another feature."
        )
    if targets.kind not in ("class", "values"):
        raise ConfigError(
            f"targets must name classes or numbers. Received: targets={targets.name!r}, {targets.kind}. Name another "
            "feature."
        )
    image: EncodedImage | None = None
    if inputs.kind == "image":
        size, channels = _image_shape(inputs, image_size)
        image = EncodedImage(size=size, channels=channels, central_crop=central_crop)

    import tensorflow as tf

    def decode(value: Any, target: Any, *, box: Any = None) -> Any:
        if image is not None:
            value = image(value, f"a record of {inputs.name}", box)
        elif inputs.kind == "text":
            value = tf.cast(tf.io.decode_raw(value, tf.uint8, fixed_length=length), tf.int32)
            value = tf.ensure_shape(value, (length,))
        else:
            value = tf.ensure_shape(narrowed(value), inputs.shape)
        if targets.kind == "class":
            number, classes = tf.cast(target, tf.int32), len(targets.class_names)
            rule = f"The class numbers in {targets.name!r} must be from 0 to {classes - 1}. Leave out the others."
            # Some data sets have -1 where the class of an example is not known.
            known = tf.debugging.Assert((number >= 0) & (number < classes), [f"{rule} Received:", number])
            with tf.control_dependencies([known]):
                return value, tf.ensure_shape(tf.identity(number), ())
        return value, tf.ensure_shape(tf.cast(target, tf.float32), targets.shape)

    return decode


def outputs_of(targets: Feature) -> int:
    """Returns the number of outputs of a model for targets."""
    return len(targets.class_names) or int((targets.shape or (1,))[-1] or 1)


def _image_shape(feature: Feature, image_size: int | Sequence[int] | None) -> tuple[tuple[int, int], int]:
    height, width, channels = (*feature.shape, None, None, None)[:3]
    if image_size is not None:
        height, width = height_and_width(image_size)
    if height is None or width is None:
        raise ConfigError(
            f"image_size must be given, because the images of {feature.name!r} differ in size. Received: "
            "image_size=None. 224 is usual."
        )
    return (height, width), 1 if channels == 1 else 3
