"""Settings of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from tfopt.models import BUILDERS
from tfopt.settings.calls import call_named, check_call
from tfopt.settings.flags import BY_NAME, Arguments
from tfopt.settings.validation import check_fields


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to build.

    Example:
        >>> ModelConfig(builder="mlp", arguments={"units": [64]}).build((8,), 3).output_shape
        (None, 3)
    """

    builder: Annotated[str | Callable[..., Any], BY_NAME] = "simple_cnn"
    """Name of a builder (see `tfopt models`), or package.module:function of your own. In Python also a function
    (input_shape, outputs, **arguments)."""
    arguments: Arguments = field(default_factory=dict)
    """Arguments of the builder, for example width=32 filters=[8,16]."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_call("builder", self.builder, BUILDERS, self.arguments, (None, None))

    def build(self, input_shape: Any, outputs: int) -> Any:
        """Builds the model for an input shape (a dict of shapes for several inputs) and a number of outputs.

        Raises:
            ConfigError: The builder cannot make a model from the arguments.
        """
        return call_named("builder", self.builder, BUILDERS, self.arguments, input_shape, outputs)
