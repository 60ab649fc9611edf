"""Settings of the examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from tfopt.data.augment.config import AugmentConfig
from tfopt.data.examples import Examples
from tfopt.data.sources import SOURCES
from tfopt.errors import ConfigError, warn
from tfopt.settings.calls import call_named, check_call
from tfopt.settings.flags import BY_NAME, Arguments
from tfopt.settings.validation import check_fields

if TYPE_CHECKING:
    from tfopt.data.augment.augmentation import Augmentation


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The examples for training and testing, and how the pipeline feeds them to a model.

    Example:
        >>> DataConfig(source="synthetic", arguments={"examples": 100, "input_shape": [8]}).load().x_train.shape
        (80, 8)
    """

    source: Annotated[str | Callable[..., Any], BY_NAME] = "digits"
    """Name of a data source (see `tfopt data list`), or package.module:function of your own. In Python also a function
    that returns tfopt.data.Examples."""
    arguments: Arguments = field(default_factory=dict)
    """Arguments of the source, for example image_size=32."""
    random_shift: Annotated[int, Ge(0)] = 0
    """Largest random shift of training images, in pixels: a short form of augment.crop. 0 is off."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """Random changes of training images. Every epoch has new ones."""
    max_examples: Annotated[int, Ge(1)] | None = None
    """Largest number of examples from the training part, and from the test part. None uses all."""

    cache: Literal["auto", "memory", "disk", "off"] | bool = "auto"
    """Place where examples are kept between epochs: decoded in memory, decoded on disk in cache_dir, or off. auto
    chooses by their size against the free memory. True is auto, False is off."""
    cache_dir: str | None = None
    """Directory for a cache on disk. auto uses it for examples that do not fit in memory. None allows no such cache."""
    shuffle_buffer: Literal["auto"] | Annotated[int, Ge(1)] = "auto"
    """Number of records among which the shuffle chooses. auto takes all of them, but at most 10,000 examples or 100,000
    records that are decoded later, and 512 MiB."""
    deterministic: bool = True
    """Whether every run has the same order of examples. If not, an example that takes long to decode does not hold up
    the others."""
    bucket_boundaries: tuple[Annotated[int, Ge(1)], ...] = ()
    """Lengths that divide examples of different length into buckets. A batch holds examples of one bucket. If empty, a
    batch holds examples of any length, filled up to the longest."""
    service: str | None = None
    """Address of a tf.data service that prepares the batches, for example grpc://data-host:5000. `tfopt data serve`
    starts one. None prepares them in the training process."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_call("source", self.source, SOURCES, self.arguments, ())
        if self.cache == "disk" and self.cache_dir is None:
            raise ConfigError("cache_dir must be given with cache='disk'. Received: cache_dir=None. Name a directory.")
        if list(self.bucket_boundaries) != sorted(set(self.bucket_boundaries)):
            raise ConfigError(
                "bucket_boundaries must be lengths, each larger than the one before. "
                f"Received: bucket_boundaries={self.bucket_boundaries}. Sort them."
            )
        if self.random_shift and self.augment.crop:
            raise ConfigError(
                "random_shift must be 0 with augment.crop, which does the same. Received: "
                f"random_shift={self.random_shift}, augment.crop={self.augment.crop}. Leave random_shift out."
            )
        if self.random_shift and self.augment.crop_scale is not None:
            raise ConfigError(
                "random_shift must be 0 with augment.crop_scale, which moves the images too. Received: "
                f"random_shift={self.random_shift}, augment.crop_scale={self.augment.crop_scale}. Leave one out."
            )
        if self.service is not None and not self.service.startswith("grpc://"):
            raise ConfigError(
                f"service must be an address that begins with grpc://. Received: service={self.service!r}. "
                "`tfopt data serve` prints the address."
            )

    def load(self) -> Examples:
        """Loads or makes the examples.

        Raises:
            ConfigError: The source cannot make examples from the arguments.
        """
        examples = call_named("source", self.source, SOURCES, self.arguments)
        if not isinstance(examples, Examples):
            raise ConfigError(
                f"source must return tfopt.data.Examples. Received: {type(examples).__name__} from {self.source!r}. "
                "Return tfopt.data.arrays(x, y), or Examples(train=..., test=..., outputs=...)."
            )
        return examples if self.max_examples is None else examples.limit(self.max_examples)

    @property
    def augments(self) -> bool:
        """Whether training images change at random.

        Example:
            >>> DataConfig(random_shift=2).augments, DataConfig().augments
            (True, False)
        """
        return bool(self.random_shift) or not self.augment.is_off

    def augmentation(self, examples: Examples, *, on_gpu: bool = False) -> Augmentation | None:
        """Returns the augmentation of the training examples, or None if it is off.

        Targets are masks if they have the height and width of the images.

        Args:
            examples: The examples of the source.
            on_gpu: Whether the augmentation runs on a GPU, in the training step.
        Example:
            >>> config = DataConfig(augment=AugmentConfig(mixup=0.2))
            >>> config.augmentation(config.load()).needs_one_hot
            True
        """
        from tfopt.data.augment.augmentation import Augmentation  # here, because it imports TensorFlow

        if not self.augments:
            return None
        return Augmentation(
            replace(self.augment, crop=self.augment.crop or self.random_shift),
            outputs=examples.outputs,
            masks=_are_masks(examples.element_spec),
            ignored_target=examples.ignored_target,
            on_gpu=on_gpu,
        )

    def pipeline_arguments(self, examples: Examples | None = None) -> dict[str, Any]:
        """Returns the settings as arguments of `tfopt.data.pipeline`.

        Args:
            examples: The examples of the source. With them the augmentation is among the arguments, unless
                `augment.where` is "device".
        Warns:
            TfoptWarning: Training examples are to be augmented, and a pipeline of these arguments does not do it.
        Example:
            >>> DataConfig(cache="off").pipeline_arguments()["cache"]
            'off'
        """
        settings = pipeline_settings(self)
        if not self.augments:
            return settings
        if examples is not None and self.augment.where != "device":
            return {**settings, "augment": self.augmentation(examples)}
        remedy = "Pass the examples too: config.pipeline_arguments(examples)"
        if self.augment.where == "device":
            remedy = "Give tfopt.compile augment=config.augmentation(examples), or set augment.where='host'"
        warn(f"The DataConfig augments examples, and its pipeline_arguments do not hold the augmentation. {remedy}.")
        return settings


def pipeline_settings(config: DataConfig) -> dict[str, Any]:
    """Returns the settings as arguments of `tfopt.data.pipeline`, for a caller that sees to the augmentation."""
    names = ("cache", "cache_dir", "shuffle_buffer", "deterministic", "bucket_boundaries", "service")
    return {name: getattr(config, name) for name in names}


def cuts_boxes(config: DataConfig, examples: Examples) -> bool:
    """Returns whether the pipeline cuts the boxes of augment.crop_scale out of images before they are resized.

    Example:
        >>> config = DataConfig(augment=AugmentConfig(crop_scale=(0.08, 1)))
        >>> cuts_boxes(config, config.load())  # arrays
        False
    """
    kept = config.cache in ("memory", "disk")  # as images of the source's size
    return (
        examples.decodes_boxes
        and not kept
        and config.augment.crop_scale is not None
        and config.augment.where != "device"
    )


def _are_masks(spec: Any) -> bool:
    """Returns whether the targets of single examples are masks of their images."""
    import tensorflow as tf

    inputs, targets, *_ = spec
    sizes = [tuple(each.shape[:2]) for each in tf.nest.flatten(inputs) if each.shape.rank == 3]
    shapes = [each.shape for each in tf.nest.flatten(targets)]
    return len(shapes) == 1 and shapes[0].rank in (2, 3) and tuple(shapes[0][:2]) in sizes
