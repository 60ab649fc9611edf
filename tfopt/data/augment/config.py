"""Settings of augmentation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from tfopt.errors import ConfigError
from tfopt.settings.validation import Remedy, check_fields

Fraction = Annotated[float, Ge(0), Le(1), Remedy("It is a fraction; 0 is off.")]
Area = Annotated[float, Gt(0), Le(1)]
Aspect = Annotated[float, Gt(0), Lt(math.inf)]
Alpha = Annotated[float, Ge(0), Lt(math.inf), Remedy("0 is off; 0.2 is usual for mixup, 1 for cutmix.")]


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Settings of augmentation: random changes of the images of a batch. All are off by default.

    Each image has its own random numbers, drawn evenly from the given range. Masks follow every geometric change.

    Raises:
        ConfigError: A value is out of range, or two settings exclude each other.
    Example:
        >>> AugmentConfig(crop=4, flip="horizontal").is_off
        False
    """

    crop: Annotated[int, Ge(0)] = 0
    """Padding of each side in pixels, before a random crop to the size of the image. 0 is off."""
    crop_scale: Annotated[tuple[Area, Area] | None, Remedy("It is a share of the area; (0.08, 1) is usual.")] = None
    """Smallest and largest share of the area that a random box has, which is resized to the size of the image (random
    resized crop). None is off."""
    crop_ratio: Annotated[tuple[Aspect, Aspect], Remedy("It is width over height; (3/4, 4/3) is usual.")] = (
        3 / 4,
        4 / 3,
    )
    """Smallest and largest aspect ratio (width over height) of the box of crop_scale."""
    flip: Literal["horizontal", "vertical", "both"] | None = None
    """Direction in which half of the images are mirrored. both draws for each direction."""
    rotation_degrees: Annotated[float, Ge(0), Le(180)] = 0.0
    """Largest rotation about the centre, in degrees, in both directions. 0 is off."""
    zoom: Annotated[float, Ge(0), Lt(1), Remedy("It is a fraction; 0 is off.")] = 0.0
    """Largest change of the size of the content, as a fraction: 0.2 is from 80% to 120%. 0 is off."""
    translation: Fraction = 0.0
    """Largest shift in each direction, as a fraction of the height and of the width. 0 is off."""
    shear_degrees: Annotated[float, Ge(0), Le(60)] = 0.0
    """Largest angle by which the vertical lines lean, in degrees, in both directions. 0 is off."""
    fill_mode: Literal["constant", "reflect", "nearest", "wrap"] = "constant"
    """Content of the free border: constant (fill_value), reflect (the image mirrored at its edge), nearest (the pixels
    of the edge) or wrap (the image repeated)."""
    fill_value: Annotated[float, Ge(0), Le(1)] = 0.0
    """Value of the free border for fill_mode constant: 0 is black, 1 is white."""
    brightness: Fraction = 0.0
    """Largest change of the brightness, as a fraction of the range of values. 0 is off."""
    contrast: Fraction = 0.0
    """Largest change of the contrast, as a fraction: 0.2 is from 80% to 120%. 0 is off."""
    saturation: Fraction = 0.0
    """Largest change of the saturation, as a fraction: 0.2 is from 80% to 120%. 0 is off."""
    hue: Annotated[float, Ge(0), Le(0.5), Remedy("It is a fraction of a full turn; 0 is off.")] = 0.0
    """Largest rotation of the hue, as a fraction of a full turn, in both directions. 0 is off."""
    cutout: Annotated[float, Ge(0), Lt(math.inf)] = 0.0
    """Side of a square that is filled with grey, at a random place of each image: pixels, or below 1 a fraction of the
    shorter side. 0 is off."""
    mixup: Alpha = 0.0
    """Alpha of mixup, which averages two images and their targets. The weight is drawn from Beta(alpha, alpha). 0 is
    off."""
    cutmix: Alpha = 0.0
    """Alpha of cutmix, which pastes a rectangle of another image. The share of the area is drawn from Beta(alpha,
    alpha). 0 is off. With mixup and cutmix, each batch has one of the two."""
    rand_augment: Annotated[int, Ge(0)] = 0
    """Number of operations that RandAugment applies to each image, one after the other. 0 is off."""
    rand_augment_magnitude: Annotated[float, Ge(0), Le(10)] = 9.0
    """Strength of RandAugment's operations, from 0 to 10."""
    aug_mix: Annotated[float, Ge(0), Le(10)] = 0.0
    """Strength of AugMix's operations, from 0 to 10; 3 is usual. AugMix averages an image with three changed copies.
    0 is off."""
    where: Literal["auto", "host", "device"] = "auto"
    """Place of the augmentation: host (the tf.data pipeline), device (the training step) or auto."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("crop_scale", "crop_ratio"):
            limits = getattr(self, name)
            if limits is not None and limits[0] > limits[1]:
                raise ConfigError(
                    f"{name} must be (smallest, largest). Received: {name}={limits}. Exchange the two numbers."
                )
        if self.crop and self.crop_scale is not None:
            raise ConfigError(
                "crop must be 0 with crop_scale: both cut a random part out of the image. Received: "
                f"crop={self.crop} and crop_scale={self.crop_scale}. Set crop to 0, or leave crop_scale out."
            )
        if self.fill_value and self.fill_mode != "constant":
            raise ConfigError(
                f"fill_value must be 0 unless fill_mode is 'constant'. Received: fill_value={self.fill_value} and "
                f"fill_mode={self.fill_mode!r}. Leave out one of the two."
            )
        if self.cutout > 1 and not float(self.cutout).is_integer():
            raise ConfigError(
                "cutout must be a whole number of pixels, or a fraction below 1. Received: "
                f"cutout={self.cutout}. Use {round(self.cutout)}."
            )
        if self.rand_augment and self.aug_mix:
            raise ConfigError(
                "rand_augment and aug_mix must not both be on: both choose among the same operations. Received: "
                f"rand_augment={self.rand_augment} and aug_mix={self.aug_mix}. Set one of them to 0."
            )

    @property
    def is_off(self) -> bool:
        """Whether examples stay as they are."""
        return not (
            self.is_geometric or self.is_colour or self.mixes_examples or self.cutout or self.chooses_operations
        )

    @property
    def is_geometric(self) -> bool:
        """Whether pixels move: crop, resized crop, flip, rotation, zoom, translation or shear."""
        return bool(self.crop_scale or self.crop or self.flip or self.is_projective)

    @property
    def copies_pixels(self) -> bool:
        """Whether pixels are only moved by whole numbers, and filled with zeros, which suits any dtype."""
        others = (
            self.crop_scale
            or self.is_projective
            or self.is_colour
            or self.mixes_examples
            or self.cutout
            or self.chooses_operations
        )
        return not others and not self.fill_value

    @property
    def is_projective(self) -> bool:
        """Whether pixels move to places between pixels, which needs interpolation."""
        return bool(self.rotation_degrees or self.zoom or self.translation or self.shear_degrees)

    @property
    def is_colour(self) -> bool:
        """Whether brightness, contrast, saturation or hue change."""
        return bool(self.brightness or self.contrast or self.saturation or self.hue)

    @property
    def mixes_examples(self) -> bool:
        """Whether an example gets parts of another one: mixup or cutmix. Its target is then a share of each class."""
        return bool(self.mixup or self.cutmix)

    @property
    def chooses_operations(self) -> bool:
        """Whether operations are chosen at random for each image: RandAugment or AugMix."""
        return bool(self.rand_augment or self.aug_mix)
