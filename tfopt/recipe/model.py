"""The model of a recipe: a builder, and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from tfopt.models import BUILDERS, find_builder
from tfopt.models.keras_models import FAMILIES
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
    """Name of a builder (see `tfopt models`), of a model of keras.applications such as keras:DenseNet121, of a backbone
    of KerasHub such as keras_hub:ViTBackbone, or package.module:function of your own. In Python also a function
    (input_shape, outputs, **arguments)."""
    arguments: Arguments = field(default_factory=dict)
    """Arguments of the builder, for example width=32 filters=[8,16]."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_call("builder", self.builder, self._builders(), self.arguments, (None, None))

    def build(self, input_shape: Any, outputs: int) -> Any:
        """Builds the model for an input shape (a dict of shapes for several inputs) and a number of outputs.

        Raises:
            ConfigError: The builder cannot make a model from the arguments.
        """
        return call_named("builder", self.builder, self._builders(), self.arguments, input_shape, outputs)

    def _builders(self) -> Mapping[str, Callable[..., Any]]:
        """Returns the registered builders, with that of a name such as "keras:DenseNet121"."""
        if isinstance(self.builder, str) and self.builder.partition(":")[0] in FAMILIES:
            return {**BUILDERS, self.builder: find_builder(self.builder)}
        return BUILDERS
