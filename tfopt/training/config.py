"""Settings of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tfopt.errors import ConfigError, unknown_name
from tfopt.flags import BY_NAME

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

    epochs: int = 30
    """Passes over the training data."""
    global_batch_size: int = 64
    """Examples per step, over all replicas together."""
    optimizer: Annotated[str | Any, BY_NAME] = "adam"
    """Name of a Keras optimizer; in Python also the object, which then brings its own learning rate."""
    learning_rate: float = 1e-3
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
    accumulate: int = 1
    """Micro-batches per step, one after the other: a step's memory is that of one of them."""
    remat: Literal["activations"] | None = None
    """What to compute again in the backward pass, to keep less in memory; nothing if None."""
    sparse_embedding_gradients: bool = False
    """Whether optimizers take an embedding's gradient as Keras' own step gives it: in parts, one for each time that a
    batch names a row, in place of the row's sum. For one device without micro-batches."""
    steps_per_execution: Literal["auto"] | int = "auto"
    """Steps run per call into TensorFlow; callbacks are called that often only."""
    prefetch: Literal["auto"] | int = "auto"
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
    micro_batches: Literal["auto"] | int = "auto"
    """Micro-batches of a pipeline, side by side on different stages; auto is four for each stage."""
    checkpoint_dir: str | None = None
    """Where the training is saved while it runs, and resumed from; nowhere if None."""
    checkpoint_every: Literal["epoch"] | int = "epoch"
    """How often: after every epoch, or after so many steps."""
    keep_checkpoints: int = 3
    """How many stay; older ones are removed."""
    resume: Literal["auto"] | bool = "auto"
    """auto goes on from the newest checkpoint if there is one, true insists on one, false on an empty directory."""
    stop_on_nan: bool = True
    """End the training with the likely cause when the loss is not finite."""
    memory_growth: bool = True
    """Take GPU memory as it is needed, instead of all of it."""
    tensor_float_32: Literal["auto"] | bool = "auto"
    """Whether float32 matrix products may round their inputs to TensorFloat-32, on GPUs that have it."""
    seed: int = 0
    """Of shuffling and, in a recipe, of initial weights and dropout."""

    def __post_init__(self) -> None:
        for name in ("epochs", "global_batch_size", "accumulate", "keep_checkpoints"):
            _at_least_one(name, getattr(self, name))
        for name, word in (
            ("steps_per_execution", "auto"),
            ("prefetch", "auto"),
            ("micro_batches", "auto"),
            ("checkpoint_every", "epoch"),
        ):
            if getattr(self, name) != word:
                _at_least_one(name, getattr(self, name), or_word=word)
        if not _is_number(self.learning_rate) or not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate must be positive. Received: learning_rate={self.learning_rate!r}.")
        if not _is_whole(self.seed) or not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed must be a whole number in [0, 2**32). Received: seed={self.seed!r}.")
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", str(self.precision), PRECISIONS)
        name = self.optimizer.lower() if isinstance(self.optimizer, str) else self.optimizer  # Keras takes "Adam" too
        if isinstance(name, str):
            _check_name("optimizer", name, OPTIMIZERS)
        else:
            _check_optimizer(name)
        if isinstance(self.strategy, str):
            _check_name("strategy", self.strategy, STRATEGIES)
        else:
            _check_strategy(self.strategy)
        for name, known in (("communication", COMMUNICATIONS), ("auto_shard", AUTO_SHARDS)):
            if getattr(self, name) not in known:
                raise unknown_name(name, str(getattr(self, name)), known)
        check_remat(self.remat)
        if self.decay not in ("cosine", "constant"):
            raise unknown_name("decay", str(self.decay), ("cosine", "constant"))
        for name in ("jit_compile", "resume", "tensor_float_32"):
            value = getattr(self, name)
            if value != "auto" and not isinstance(value, bool):
                raise ConfigError(f"{name} must be 'auto', True or False. Received: {name}={value!r}.")
        if not isinstance(self.sparse_embedding_gradients, bool):
            raise ConfigError(
                "sparse_embedding_gradients must be True or False. Received: "
                f"sparse_embedding_gradients={self.sparse_embedding_gradients!r}."
            )
        for name in ("pipeline_devices", "pipeline_cuts"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(item, str) for item in value):
                raise ConfigError(f"{name} must be a tuple of names. Received: {name}={value!r}.")
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


def _at_least_one(name: str, value: Any, *, or_word: str | None = None) -> None:
    if not _is_whole(value) or value < 1:
        rule = f"{or_word!r} or a whole number of at least 1" if or_word else "a whole number of at least 1"
        raise ConfigError(f"{name} must be {rule}. Received: {name}={value!r}.")


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


def _check_name(kind: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise unknown_name(kind, value, known)


def _check_optimizer(value: Any) -> None:
    import keras  # names are checked without it

    if not isinstance(value, keras.optimizers.Optimizer):
        raise ConfigError(f"optimizer must be a name or an instance of Optimizer. Received: optimizer={value!r}.")


def _check_strategy(value: Any) -> None:
    import keras  # names are checked without them
    import tensorflow as tf

    if isinstance(value, keras.distribution.DataParallel | keras.distribution.ModelParallel):
        raise ConfigError(
            "strategy must be a tf.distribute strategy: on TensorFlow, Keras accepts a keras.distribution object "
            f"and does nothing with it. Received: strategy={value!r}. Set strategy='mirrored'."
        )
    if not isinstance(value, tf.distribute.Strategy):
        raise ConfigError(f"strategy must be a name or an instance of Strategy. Received: strategy={value!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
