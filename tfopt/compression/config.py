"""Settings of a compression, and the options of the command `tfopt compress`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated

import tomli_w
import tyro
from annotated_types import Ge, Gt, Lt, MinLen

from tfopt.data.augment.config import AugmentConfig
from tfopt.data.config import DataConfig
from tfopt.distillation.config import TeacherConfig
from tfopt.errors import ConfigError
from tfopt.exporting.config import Format, Int8Nodes
from tfopt.pruning.config import StructuredPruningConfig
from tfopt.quantization.config import QuantizationConfig
from tfopt.recipe import Recipe
from tfopt.recipe.tables import changed_settings
from tfopt.settings.flags import stages
from tfopt.settings.validation import check_fields
from tfopt.tasks.scorer import check_metric
from tfopt.training.config import TrainingConfig

DROP, BYTES, MEMORY = "score drop", "bytes", "memory bytes"


def latency_at(batch_size: int) -> str:
    """Returns the name of the latency of calls of a batch size.

    Example:
        >>> latency_at(8)
        'ms at batch 8'
    """
    return f"ms at batch {batch_size}"


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """What a smaller model may cost, how long to search for it, and how it is made.

    Raises:
        ConfigError: A value is out of range, a batch size is named twice, or the latencies are not as many as these.
    Example:
        >>> CompressionConfig(max_score_drop=0.005, max_latency_ms=(2.0,), batch_sizes=(8,)).budget
        {'score drop': 0.005, 'ms at batch 8': 2.0}
    """

    max_score_drop: Annotated[float, Ge(0), Lt(math.inf)] | None = None
    """Largest loss of the metric, for example 0.005 for half a point of accuracy. None sets no bound."""
    max_latency_ms: tuple[Annotated[float, Gt(0), Lt(math.inf)], ...] = ()
    """Largest median time of a call on this machine, one for each of batch_sizes. By default there is no bound."""
    max_bytes: Annotated[int, Ge(1)] | None = None
    """Largest sum of the sizes of the artifact's files. None sets no bound."""
    max_memory_bytes: Annotated[int, Ge(1)] | None = None
    """Largest peak memory of a process that serves the artifact, its runtime included. None sets no bound."""
    batch_sizes: Annotated[tuple[Annotated[int, Ge(1)], ...], MinLen(1)] = (1,)
    """Numbers of examples in the timed calls, each once."""
    metric: str = "accuracy"
    """Metric of the loss of score, as in QuantizationConfig.metric, by its name."""
    time_limit_s: Annotated[float, Gt(0), Lt(math.inf)] = 600.0
    """Seconds after which no trial begins, and one that still runs is ended and not counted. The preparation before the
    trials takes of this time too, but is not interrupted."""
    trial_limit_s: Annotated[float, Gt(0), Lt(math.inf)] | None = None
    """Seconds after which a single trial is ended and counts as failed. None means half of the time for the first and
    all that is left for the others; one that is ended so may be tried again by a later call."""
    max_trials: Annotated[int, Ge(0)] | None = None
    """Largest number of models that are trained. None means as many as the time allows."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    """Seed of the proposals and of the training."""
    shrink: StructuredPruningConfig = field(default_factory=StructuredPruningConfig)
    """How channels are removed: criterion, round_to, max_ratio, exclude, and the epochs and the learning rate of the
    training afterwards. The search chooses the amounts."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Settings of that training: optimizer, batch size, precision, XLA. Its epochs are those of shrink."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """Augmentation of that training. By default none."""
    distillation: TeacherConfig | None = field(default_factory=TeacherConfig)
    """The teacher in that training, by default the given model. None trains on the labels alone."""
    quantization: QuantizationConfig | None = field(default_factory=QuantizationConfig)
    """Settings of int8. None keeps float32."""
    int8_nodes: Int8Nodes = "faster"
    """Nodes that run in int8, as in ExportConfig. The weights of the others are stored in int8 in any case."""
    format: Format = "saved_model"
    """Format of the artifacts, in which they are measured."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_metric(self.metric)
        if len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise ConfigError(
                f"batch_sizes must differ from each other. Received: batch_sizes={self.batch_sizes}. Name each once."
            )
        if self.max_latency_ms and len(self.max_latency_ms) != len(self.batch_sizes):
            raise ConfigError(
                f"max_latency_ms must have one time for each of batch_sizes. Received: "
                f"max_latency_ms={self.max_latency_ms}, batch_sizes={self.batch_sizes}. Give both the same length."
            )
        for name, stage in (("shrink", self.shrink), ("quantization", self.quantization)):
            if getattr(stage, "training", False) or getattr(stage, "rounds", 1) > 1:
                raise ConfigError(
                    f"{name} of a compression works at once. Received: {name} with "
                    f"{'training=True' if name == 'quantization' else 'rounds > 1'}. Leave it out."
                )
        plain = self.shrink.with_ratios({})
        chosen = [each.name for each in fields(plain) if getattr(self.shrink, each.name) != getattr(plain, each.name)]
        if chosen:
            received = ", ".join(f"{name}={getattr(self.shrink, name)!r}" for name in chosen)
            raise ConfigError(
                f"The search of a compression chooses how many channels each group loses. Received: shrink with "
                f"{received}. Leave it out; max_ratio bounds what a group may lose."
            )
        taught = self.distillation
        if taught is not None and (taught.teacher_form or taught.teacher_cache):
            raise ConfigError(
                "The teacher of a compression must be the given model or a file, and it runs in the steps. Received: "
                f"teacher_form={taught.teacher_form!r}, teacher_cache={taught.teacher_cache!r}. Leave both out."
            )
        if self.augment.mixup or self.augment.cutmix:
            raise ConfigError(
                "mixup and cutmix need a loss of shares, which the model's own need not be. Received: "
                f"mixup={self.augment.mixup:g}, cutmix={self.augment.cutmix:g}. Set both to 0."
            )

    @property
    def budget(self) -> dict[str, float]:
        """The bounds, by the names of the figures."""
        latencies = {latency_at(size): ms for size, ms in zip(self.batch_sizes, self.max_latency_ms, strict=False)}
        bounds = {DROP: self.max_score_drop, **latencies, BYTES: self.max_bytes, MEMORY: self.max_memory_bytes}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def recipe(self, name: str, ratios: Mapping[str, float]) -> Recipe:
        """Returns what makes one smaller model of the given one, as a recipe that TOML can hold.

        Args:
            name: The name of the recipe.
            ratios: The share of the channels that each group loses; without any, nothing is removed or trained.
        """
        return Recipe(
            name=name,
            data=DataConfig(augment=self.augment),
            training=replace(self.training, seed=self.seed),
            shrink=self.shrink.with_ratios(ratios) if ratios else None,
            distillation=self.distillation if ratios else None,
            quantization=self.quantization,
            int8_nodes=self.int8_nodes,
            batch_sizes=self.batch_sizes,
            formats=(self.format,),
        )


def changes_in(recipe: Recipe) -> str:
    """Returns a recipe as TOML that can be laid over that of the model: other stages are off, and no model is named.

    Example:
        >>> print(changes_in(Recipe(name="small", quantization=QuantizationConfig(observer="minmax"))))
        name = "small"
        int8_nodes = "faster"
        batch_sizes = [
            1,
            8,
        ]
        shrink = false
        pruning = false
        clustering = false
        distillation = false
        <BLANKLINE>
        [quantization]
        observer = "minmax"
        <BLANKLINE>
    """
    off = {stage: False for stage in stages(Recipe) if getattr(recipe, stage) is None}
    nodes = {"int8_nodes": recipe.int8_nodes, "batch_sizes": list(recipe.batch_sizes)}
    return tomli_w.dumps({"name": recipe.name, **nodes, **off, **changed_settings(recipe)})


@dataclass(frozen=True, kw_only=True)
class CompressOptions(CompressionConfig):
    """Searches for smaller and faster artifacts of a model within a budget, by measurement on this machine.

    Called again with the same OUT after a stop, it goes on. The exit code is 1 if no artifact that was found keeps the
    budget, and 2 if the smallest model shows before any training that none can.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME|FILE")]
    """A recipe, whose model is trained first and whose settings are the defaults of shrink, training and augment; or a
    .keras file of a trained and compiled model."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Directory for the trials and their artifacts: new, or of an earlier call."""
    data: str | None = None
    """Examples of a .keras file: the name of a source, or a recipe."""
    json: bool = False
    """Print JSON."""
