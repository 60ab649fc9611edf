"""Settings of distillation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MinLen

from tfopt.errors import ConfigError
from tfopt.settings.validation import check_fields

PARENT = "parent"
SoftLoss = Literal["kl", "binary", "mse"]
FeatureLoss = Literal["mse", "cosine", "attention", "relations"]


@dataclass(frozen=True, kw_only=True)
class FeaturePair:
    """A layer of the student that learns from a layer of the teacher.

    Example:
        >>> FeaturePair(student="conv_2", teacher="conv_8").loss
        'attention'
    """

    student: str
    """Name of the student's layer."""
    teacher: str
    """Name of the teacher's layer."""
    loss: FeatureLoss = "attention"
    """Distance of their outputs: "mse" or "cosine" for equal shapes; "attention" compares where the outputs are large,
    and takes other numbers of channels too; "relations" compares how similar the examples of a batch are to each other,
    and takes any shapes."""
    weight: Annotated[float, Gt(0)] | Callable[[Any], Any] = 1.0
    """Factor of the distance beside that of the outputs, or a function of the number of the step."""
    projection: bool = False
    """Whether a linear map of the student's channels to those of the teacher, for "mse" and "cosine", is trained along.
    It is in checkpoints, and in none of the student's own files."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.projection and self.loss not in ("mse", "cosine"):
            raise ConfigError(
                f"projection is for loss='mse' and loss='cosine'. Received: projection=True with loss={self.loss!r}, "
                "which takes other widths as they are. Leave projection out."
            )


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """What a student learns from a teacher, and how much it counts beside the labels.

    Example:
        >>> DistillationConfig(temperature=4.0).weight
        0.5
    """

    loss: SoftLoss | Mapping[str, SoftLoss | None] = "kl"
    """Distance of the student's outputs from the teacher's: "kl" for classes that exclude each other (also per pixel or
    per token), "binary" for labels that do not, "mse" for values. For several outputs also a table by the name of the
    student's output in Keras or, of a dict, by its key, in which None leaves one out."""
    temperature: Annotated[float, Gt(0), Le(100)] = 3.0
    """Temperature of "kl" and "binary", at most 100: logits are divided by it, so small probabilities of the teacher
    count more. The loss is multiplied by its square, which keeps the size of the gradients."""
    features: tuple[FeaturePair, ...] = ()
    """Layers inside of the student that learn from layers of the teacher."""
    weight: Annotated[float, Ge(0), Le(1)] | Callable[[Any], Any] = 0.5
    """Share of the teacher in the loss, or a function of the number of the step, a tensor, such as a schedule of
    Keras for learning rates. The labels have the rest. A model that is compiled without a loss learns from the
    teacher alone, and needs no labels."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Who teaches the model of a recipe.

    Raises:
        ConfigError: A value is out of range.

    Example:
        >>> TeacherConfig(temperature=2.0).distillation()
        DistillationConfig(loss='kl', temperature=2.0, features=(), weight=0.5)
    """

    teacher: Annotated[str, MinLen(1)] = PARENT
    """Name of a recipe, or its .toml file, which is trained first, or path of a .keras file, an artifact or another
    SavedModel: it teaches in every fit. "parent" is the model as the first stage has trained it: it teaches the later
    ones, which shrink, prune, cluster or quantize it."""
    teacher_form: Annotated[str, MinLen(1)] | None = None
    """Form of the teacher's recipe, such as quick. By default the recipe as it stands."""
    teacher_cache: Annotated[str, MinLen(1)] | None = None
    """Directory for the outputs of the teacher. They are computed once, and no teacher runs in the training steps. Not
    with augmentation, which shows other examples than the teacher saw. By default the teacher runs in each step."""
    loss: SoftLoss = "kl"
    """Distance from the teacher's outputs: kl for classes that exclude each other, binary for labels that do not, mse
    for values."""
    temperature: Annotated[float, Gt(0), Le(100)] = 3.0
    """Temperature of kl and binary, by which logits are divided."""
    teacher_weight: Annotated[float, Ge(0), Le(1)] = 0.5
    """Share of the teacher in the loss. The labels have the rest."""

    def __post_init__(self) -> None:
        check_fields(self)

    def distillation(self) -> DistillationConfig:
        return DistillationConfig(loss=self.loss, temperature=self.temperature, weight=self.teacher_weight)
