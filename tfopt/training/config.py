"""Settings of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from tfopt.errors import ConfigError, unknown_name
from tfopt.settings.flags import BY_NAME
from tfopt.settings.validation import check_fields, check_name

AtLeastOne = Annotated[int, Ge(1)]
PRECISIONS = ("auto", "float32", "mixed_bfloat16", "mixed_float16")
STRATEGIES = ("auto", "none", "mirrored", "multi_worker", "pipeline")
COMMUNICATIONS = ("auto", "nccl", "hierarchical_copy", "ring")
AUTO_SHARDS = ("auto", "data", "file", "off")
# Those of Keras that need no other optimizer to wrap; written out, so that settings can be read without Keras.
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
# Modes that train in fit on TensorFlow, with XLA, on replicas and in mixed precision, to the same weights.
REMAT_MODES = ("activations",)
_REMAT_FAILS = {
    "full": "TensorFlow's recomputation takes no keyword arguments, and Keras passes training=... to the model",
    "larger_than": "Keras applies it to the model itself, whose training=... TensorFlow's recomputation does not take",
    "list_of_layers": "it fails for layers that take training=..., Dense among them, and for all in mixed precision",
}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How to train. "auto" is decided by `tfopt.plan`, which gives the reason.

    Raises:
        ConfigError: A value is out of range or a name is unknown.
    Example:
        >>> TrainingConfig(epochs=5, precision="float32").jit_compile
        'auto'
    """

    epochs: AtLeastOne = 30
    """Passes over the training data."""
    global_batch_size: AtLeastOne = 64
    """Examples per step, over all replicas together."""
    optimizer: Annotated[str | Any, BY_NAME] = "adam"
    """Name of a Keras optimizer; in Python also the object, which then brings its own learning rate."""
    learning_rate: Annotated[float, Gt(0), Lt(math.inf)] = 1e-3
    """Learning rate at the start."""
    decay: Literal["cosine", "constant"] = "cosine"
    """How the learning rate changes until the last step: along a half cosine to zero, or not at all."""
    precision: Literal["auto", "float32", "mixed_bfloat16", "mixed_float16"] = "auto"
    """Dtype policy of the layers."""
    jit_compile: Literal["auto"] | bool = "auto"
    """Whether XLA compiles the training step."""
    strategy: Annotated[str | Any, BY_NAME] = "auto"
    """auto, none, mirrored (every visible GPU a replica), multi_worker (the cluster that TF_CONFIG or Slurm describes)
    or pipeline (the model split over the GPUs); in Python also a tf.distribute strategy."""
    communication: Literal["auto", "nccl", "hierarchical_copy", "ring"] = "auto"
    """How replicas sum gradients: nccl, hierarchical_copy (mirrored only), ring (multi_worker only)."""
    accumulate: AtLeastOne = 1
    """Micro-batches per step, one after the other: a step's memory is that of one of them."""
    remat: Literal["activations"] | None = None
    """What to compute again in the backward pass, to keep less in memory; nothing if None."""
    sparse_embedding_gradients: bool = False
    """Whether optimizers take an embedding's gradient as Keras' own step gives it: in parts, one for each time that a
    batch names a row, in place of the row's sum. For one device without micro-batches."""
    steps_per_execution: Literal["auto"] | AtLeastOne = "auto"
    """Steps run per call into TensorFlow; callbacks are called that often only."""
    prefetch: Literal["auto"] | AtLeastOne = "auto"
    """Batches made ready ahead of the step."""
    drop_remainder: bool = False
    """Leave out the last, smaller batch of an epoch, so that XLA compiles for one shape."""
    auto_shard: Literal["auto", "data", "file", "off"] = "auto"
    """How the data is divided among workers: auto and data give each a part of every batch, file gives each its own
    files, off gives all of it to all."""
    pipeline_devices: tuple[str, ...] = ()
    """Where the stages of a pipeline go; all GPUs if empty."""
    pipeline_cuts: tuple[str, ...] = ()
    """Names of the layers that begin the second and later stages; balanced by bytes if empty."""
    micro_batches: Literal["auto"] | AtLeastOne = "auto"
    """Micro-batches of a pipeline, side by side on different stages; auto is four for each stage."""
    checkpoint_dir: str | None = None
    """Where the training is saved while it runs, and resumed from; nowhere if None."""
    checkpoint_every: Literal["epoch"] | AtLeastOne = "epoch"
    """How often: after every epoch, or after so many steps."""
    keep_checkpoints: AtLeastOne = 3
    """How many stay; older ones are removed."""
    resume: Literal["auto"] | bool = "auto"
    """auto goes on from the newest checkpoint if there is one, true insists on one, false on an empty directory."""
    stop_on_nan: bool = True
    """End the training with the likely cause when the loss is not finite."""
    memory_growth: bool = True
    """Take GPU memory as it is needed, instead of all of it."""
    tensor_float_32: Literal["auto"] | bool = "auto"
    """Whether float32 matrix products may round their inputs to TensorFloat-32, on GPUs that have it."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    """Of shuffling and, in a recipe, of initial weights and dropout."""

    def __post_init__(self) -> None:
        check_remat(self.remat)
        check_fields(self)
        name = self.optimizer.lower() if isinstance(self.optimizer, str) else self.optimizer  # Keras takes "Adam" too
        check_name("optimizer", name, OPTIMIZERS, or_a="an instance of Optimizer", accepts=_is_optimizer)
        check_name("strategy", self.strategy, STRATEGIES, or_a="an instance of Strategy", accepts=_is_strategy)
        if self.checkpoint_dir is not None and not str(self.checkpoint_dir).strip():
            raise ConfigError(
                f"checkpoint_dir must name a directory. Received: checkpoint_dir={self.checkpoint_dir!r}. "
                "Name one, or leave it at None for no checkpoints."
            )
        if self.resume is True and self.checkpoint_dir is None:
            raise ConfigError(
                "checkpoint_dir must be given with resume=True. Received: checkpoint_dir=None. "
                "Name the directory that holds the checkpoints."
            )


def check_remat(mode: str | None) -> None:
    """Raises ConfigError unless a rematerialisation mode, or None, works in `fit` on TensorFlow.

    Example:
        >>> check_remat("activations")
    """
    if mode in _REMAT_FAILS:
        raise ConfigError(
            f"remat must be one of {', '.join(map(repr, REMAT_MODES))} or None. Received: remat={mode!r}. "
            f"In fit on TensorFlow it fails: {_REMAT_FAILS[mode]}. Use 'activations', or accumulate gradients."
        )
    if mode is not None and mode not in REMAT_MODES:
        raise unknown_name("remat", str(mode), REMAT_MODES)


def _is_optimizer(value: Any) -> bool:
    import keras  # names are checked without it

    return isinstance(value, keras.optimizers.Optimizer)


def _is_strategy(value: Any) -> bool:
    import keras  # names are checked without them
    import tensorflow as tf

    if isinstance(value, keras.distribution.DataParallel | keras.distribution.ModelParallel):
        raise ConfigError(
            "strategy must be a tf.distribute strategy: on TensorFlow, Keras accepts a keras.distribution object "
            f"and does nothing with it. Received: strategy={value!r}. Set strategy='mirrored'."
        )
    return isinstance(value, tf.distribute.Strategy)
