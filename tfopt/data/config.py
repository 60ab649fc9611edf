"""Settings of the examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge

from tfopt.data.examples import Examples
from tfopt.data.sources import SOURCES
from tfopt.errors import ConfigError
from tfopt.settings.calls import call_named, check_call
from tfopt.settings.flags import BY_NAME, Arguments
from tfopt.settings.validation import check_fields


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The examples for training and testing, and how the pipeline feeds them to a model.

    Example:
        >>> DataConfig(source="synthetic", arguments={"examples": 100, "input_shape": [8]}).load().x_train.shape
        (80, 8)
    """

    source: Annotated[str | Callable[..., Any], BY_NAME] = "digits"
    """Name of a data source. In Python also a function that returns tfopt.data.Examples."""
    arguments: Arguments = field(default_factory=dict)
    """Arguments of the source, for example image_size=32."""
    random_shift: Annotated[int, Ge(0)] = 0
    """Largest random shift of training images, in pixels. Every epoch has new shifts. 0 is off."""
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
        examples: Examples = call_named("source", self.source, SOURCES, self.arguments)
        return examples if self.max_examples is None else examples.limit(self.max_examples)

    def pipeline_arguments(self) -> dict[str, Any]:
        """Returns the settings as arguments of `tfopt.data.pipeline`.

        Example:
            >>> DataConfig(cache="off").pipeline_arguments()["cache"]
            'off'
        """
        names = (
            "cache",
            "cache_dir",
            "shuffle_buffer",
            "deterministic",
            "random_shift",
            "bucket_boundaries",
        )
        return {name: getattr(self, name) for name in names}
