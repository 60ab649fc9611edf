"""Settings of training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from tfopt.errors import ConfigError, unknown_name
from tfopt.settings.flags import BY_NAME, Arguments
from tfopt.settings.validation import check_fields, check_name

AtLeastOne = Annotated[int, Ge(1)]
PRECISIONS = ("auto", "float32", "mixed_bfloat16", "mixed_float16")
STRATEGIES = ("auto", "none", "mirrored", "multi_worker", "pipeline")
COMMUNICATIONS = ("auto", "nccl", "hierarchical_copy", "ring")
# The optimizers of Keras that do not wrap another optimizer. Listed here, so that settings can be read without Keras.
OPTIMIZERS = (
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "ftrl",
    "lamb",
    "lion",
    "muon",
    "nadam",
    "rmsprop",
    "schedulefreeadamw",
    "sgd",
)
# Modes that work in fit on TensorFlow, with XLA, on replicas and in mixed precision, and give the same weights.
REMAT_MODES = ("activations",)
_REMAT_FAILS = {
    "full": "TensorFlow's recomputation accepts no keyword arguments, and Keras passes training=... to the model",
    "larger_than": "Keras applies it to the whole model with training=..., which TensorFlow's recomputation refuses",
    "list_of_layers": "it fails for layers with training=..., such as Dense, and for all layers in mixed precision",
}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of training. `tfopt.plan` replaces each "auto" by a value and gives the reason.

    Raises:
        ConfigError: A value is out of range or a name is unknown.
    Example:
        >>> TrainingConfig(epochs=5, precision="float32").jit_compile
        'auto'
    """

    epochs: AtLeastOne = 30
    """Number of passes over the training data."""
    steps_per_epoch: AtLeastOne | None = None
    """Number of steps in an epoch. The data then repeats without end. None ends an epoch with the data, whose number of
    examples must be known."""
    global_batch_size: AtLeastOne = 64
    """Examples per step, the sum over all replicas."""
    optimizer: Annotated[str | Any, BY_NAME] = "adam"
    """Name of a Keras optimizer. In Python also an optimizer object, which has its own learning rate."""
    learning_rate: Annotated[float, Gt(0), Lt(math.inf)] = 1e-3
    """Highest learning rate: that at the start, or at the end of the warm-up."""
    decay: Literal["cosine", "constant"] = "cosine"
    """Change of the learning rate until the last step: cosine falls to zero along half a cosine, constant stays."""
    warmup_epochs: Annotated[float, Ge(0), Lt(math.inf)] = 0.0
    """Number of epochs, or a part of one, in which the learning rate rises from zero in a straight line. 0 is off."""
    base_batch_size: AtLeastOne | None = None
    """Batch size that learning_rate was chosen for. With another global_batch_size the rate is scaled: in proportion
    for sgd, by the square root of the ratio for other optimizers. None uses learning_rate as it is."""
    optimizer_arguments: Arguments = field(default_factory=dict)
    """More arguments of a named optimizer, for example momentum=0.9 nesterov=true global_clipnorm=1.0."""
    weight_decay: Annotated[float, Ge(0), Lt(1)] | None = None
    """Share of its value that each weight loses per step, times the learning rate. Biases, and the scales and offsets
    of normalization layers, lose nothing. None is the default of the optimizer: 0.004 for adamw, 0 for most others."""
    label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of each target that is spread evenly over all classes. 0 is off."""
    ema_momentum: Annotated[float, Gt(0), Lt(1)] | None = None
    """Momentum of the moving average of the weights, which the model has after the training, for example 0.999. None
    keeps the weights of the last step."""
    precision: Literal["auto", "float32", "mixed_bfloat16", "mixed_float16"] = "auto"
    """Dtype policy of the layers."""
    jit_compile: Literal["auto"] | bool = "auto"
    """Whether XLA compiles the training step."""
    strategy: Annotated[str | Any, BY_NAME] = "auto"
    """Distribution: auto, none, mirrored (a replica on each visible GPU), multi_worker (the cluster that TF_CONFIG or
    Slurm describes) or pipeline (the model split over the GPUs). In Python also a tf.distribute strategy."""
    communication: Literal["auto", "nccl", "hierarchical_copy", "ring"] = "auto"
    """Method by which replicas sum gradients: nccl, hierarchical_copy (mirrored only) or ring (multi_worker only)."""
    accumulate: AtLeastOne = 1
    """Number of micro-batches per step. They run one after the other, so a step needs the memory of one micro-batch."""
    remat: Literal["activations"] | None = None
    """Values that the backward pass computes again, so that less is kept in memory. None computes nothing again."""
    sparse_embedding_gradients: bool = False
    """Whether optimizers get the gradient of an embedding as in Keras' own step: one part for each time that a row
    occurs in a batch, instead of the sum for each row. For one device without micro-batches."""
    steps_per_execution: Literal["auto"] | AtLeastOne = "auto"
    """Number of steps in one call into TensorFlow. Callbacks run once per call."""
    prefetch: Literal["auto"] | AtLeastOne = "auto"
    """Number of batches to prepare before the training step needs them."""
    drop_remainder: bool = False
    """Whether to leave out a smaller last batch of an epoch, so that XLA compiles for one shape."""
    auto_shard: Literal["auto", "data", "file", "off"] = "auto"
    """Division of the data among workers: auto and data give each worker a part of every batch, file gives each worker
    its own files, off gives each worker all the data."""
    pipeline_devices: tuple[str, ...] = ()
    """Devices for the stages of a pipeline. If empty, all GPUs."""
    pipeline_cuts: tuple[str, ...] = ()
    """Names of the layers that begin the second and later stages. If empty, the stages are balanced by bytes."""
    micro_batches: Literal["auto"] | AtLeastOne = "auto"
    """Number of micro-batches in a pipeline. They run at the same time on different stages. auto is four per stage."""
    checkpoint_dir: str | None = None
    """Directory of the checkpoints, from which a stopped training resumes. None saves no checkpoints."""
    checkpoint_every: Literal["epoch"] | AtLeastOne = "epoch"
    """Interval between checkpoints: "epoch", or a number of steps."""
    keep_checkpoints: AtLeastOne = 3
    """Number of checkpoints to keep. Older ones are removed."""
    resume: Literal["auto"] | bool = "auto"
    """Whether to resume: auto uses the newest checkpoint if there is one, True requires a checkpoint, False requires a
    directory without checkpoints."""
    stop_on_nan: bool = True
    """Whether to end the training with an error that names the likely cause when the loss is not finite."""
    memory_growth: bool = True
    """Whether to take GPU memory when it is needed, instead of all of it at the start."""
    tensor_float_32: Literal["auto"] | bool = "auto"
    """Whether float32 matrix products may round their inputs to TensorFloat-32 on GPUs that support it."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    """Seed of the shuffling and, in a recipe, of initial weights and dropout."""

    def __post_init__(self) -> None:
        check_remat(self.remat)
        check_fields(self)
        name = self.optimizer.lower() if isinstance(self.optimizer, str) else self.optimizer  # Keras takes "Adam" too
        check_name("optimizer", name, OPTIMIZERS, or_a="an instance of Optimizer", accepts=_is_optimizer)
        _check_of_name(self)
        check_name("strategy", self.strategy, STRATEGIES, or_a="an instance of Strategy", accepts=_is_strategy)
        if self.checkpoint_dir is not None and not str(self.checkpoint_dir).strip():
            raise ConfigError(
                f"checkpoint_dir must name a directory. Received: checkpoint_dir={self.checkpoint_dir!r}. "
                "Name a directory, or set None for no checkpoints."
            )
        if self.resume is True and self.checkpoint_dir is None:
            raise ConfigError(
                "checkpoint_dir must be given with resume=True. Received: checkpoint_dir=None. "
                "Name the directory that holds the checkpoints."
            )


def _check_of_name(config: TrainingConfig) -> None:
    """Raises ConfigError if a setting that makes a named optimizer comes with an optimizer object."""
    if isinstance(config.optimizer, str):
        reserved = {"learning_rate", "weight_decay", "use_ema", "ema_momentum", "name"}
        given = {name: value for name, value in sorted(config.optimizer_arguments.items()) if name in reserved}
        if given:
            raise ConfigError(
                "optimizer_arguments must hold what has no setting of its own. Received: "
                f"optimizer_arguments={given}. Set learning_rate, weight_decay or ema_momentum of the training."
            )
        return
    for name in ("base_batch_size", "optimizer_arguments", "weight_decay", "ema_momentum", "warmup_epochs"):
        if getattr(config, name):
            raise ConfigError(
                f"{name} must be left out with an optimizer object, which has its own settings. Received: "
                f"{name}={getattr(config, name)!r}. Name the optimizer, for example optimizer='adamw'."
            )


def check_remat(mode: str | None) -> None:
    """Raises ConfigError unless a rematerialisation mode, or None, works in `fit` on TensorFlow."""
    if isinstance(mode, str) and mode in _REMAT_FAILS:
        raise ConfigError(
            f"remat must be one of {', '.join(map(repr, REMAT_MODES))} or None. Received: remat={mode!r}. "
            f"This mode fails in fit on TensorFlow: {_REMAT_FAILS[mode]}. Use 'activations', or accumulate gradients."
        )
    if mode is not None and mode not in REMAT_MODES:
        raise unknown_name("remat", str(mode), REMAT_MODES)


def _is_optimizer(value: Any) -> bool:
    import keras  # here, because a name is checked without Keras

    return isinstance(value, keras.optimizers.Optimizer)


def _is_strategy(value: Any) -> bool:
    import keras  # here, because a name is checked without Keras and TensorFlow
    import tensorflow as tf

    if isinstance(value, keras.distribution.DataParallel | keras.distribution.ModelParallel):
        raise ConfigError(
            "strategy must be a tf.distribute strategy: on TensorFlow, Keras accepts a keras.distribution object "
            f"and ignores it. Received: strategy={value!r}. Set strategy='mirrored'."
        )
    return isinstance(value, tf.distribute.Strategy)
