"""Augmentation of a batch of examples, which depends on the batch and a seed only.

Images may be uint8 from 0 to 255, or floating-point numbers from 0 to 1; the dtype decides. They keep their dtype.
Values are computed in float32 and rounded once after each of these stages:

    resized crop -> crop, flip, rotation, zoom, translation, shear -> RandAugment or AugMix -> colours -> cutout
    -> mixup, cutmix
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tfopt.data.augment.config import AugmentConfig
from tfopt.data.augment.geometry import Moves, crop_and_flip, draw_moves, project, transforms
from tfopt.data.augment.mixing import cut_out, draw_cutout, draw_mixture, mix_images, mix_targets, paste
from tfopt.data.augment.pixels import change_colours, largest
from tfopt.data.augment.rand_augment import aug_mix, rand_augment
from tfopt.data.augment.resized_crop import draw_boxes, resized_crop
from tfopt.errors import ConfigError, warn
from tfopt.settings.validation import check_type

# Each stage has random numbers of its own, so that a change of one setting leaves the other stages as they are.
STAGES = GEOMETRY, OPERATIONS, COLOURS, CUTOUT, MIXTURE, RESIZED_CROP = range(6)

# Usual numbers of channels: grey, colours, colours with transparency.
CHANNELS = (1, 3, 4)
# Resizing may overshoot the range of floating-point images by this much. Other ranges (-1 to 1, 0 to 255) exceed it.
OVERSHOOT = 0.25
# Names in the targets of an example that brings along what a teacher has computed for it as it is.
LABELS, OF_TEACHER = "labels", "teacher_outputs"


class Augmentation:
    """Changes a batch of examples at random: the same batch and the same seed give the same result.

    It works eagerly, inside tf.data and inside a training step. All images of an example get the same change.

    Args:
        config: What is changed, and how much.
        outputs: Number of classes. Mixup and cutmix need it for targets that are class numbers.
        masks: Whether targets are masks of class numbers, which follow each geometric change.
        ignored_target: Class number of the pixels of a mask that are not part of the image. None makes them class 0.
        on_gpu: Whether the batch is on a GPU, where the crop has another form with the same result.
    Raises:
        ConfigError: A setting has no meaning for masks.
    Example:
        >>> augmentation = Augmentation(AugmentConfig(crop=1, mixup=0.2), outputs=10)
        >>> images, labels = augmentation((tf.zeros((4, 8, 8, 3)), tf.constant([1, 2, 3, 4])), seed=(0, 1))
        >>> images.shape.as_list(), labels.shape.as_list()
        ([4, 8, 8, 3], [4, 10])
    """

    # A batch is changed as a whole, which is faster than one example at a time.
    per_example = None

    def __init__(
        self,
        config: AugmentConfig,
        *,
        outputs: int | None = None,
        masks: bool = False,
        ignored_target: int | None = None,
        on_gpu: bool = False,
    ) -> None:
        check_type("config", config, AugmentConfig, "Pass for example AugmentConfig(crop=4).")
        for name in ("mixup", "aug_mix"):
            if masks and getattr(config, name):
                raise ConfigError(
                    f"{name} must be 0 for masks: a pixel would show several places, and a mask has one class for "
                    f"each pixel. Received: {name}={getattr(config, name)}. Use cutmix or rand_augment."
                )
        self.config = config
        self.outputs = outputs
        self._masks = masks
        self._ignored_target = ignored_target
        self._on_gpu = on_gpu

    @property
    def needs_one_hot(self) -> bool:
        """Whether targets that are class numbers become shares of each class, [batch, outputs]."""
        return self.config.mixes_examples and not self._masks

    def __call__(self, example: tuple[Any, ...], seed: Any) -> tuple[Any, ...]:
        """Returns the changed batch.

        Args:
            example: (inputs, targets) or (inputs, targets, weight). The inputs are images [batch, height, width,
                channels], or a dict or tuple of tensors, of which those with four dimensions are images.
            seed: Two whole numbers.
        Raises:
            ConfigError: The inputs are not images, there are no targets, or they cannot be mixed.
        """
        if self.config.is_off:
            return example
        self.check(example)
        first = _images(example[0])[0]
        unchanged = self.one_hot(example)
        if first.shape[0]:
            return self._augmented(unchanged, tf.convert_to_tensor(seed))
        # Under a strategy, a replica may have no examples.
        changed: tuple[Any, ...] = tf.cond(
            tf.shape(first)[0] > 0, lambda: self._augmented(unchanged, tf.convert_to_tensor(seed)), lambda: unchanged
        )
        return changed

    def one_hot(self, example: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns a batch with targets as after mixup and cutmix, and otherwise unchanged.

        Validation needs it: the same loss takes targets of the same form.

        Example:
            >>> augmentation = Augmentation(AugmentConfig(mixup=0.2), outputs=3)
            >>> augmentation.one_hot((tf.zeros((1, 8, 8, 3)), tf.constant([2])))[1].numpy().tolist()
            [[0.0, 0.0, 1.0]]
        """
        if not self.needs_one_hot or len(example) < 2:
            return example
        inputs, targets, *weight = example
        return (inputs, self._shares(targets), *weight)

    def _shares(self, targets: Any) -> tf.Tensor:
        if not tf.is_tensor(targets):
            raise ConfigError(
                "Targets must be one tensor for mixup and cutmix. Received: "
                f"targets={type(targets).__name__}(...). Set mixup and cutmix to 0."
            )
        if targets.dtype.is_floating:  # values, or shares of each class already
            return targets
        if targets.shape.rank == 2 and targets.shape[1] not in (None, 1):  # several labels: 0 or 1 for each class
            return tf.cast(targets, tf.float32)
        if self.outputs is None or targets.shape.rank not in (1, 2):
            raise ConfigError(
                "Targets must be class numbers [batch], and outputs must be given, for mixup and cutmix. Received: "
                f"targets of shape {targets.shape} and outputs={self.outputs}. Pass outputs=10 for ten classes."
            )
        classes = tf.reshape(targets, (-1,))
        wrong = (tf.cast(classes, tf.int64) < 0) | (tf.cast(classes, tf.int64) >= self.outputs)
        words = [
            f"Targets must be class numbers from 0 to {self.outputs - 1} for mixup and cutmix. Received, among others:",
            tf.boolean_mask(classes, wrong),
        ]
        with tf.control_dependencies([tf.raw_ops.Assert(condition=~tf.reduce_any(wrong), data=words)]):
            return tf.one_hot(classes, self.outputs)

    def _augmented(self, example: tuple[Any, ...], seed: tf.Tensor) -> tuple[Any, ...]:
        inputs, targets, *others = example
        weight = others[0] if others else None
        seeds = [tf.random.experimental.stateless_fold_in(seed, stage) for stage in STAGES]
        images, maps = [self._in_range(each) for each in _images(inputs)], self._maps(targets, weight)
        images, maps = self._moved(images, maps, seeds)
        if self.config.aug_mix:
            images = [aug_mix(each, seeds[OPERATIONS], self.config) for each in images]
        if self.config.is_colour:
            images = [change_colours(each, seeds[COLOURS], self.config) for each in images]
        if self.config.cutout:
            images, maps = self._cut(images, maps, seeds[CUTOUT])
        if self.config.mixes_examples:
            shape = tf.shape(images[0])
            mixture = draw_mixture(seeds[MIXTURE], self.config, shape[0], shape[1:3])
            images = [mix_images(each, mixture, self.config) for each in images]
            maps = [(paste(each, mixture), fill) for each, fill in maps]
            if not self._masks:
                targets, weight = mix_targets(targets, weight, mixture)
        if self._masks:
            targets = tf.reshape(maps[0][0], tf.shape(targets)) if targets.shape.rank == 3 else maps[0][0]
            if weight is not None and len(maps) > 1:
                weight = tf.reshape(maps[1][0], tf.shape(weight)) if weight.shape.rank == 3 else maps[1][0]
        return (_with_images(inputs, images), targets, *([] if weight is None else [weight]))

    def _in_range(self, images: tf.Tensor) -> tf.Tensor:
        """Returns the images. Fails if a setting that knows black and white would clip them."""
        config = self.config
        knows_range = config.is_colour or config.chooses_operations or config.cutout or config.fill_value
        if not (knows_range and images.dtype.is_floating):
            return images
        low, high = tf.reduce_min(images), tf.reduce_max(images)
        words = [
            "Images must be floating-point numbers from 0 to 1, or uint8 from 0 to 255, for changes of colour, "
            "rand_augment, aug_mix, cutout and fill_value. Received values between",
            low,
            "and",
            high,
            "instead. Scale them in the source, or cast them to uint8; a layer of the model may scale them again.",
        ]
        is_in_range = (low >= -OVERSHOOT) & (high <= 1 + OVERSHOOT)
        with tf.control_dependencies([tf.raw_ops.Assert(condition=is_in_range, data=words)]):
            return tf.identity(images)

    def _maps(self, targets: tf.Tensor, weight: tf.Tensor | None) -> list[tuple[tf.Tensor, int | None]]:
        """Returns what follows the geometric changes: the masks, and weights of each pixel; with their fill."""
        if not self._masks:
            return []
        maps = [(targets, self._ignored_target)]
        if weight is not None and weight.shape.rank > 2:
            maps.append((weight, 0))
        return [(each[..., None] if each.shape.rank == 3 else each, fill) for each, fill in maps]

    def _moved(self, images: list[tf.Tensor], maps: list[Any], seeds: list[tf.Tensor]) -> tuple[Any, Any]:
        config = self.config
        if config.crop_scale is not None:
            batch, *size = tf.unstack(tf.shape(images[0])[:3])
            boxes = draw_boxes(seeds[RESIZED_CROP], config.crop_scale, config.crop_ratio, batch, tf.stack(size))

            def of_size(each: tf.Tensor) -> tf.Tensor:  # the same part of an image of another size
                scaled = boxes * tf.tile(tf.shape(each)[1:3], [2]) // tf.tile(tf.stack(size), [2])
                return tf.maximum(scaled, [0, 0, 1, 1])

            images = [resized_crop(each, of_size(each)) for each in images]
            maps = [(resized_crop(each, of_size(each), nearest=True), fill) for each, fill in maps]
        if config.crop or config.flip or config.is_projective:
            moves = draw_moves(config, seeds[GEOMETRY], tf.shape(images[0])[0])
            images = [self._move(each, moves, largest(each.dtype) * config.fill_value) for each in images]
            maps = [(self._move(each, moves, fill or 0, nearest=True), fill) for each, fill in maps]
        if config.rand_augment:
            seed = seeds[OPERATIONS]
            maps = [(rand_augment(images[0], each, seed, config, fill or 0)[1], fill) for each, fill in maps]
            images = [rand_augment(each, None, seed, config)[0] for each in images]
        return images, maps

    def _move(self, images: tf.Tensor, moves: Moves, fill: float, *, nearest: bool = False) -> tf.Tensor:
        config, shape = self.config, tf.shape(images)
        if not config.is_projective:
            return crop_and_flip(
                images,
                moves,
                crop=config.crop,
                flip=config.flip,
                fill_mode=config.fill_mode,
                fill_value=fill,
                on_gpu=self._on_gpu,
            )
        matrices = transforms(moves, shape[0], shape[1:3])
        return project(images, matrices, fill_mode=config.fill_mode, fill_value=fill, nearest=nearest)

    def _cut(self, images: list[tf.Tensor], maps: list[Any], seed: tf.Tensor) -> tuple[Any, Any]:
        shape = tf.shape(images[0])
        boxes = draw_cutout(seed, self.config.cutout, shape[0], shape[1:3])
        # The classes under the square stay, unless there is a class number for pixels that do not count.
        cut = [(each if fill is None else cut_out(each, boxes, fill), fill) for each, fill in maps]
        return [cut_out(each, boxes) for each in images], cut

    def check(self, example: tuple[Any, ...]) -> None:
        """Raises ConfigError unless a batch, or what tf.data tells of its shapes and types, can be augmented.

        Warns:
            TfoptWarning: The targets have the size of the images, and would not follow their moves.
        """
        if self.config.is_off:
            return
        check_not_taught(example)
        if not isinstance(example, tuple) or len(example) < 2:
            raise ConfigError(
                "Examples must be (inputs, targets) or (inputs, targets, weight) to be augmented. Received: inputs "
                "alone. Add targets, or turn the augmentation off."
            )
        inputs, targets, *_ = example
        images = _images(inputs)
        if not images:
            shapes = [tuple(each.shape) for each in tf.nest.flatten(inputs)]
            raise ConfigError(
                "Inputs must be images [batch, height, width, channels] to be augmented. Received: inputs of shape "
                f"{', '.join(map(str, shapes))}. Turn the augmentation off."
            )
        for each in images:
            if each.shape[1] in CHANNELS and each.shape[3] not in (None, *CHANNELS):
                raise ConfigError(
                    "Images must be [batch, height, width, channels] to be augmented. Received: images of shape "
                    f"{tuple(each.shape)}, whose channels come first. Transpose them in the source, or turn the "
                    "augmentation off."
                )
        smallest = min((side for each in images for side in each.shape[1:3] if side is not None), default=None)
        if smallest is not None and self.config.crop >= smallest:
            raise ConfigError(
                "crop must be smaller than the sides of the images. Received: "
                f"crop={self.config.crop}, with a side of {smallest} pixels. An eighth of the side is usual."
            )
        for each in images:
            if each.dtype != tf.uint8 and not each.dtype.is_floating and not self.config.copies_pixels:
                raise ConfigError(
                    "Images must be uint8 from 0 to 255, or floating-point from 0 to 1. Received: images of dtype "
                    f"{each.dtype.name}. Cast them in the source."
                )
        if self.config.mixes_examples and len(images) < len(tf.nest.flatten(inputs)):
            raise ConfigError(
                "Inputs must all be images for mixup and cutmix: other inputs cannot be mixed. Received: "
                f"{len(tf.nest.flatten(inputs))} inputs, {len(images)} of them images. Set mixup and cutmix to 0."
            )
        moves = self.config.is_geometric or self.config.rand_augment or self.config.cutmix
        sizes = [each.shape[1:3].as_list() for each in images]
        if moves and not self._masks and any(_size(each) in sizes for each in tf.nest.flatten(targets)):
            warn(
                "The targets have the height and width of the images, but do not follow their moves. If they are "
                "masks or images, set masks=True: tfopt.data.Augmentation(config, masks=True)."
            )
        if self._masks and getattr(getattr(targets, "shape", None), "rank", None) not in (3, 4):
            raise ConfigError(
                "Targets must be masks [batch, height, width] or [batch, height, width, 1]. Received: targets of "
                f"shape {getattr(targets, 'shape', None)}. Set masks=False."
            )
        size = _size(targets)
        if self._masks and size is not None and all(None not in each for each in sizes) and size not in sizes:
            raise ConfigError(
                "Masks must have the height and width of the images, so that they move alike. Received: masks of "
                f"height and width {size}, and images of {sizes[0]}. Resize the masks after the augmentation."
            )


def check_not_taught(example: Any) -> None:
    """Raises ConfigError if the targets of an example hold the outputs of a teacher for the example as it is.

    Example:
        >>> check_not_taught((tf.zeros((1, 8, 8, 3)), tf.constant([2])))
    """
    targets = example[1] if isinstance(example, tuple) and len(example) > 1 else None
    if isinstance(targets, dict) and OF_TEACHER in targets:
        raise ConfigError(
            "Examples with stored outputs of a teacher must not be augmented: the student would see other inputs than "
            "the teacher saw. Received: an augmentation, and examples of tfopt.cache_teacher. Leave the augmentation "
            "out, or distill with the teacher itself."
        )


def separate_boxes(augment: Any) -> tuple[Callable[..., tf.Tensor] | None, Any]:
    """Separates the random resized crop from other changes, for a source that cuts an image before it is resized.

    Returns: A function from a seed [2] and the size (height, width) of one image to its random box, (top, left, height,
        width), int32 [4]; and the augmentation of what is cut out. Without such a crop, and for masks, which are cut
        together with their images, None and the augmentation as it is.
    Example:
        >>> config = AugmentConfig(crop_scale=(1, 1), crop_ratio=(1, 1), flip="horizontal")
        >>> box, others = separate_boxes(Augmentation(config))
        >>> box(tf.constant([0, 1]), tf.constant([8, 8])).numpy().tolist(), others.config.flip, others.config.crop_scale
        ([0, 0, 8, 8], 'horizontal', None)
    """
    if not isinstance(augment, Augmentation) or augment.per_example is not None:
        return None, augment
    if augment.config.crop_scale is None or augment._masks:
        return None, augment
    scale, ratio = augment.config.crop_scale, augment.config.crop_ratio
    others = copy(augment)
    others.config = replace(augment.config, crop_scale=None)

    def box(seed: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        return draw_boxes(tf.random.experimental.stateless_fold_in(seed, RESIZED_CROP), scale, ratio, 1, size)[0]

    return box, others


def _images(inputs: Any) -> list[tf.Tensor]:
    return [each for each in tf.nest.flatten(inputs) if each.shape.rank == 4]


def _size(targets: Any) -> list[int | None] | None:
    """Returns the height and width of targets that have both and are known; otherwise None."""
    shape = getattr(targets, "shape", tf.TensorShape(None))
    size = list(shape[1:3]) if shape.rank in (3, 4) else [None]
    return None if None in size else size


def _with_images(inputs: Any, images: list[tf.Tensor]) -> Any:
    changed = iter(images)
    return tf.nest.map_structure(lambda each: next(changed) if each.shape.rank == 4 else each, inputs)
