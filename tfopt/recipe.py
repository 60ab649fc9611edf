"""A recipe: the model builder, the data and the settings of every stage, as plain data that TOML can hold."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Annotated, Any

import pydantic
import pydantic_core
import tomli_w
from annotated_types import MinLen

from tfopt.data.config import DataConfig
from tfopt.errors import ConfigError, unknown_name
from tfopt.models import BUILDERS
from tfopt.pruning import PruningConfig
from tfopt.quantization import QuantizationConfig
from tfopt.settings.calls import call_named, check_call
from tfopt.settings.flags import BY_NAME, Arguments, nested_config
from tfopt.settings.validation import check_fields, check_name, error_for, field_types
from tfopt.tasks.task import TASKS, Task
from tfopt.training import TrainingConfig

QUICK_EPOCHS = 2
QUICK_EXAMPLES = 320
QUICK_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to build.

    Example:
        >>> ModelConfig(builder="mlp", arguments={"units": [64]}).build((8,), 3).output_shape
        (None, 3)
    """

    builder: Annotated[str | Callable[..., Any], BY_NAME] = "simple_cnn"
    """Name of a builder (see `tfopt models`). In Python also a function (input_shape, outputs, **arguments)."""
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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model builder with the settings for training, pruning, quantization and export.

    None turns a stage off.

    Example:
        >>> recipe = Recipe(name="mine", pruning=PruningConfig(target_sparsity=0.5))
        >>> Recipe.from_dict(recipe.to_dict()) == recipe
        True
    """

    name: str
    """Name of the recipe."""
    description: str = ""
    """Description of the recipe in one sentence."""
    task: Annotated[str | Any, BY_NAME] = "classification"
    """Name of the task: classification, multi_label_classification, segmentation, language_model or regression. In
    Python also a tfopt.tasks.Task."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Settings of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Settings of the examples."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Settings of the training."""
    pruning: PruningConfig | None = None
    """Settings of the pruning, with fine-tuning. None turns it off."""
    quantization: QuantizationConfig | None = None
    """Settings of the int8 quantization, with or without training. None turns it off."""
    export_dir: Annotated[str, MinLen(1)] | None = None
    """Directory for float32/, pruned/, int8/, receipts.json and report.html. With None nothing is written."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_name("task", self.task, TASKS, or_a="a Task", accepts=lambda task: isinstance(task, Task))

    def find_task(self) -> Task:
        """Returns the task: the registered one if `task` is a name.

        Example:
            >>> Recipe(name="mine", task="regression").find_task().name
            'regression'
        """
        return TASKS[self.task] if isinstance(self.task, str) else self.task

    def quick(self) -> Recipe:
        """Returns the recipe for a short trial run: few epochs, few examples and another export directory.

        "(quick run)" is added to the name, so that reports show it.

        Example:
            >>> quick = Recipe(name="mine", export_dir="saved_models/mine").quick()
            >>> quick.name, quick.export_dir
            ('mine (quick run)', 'saved_models/mine_quick')
        """
        pruning = self.pruning and replace(self.pruning, epochs=min(self.pruning.epochs, QUICK_EPOCHS))
        quantization = self.quantization
        if quantization is not None and quantization.training:
            quantization = replace(quantization, epochs=min(quantization.epochs, QUICK_EPOCHS))
        return replace(
            self,
            name=f"{self.name} (quick run)",
            data=replace(self.data, max_examples=min(self.data.max_examples or QUICK_EXAMPLES, QUICK_EXAMPLES)),
            training=replace(
                self.training,
                epochs=min(self.training.epochs, QUICK_EPOCHS),
                steps_per_epoch=self.training.steps_per_epoch and min(self.training.steps_per_epoch, QUICK_STEPS),
                checkpoint_dir=self.training.checkpoint_dir and f"{Path(self.training.checkpoint_dir)}_quick",
            ),
            pruning=pruning,
            quantization=quantization,
            export_dir=self.export_dir and f"{Path(self.export_dir)}_quick",
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as plain values, as in TOML. A setting that is None is left out."""
        return _plain(self, "")

    def to_toml(self) -> str:
        """Returns the recipe as TOML.

        Raises:
            ConfigError: A field holds a Python object that TOML cannot hold, such as a function.
        """
        return tomli_w.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Makes a recipe from plain values.

        Raises:
            ConfigError: A setting is unknown, or its value is wrong. The message gives the path of the setting.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"A recipe must be a mapping of settings. Received: {values!r}. Pass for example {{'name': 'mine'}}."
            )
        _check_names(cls, values, "")
        try:
            # Read as JSON, because strict then accepts a list for a tuple, but no string or bool for a number.
            return pydantic.TypeAdapter(cls).validate_json(pydantic_core.to_json(values), strict=True)
        except pydantic_core.PydanticSerializationError as error:
            raise ConfigError(
                f"A recipe must hold plain values. Received: {values!r} ({error}). "
                "Use numbers, strings, lists and mappings only."
            ) from error
        except pydantic.ValidationError as error:
            raise _config_error(cls, error) from error

    @classmethod
    def from_toml(cls, file: str | Path) -> Recipe:
        """Reads a recipe from a TOML file.

        Raises:
            ConfigError: The file cannot be read, is not TOML, or holds a wrong setting.
        """
        try:
            values = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"The recipe file must be readable. Received: {file} ({error.strerror}). Check the path."
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The recipe file must be valid TOML. Received: {file} ({error}). Correct the file."
            ) from error
        values.setdefault("name", Path(file).stem)
        return cls.from_dict(values)


def _plain(value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(value):
        entries = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
        return {name: _plain(item, f"{path}.{name}".lstrip(".")) for name, item in entries.items() if item is not None}
    if isinstance(value, Mapping):
        return {name: _plain(item, f"{path}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, path) for item in value]
    if isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, PurePath):
        return str(value)
    raise ConfigError(
        f"{path} must be a name or a plain value, because TOML holds nothing else. Received: {path}={value!r}. "
        "Give its registered name instead."
    )


def _check_names(cls: type, values: Mapping[str, Any], path: str) -> None:
    known = typing.get_type_hints(cls)
    for name, value in values.items():
        if name not in known:
            raise unknown_name("setting", f"{path}{name}", [f"{path}{entry.name}" for entry in dataclasses.fields(cls)])
        nested = nested_config(known[name])
        if nested is not None and isinstance(value, Mapping):
            _check_names(nested, value, f"{path}{name}.")


def _config_error(cls: type, error: pydantic.ValidationError) -> ConfigError:
    """Returns the first error that pydantic found, as a ConfigError."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    path, hint = _setting(cls, first["loc"])
    if first["type"] == "missing":
        return ConfigError(f"{path} must be given. Received: {first['input']!r}. Add the setting {path}.")
    if nested_config(hint) is not None:
        return ConfigError(
            f"{path} must be a table. Received: {path}={first['input']!r}. Write the settings below [{path}]."
        )
    return error_for(path, first["input"], hint)


def _setting(cls: type, location: tuple[int | str, ...]) -> tuple[str, Any]:
    """Returns the path and the type of a setting. A location of pydantic also names places inside a plain field."""
    names: list[str] = []
    config, hint = cls, Any
    for name in map(str, location):
        names.append(name)
        hint = field_types(config)[name]
        nested = nested_config(hint)
        if nested is None:
            break
        config = nested
    return ".".join(names), hint
