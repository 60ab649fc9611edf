"""A recipe: the model builder, the data and the settings of every stage, as plain data that TOML can hold."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pydantic_core
import tomli_w
import tyro
from annotated_types import Ge, MinLen

from tfopt.clustering.config import ClusteringConfig
from tfopt.data.config import DataConfig
from tfopt.distillation.config import PARENT, TeacherConfig
from tfopt.errors import ConfigError, unknown_name
from tfopt.exporting.config import Formats, Int8Nodes
from tfopt.pruning import PruningConfig, StructuredPruningConfig
from tfopt.quantization import QuantizationConfig
from tfopt.recipe.changes import check_names, check_no_code, config_error, with_changes
from tfopt.recipe.model import ModelConfig
from tfopt.recipe.tables import changed_settings, flat, plain_settings, shown_settings
from tfopt.report.sheet import Sheet, Shown, Table
from tfopt.settings.calls import import_code, is_code
from tfopt.settings.flags import BY_NAME, stages
from tfopt.settings.validation import check_fields, check_name, check_stored
from tfopt.tasks.task import TASKS, Task
from tfopt.terminal import is_printable
from tfopt.training import TrainingConfig

NOT_KL = {"regression": "mse", "multi_label_classification": "binary"}
QUICK_EPOCHS = 2
QUICK_EXAMPLES = 320
QUICK_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Recipe(Shown):
    """A model builder with the settings for training, shrinking, pruning, quantization and export.

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
    """Name of the task: classification, multi_label_classification, segmentation, language_model or regression, or
    package.module:name of your own. In Python also a tfopt.tasks.Task."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Settings of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Settings of the examples."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Settings of the training."""
    shrink: StructuredPruningConfig | None = None
    """Settings of the removal of whole channels, with fine-tuning. None turns it off."""
    pruning: PruningConfig | None = None
    """Settings of the pruning, with fine-tuning. None turns it off."""
    clustering: ClusteringConfig | None = None
    """Settings of the clustering of weights, with fine-tuning. None turns it off."""
    quantization: QuantizationConfig | None = None
    """Settings of the int8 quantization, with or without training. None turns it off."""
    distillation: TeacherConfig | None = None
    """Settings of a teacher, from which the fits learn beside the labels. None turns it off."""
    int8_nodes: Int8Nodes = "faster"
    """Nodes of the int8 artifact that run in int8: "faster" chooses the nodes that are measured to be faster in int8 on
    this machine; "all" is every node with an int8 kernel, the same in every run. Weights are stored in int8 in any
    case."""
    batch_sizes: Annotated[tuple[Annotated[int, Ge(1)], ...], MinLen(1)] = (1, 8)
    """Batch sizes at which int8_nodes="faster" measures the nodes."""
    formats: Formats = ("saved_model",)
    """File formats of the artifacts, for example saved_model onnx. A directory of another format than saved_model has
    its name at the end, as in int8_onnx/."""
    export_dir: Annotated[str, MinLen(1)] | None = None
    """Directory for teacher/, float32/, shrunk/, pruned/, clustered/, int8/, the receipts and the report. With None
    nothing is written."""
    forms: tyro.conf.Suppress[Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Other forms of the recipe by name, each a table of the settings that differ: "quick" runs in less than a minute,
    "full" trains on the usual data set."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not is_printable(self.name):
            raise ConfigError(
                f"name must be one line without control characters. Received: name={self.name!r}. "
                "Write for example name = 'digits_cnn'."
            )
        if self.distillation is not None:
            self._check_distillation(self.distillation)
        if not is_code(self.task):
            check_name("task", self.task, TASKS, or_a="a Task", accepts=lambda task: isinstance(task, Task))
        for name in self.forms:
            try:
                self.form(name)
            except ConfigError as error:
                raise ConfigError(
                    f"The form {name!r} must hold valid settings. {error} The table [forms.{name}] has the settings of "
                    "this form, which come before those of the recipe."
                ) from error

    def _check_distillation(self, config: TeacherConfig) -> None:
        in_training = self.quantization is not None and self.quantization.training
        trains_again = self.shrink or self.pruning or self.clustering or in_training
        if config.teacher == PARENT and not trains_again:
            raise ConfigError(
                "teacher='parent' teaches the stages that train after the first one. Received: a recipe without "
                "shrink, pruning, clustering and quantization with training. Add one, or name a recipe or a file."
            )
        if config.loss == "kl" and isinstance(self.task, str) and self.task in NOT_KL:
            raise ConfigError(
                f"loss='kl' of distillation is for classes that exclude each other. Received: task={self.task!r}. Set "
                f"distillation.loss={NOT_KL[self.task]!r}."
            )
        if config.teacher_cache is not None and self.data.augments:
            raise ConfigError(
                "teacher_cache needs examples that are the same in every epoch, as the teacher saw them. Received: "
                f"teacher_cache={config.teacher_cache!r} and an augmentation. Leave teacher_cache out, turn the "
                "augmentation off, or store augmented examples with tfopt.data.convert."
            )

    def find_task(self) -> Task:
        """Returns the task: the registered one if `task` is a name.

        Raises:
            ConfigError: `task` names code that cannot be imported, or that is no task.
        Example:
            >>> Recipe(name="mine", task="regression").find_task().name
            'regression'
        """
        if not isinstance(self.task, str):
            return self.task
        found = import_code("task", self.task) if is_code(self.task) else TASKS[self.task]
        if not isinstance(found, Task):
            raise ConfigError(
                f"task must name a tfopt.tasks.Task. Received: task={self.task!r}, which is a {type(found).__name__}. "
                "Name a module-level Task."
            )
        return found

    def form(self, name: str) -> Recipe:
        """Returns a form of the recipe: its settings, with those of `forms[name]` laid over them.

        The name of the form is added to the name of the recipe, to its export directory and to its checkpoints.

        Raises:
            ConfigError: The recipe has no such form.
        Example:
            >>> recipe = Recipe(name="mine", export_dir="out/mine", forms={"full": {"training": {"epochs": 90}}})
            >>> full = recipe.form("full")
            >>> full.name, full.training.epochs, full.export_dir
            ('mine (full run)', 90, 'out/mine_full')
        """
        if name not in self.forms:
            raise unknown_name("form", name, self.forms)
        return self._named_after(name, with_changes(replace(self, forms={}), self.forms[name]))

    def quick(self) -> Recipe:
        """Returns the recipe for a short trial run: its form "quick", or else few epochs on few examples.

        Example:
            >>> quick = Recipe(name="mine", export_dir="saved_models/mine").quick()
            >>> quick.name, quick.export_dir, quick.training.epochs
            ('mine (quick run)', 'saved_models/mine_quick', 2)
        """
        if "quick" in self.forms:
            return self.form("quick")
        shrink = self.shrink and replace(self.shrink, epochs=min(self.shrink.epochs, QUICK_EPOCHS))
        pruning = self.pruning and replace(self.pruning, epochs=min(self.pruning.epochs, QUICK_EPOCHS))
        clustering = self.clustering and replace(self.clustering, epochs=min(self.clustering.epochs, QUICK_EPOCHS))
        quantization = self.quantization
        if quantization is not None and quantization.training:
            quantization = replace(quantization, epochs=min(quantization.epochs, QUICK_EPOCHS))
        shorter = replace(
            self,
            data=replace(self.data, max_examples=min(self.data.max_examples or QUICK_EXAMPLES, QUICK_EXAMPLES)),
            training=replace(
                self.training,
                epochs=min(self.training.epochs, QUICK_EPOCHS),
                steps_per_epoch=self.training.steps_per_epoch and min(self.training.steps_per_epoch, QUICK_STEPS),
            ),
            shrink=shrink,
            pruning=pruning,
            clustering=clustering,
            quantization=quantization,
            distillation=self.distillation and replace(self.distillation, teacher_form="quick"),
            forms={},
        )
        return self._named_after("quick", shorter)

    def _named_after(self, form: str, changed: Recipe) -> Recipe:
        """Returns a form of this recipe with a name, an export directory and checkpoints of its own."""
        own, new = self.training.checkpoint_dir, changed.training
        if new.checkpoint_dir is not None and new.checkpoint_dir == own:
            new = replace(new, checkpoint_dir=f"{Path(new.checkpoint_dir)}_{form}")
        export_dir = changed.export_dir
        if export_dir is not None and export_dir == self.export_dir:
            export_dir = f"{Path(export_dir)}_{form}"
        return replace(changed, name=f"{self.name} ({form} run)", training=new, export_dir=export_dir)

    def compose(self, other: Recipe) -> Recipe:
        """Returns this recipe with the settings in which another recipe differs from the defaults.

        So the other recipe can hold a part alone: an augmentation, a compression, a schedule. The stages that are on in
        one of the two are on in the result. The name has both names, and so has the export directory.

        Example:
            >>> sparse = Recipe(name="sparse", pruning=PruningConfig(target_sparsity=0.9))
            >>> both = Recipe(name="mine", export_dir="out/mine").compose(sparse)
            >>> both.name, both.pruning.target_sparsity, both.export_dir
            ('mine+sparse', 0.9, 'out/mine+sparse')
        """
        return self.overlaid(changed_settings(other))

    def overlaid(self, changes: Mapping[str, Any]) -> Recipe:
        """Returns this recipe with other settings, given as nested tables, and with both names.

        Example:
            >>> longer = Recipe(name="mine").overlaid({"name": "longer", "training": {"epochs": 99}})
            >>> longer.name, longer.training.epochs
            ('mine+longer', 99)
        """
        changes = dict(changes)
        added = changes.get("name", "changed")
        changes["name"] = f"{self.name}+{added}"
        if self.export_dir is not None and "export_dir" not in changes:
            changes["export_dir"] = f"{Path(self.export_dir)}+{added}"
        return with_changes(self, changes)

    def __str__(self) -> str:
        """Returns the settings that differ from the defaults, as TOML."""
        return tomli_w.dumps(shown_settings(self)).rstrip()

    def _sheet(self) -> Sheet:
        settings = shown_settings(self)
        forms = settings.pop("forms", {})
        title, note = settings.pop("name"), settings.pop("description", "")
        tables = [Table(rows=_rows(each), folded=f"form {form}") for form, each in forms.items()]
        return Sheet(title=title, note=note, tables=[Table(rows=_rows(settings)), *tables])

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as plain values, as in TOML. A setting that is None is left out."""
        return plain_settings(self)

    def to_toml(self) -> str:
        """Returns the recipe as TOML.

        Raises:
            ConfigError: A field holds a Python object that TOML cannot hold, such as a function.
        """
        return tomli_w.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, allow_code: bool = False) -> Recipe:
        """Makes a recipe from plain values.

        Args:
            values: The settings as nested tables.
            allow_code: Whether builder, source and task may be names of the form package.module:name. They are imported
                when the recipe runs.
        Raises:
            ConfigError: A setting is unknown, or its value is wrong. The message gives the path of the setting.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"A recipe must be a mapping of settings. Received: {values!r}. Pass for example {{'name': 'mine'}}."
            )
        check_names(cls, values, "")
        if not allow_code:
            check_no_code(values)
        values = {name: value for name, value in values.items() if name not in _stages_off(values)}
        try:
            # Read as JSON, because strict then accepts a list for a tuple, but no string or bool for a number.
            return pydantic.TypeAdapter(cls).validate_json(pydantic_core.to_json(values), strict=True)
        except pydantic_core.PydanticSerializationError as error:
            raise ConfigError(
                f"A recipe must hold plain values. Received: {values!r} ({error}). "
                "Use numbers, strings, lists and mappings only."
            ) from error
        except pydantic.ValidationError as error:
            raise config_error(cls, error) from error

    @classmethod
    def from_toml(cls, file: str | Path, *, allow_code: bool = False) -> Recipe:
        """Reads a recipe from a TOML file.

        With the setting `base`, the file changes another recipe: a recipe of tfopt by its name, or another file by its
        path, which is relative to the directory of this file. `false` turns a stage of the base off.

        Args:
            file: The file.
            allow_code: Whether builder, source and task may be names of the form package.module:name. They are imported
                when the recipe runs.
        Raises:
            ConfigError: The file cannot be read, is not TOML, or holds a wrong setting.
        """
        return _read(Path(file), allow_code, ())


def _rows(tables: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the cells of a table in a notebook. An empty table of settings is that of a stage with its defaults."""
    return [
        (path, "on" if isinstance(value, Mapping) else "off" if value is False else str(value))
        for path, value in flat(tables)
    ]


def read_changes(file: Path, *, allow_code: bool = False) -> dict[str, Any]:
    """Returns the settings of a TOML file as nested tables, also those that are equal to the defaults.

    Raises:
        ConfigError: As for `Recipe.from_toml`.
    """
    recipe = _read(file, allow_code, ())  # checks the file
    values = _load(file)
    values.setdefault("name", file.stem)
    return values if values.pop("base", None) is None else changed_settings(recipe) | _stages_off(values)


def _stages_off(values: Mapping[str, Any]) -> dict[str, bool]:
    return {name: False for name in stages(Recipe) if values.get(name) is False}


def _read(file: Path, allow_code: bool, read_before: tuple[Path, ...]) -> Recipe:
    values = _load(file)
    values.setdefault("name", file.stem)
    base = values.pop("base", None)
    if base is None:
        return Recipe.from_dict(values, allow_code=allow_code)
    if not allow_code:
        check_no_code(values)
    changed = _find_base(base, file, allow_code, (*read_before, file.resolve()))
    if changed.export_dir is not None and "export_dir" not in values:  # the artifacts of the base stay
        values["export_dir"] = str(Path(changed.export_dir).with_name(Path(values["name"]).name))
    return with_changes(changed, values)


def _find_base(base: Any, file: Path, allow_code: bool, read_before: tuple[Path, ...]) -> Recipe:
    from tfopt.recipes import find_recipe  # here, because the recipes of tfopt are made of this class

    if not isinstance(base, str) or not base.endswith(".toml"):
        return find_recipe(base)
    path = file.parent / base
    if path.resolve() in read_before:
        raise ConfigError(
            f"base must not lead back to the file itself. Received: base={base!r} in {file}. Name another recipe."
        )
    return _read(path, allow_code, read_before)


def _load(file: Path) -> dict[str, Any]:
    check_stored("A recipe", file)
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        json.dumps(values, default=str)  # it raises where values are nested deeper than Python follows them
        return values
    except OSError as error:
        raise ConfigError(
            f"The recipe file must be readable. Received: {file} ({error.strerror}). Check the path."
        ) from error
    except RecursionError:
        raise ConfigError(
            f"The values of a recipe file must not be nested so deeply. Received: {file}. Correct the file."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The recipe file must be valid TOML. Received: {file} ({error}). Correct the file."
        ) from error
