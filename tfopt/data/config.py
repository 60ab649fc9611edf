"""Settings of the examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge

from tfopt.data.examples import Examples
from tfopt.data.sources import SOURCES
from tfopt.settings.calls import call_named, check_call
from tfopt.settings.flags import BY_NAME, Arguments
from tfopt.settings.validation import check_fields


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The examples for training and testing.

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

    def __post_init__(self) -> None:
        check_fields(self)
        check_call("source", self.source, SOURCES, self.arguments, ())

    def load(self) -> Examples:
        """Loads or makes the examples.

        Raises:
            ConfigError: The source cannot make examples from the arguments.
        """
        examples: Examples = call_named("source", self.source, SOURCES, self.arguments)
        return examples if self.max_examples is None else examples.limit(self.max_examples)
