"""What a plan chooses for a setting that is "auto", with the reason, and the settings that cannot train together."""

from __future__ import annotations

from typing import Any, Literal

import keras

from tfopt.errors import ConfigError, unknown_name
from tfopt.hardware import Hardware
from tfopt.training.config import PRECISIONS, TrainingConfig

# Small models gain most from it (benchmarks/plan_choices.py). A larger number gains little and delays callbacks.
STEPS_PER_CALL = 10
FEWER_RETURNS = "fewer returns to Python between steps; 1 in a fit with a callback that acts on each batch"
OVERLAPS = "enough to overlap input and training; tf.data's autotuner makes the end of an epoch wait"
# With M micro-batches, the S stages of a pipeline are idle for (S - 1) / (M + S - 1) of the time: at most a fifth, if
# there are four micro-batches for each stage.
MICRO_BATCHES_PER_STAGE = 4


def choose_precision(requested: str, hardware: Hardware) -> tuple[str, str]:
    """Decides the dtype policy and gives the reason.

    A CPU gets bfloat16 only if it has AMX. Measured without AMX: with avx512_bf16, training runs at 0.98x to 1.14x the
    speed of float32; without avx512_bf16, it is 2.5 times slower. If "auto" is half precision, `tfopt.compile` sets the
    outputs of the model to float32. If the hardware does not support a policy that was asked for, the reason says so.

    Returns: the name of the Keras dtype policy, and the reason.
    Raises:
        ConfigError: The name is unknown.
    Example:
        >>> from tfopt.hardware import Gpu
        >>> gpu = Gpu(name="NVIDIA H100", compute_capability=(9, 0))
        >>> machine = Hardware(logical_cores=8, memory_bytes=2**36, tensorflow_version="2.21.0", gpus=(gpu,))
        >>> print(*choose_precision("auto", machine), sep=": ")
        mixed_bfloat16: compute capability 9.0 has bfloat16 tensor cores, and bfloat16 needs no loss scaling; outputs
        stay float32
    """
    if requested not in PRECISIONS:
        raise unknown_name("precision", str(requested), PRECISIONS)
    if requested != "auto":
        drawback = _drawback(requested, hardware)
        return requested, f"as asked; {drawback}" if drawback else "as asked"
    value, reason = _fastest(hardware)
    return value, reason if value == "float32" else f"{reason}; outputs stay float32"


def choose_augmentation_place(
    requested: str, hardware: Hardware, *, in_stages: bool, cuts_boxes: bool = False
) -> tuple[Literal["host", "device"], str]:
    """Decides whether `tfopt run` augments in the pipeline ("host") or in the training step, and gives the reason."""
    if requested != "auto":
        return "device" if requested == "device" else "host", "as asked"
    if not hardware.gpus:
        return "host", "no GPU; the pipeline augments while the step computes"
    if in_stages:
        return "host", "only the first stage of a pipeline has the images"
    if cuts_boxes:
        return "host", "the boxes of crop_scale are cut while images are decoded"
    return "device", "leaves the processor free for decoding"


def _fastest(hardware: Hardware) -> tuple[str, str]:
    if not hardware.gpus:
        return _for_a_cpu(hardware)
    capabilities = [gpu.compute_capability for gpu in hardware.gpus]
    if any(capability is None for capability in capabilities):
        return "float32", "the GPU's compute capability is unknown"
    least = min(capability for capability in capabilities if capability is not None)  # every replica runs one policy
    name = f"compute capability {least[0]}.{least[1]}"
    if least >= (8, 0):
        return "mixed_bfloat16", f"{name} has bfloat16 tensor cores, and bfloat16 needs no loss scaling"
    if least >= (7, 0):
        return "mixed_float16", f"{name} has float16 tensor cores; the loss is scaled dynamically"
    return "float32", f"{name} has no tensor cores"


def _for_a_cpu(hardware: Hardware) -> tuple[str, str]:
    if "amx_bf16" in hardware.cpu_features:
        return "mixed_bfloat16", "no GPU; the CPU multiplies bfloat16 in AMX tiles"
    if "avx512_bf16" in hardware.cpu_features:
        return "float32", "no GPU; bfloat16 with avx512_bf16 but no AMX was measured at 0.98x to 1.14x of float32"
    return "float32", "no GPU; without AMX or avx512_bf16 bfloat16 slows a CPU down (measured: 2.5 times)"


def _drawback(requested: str, hardware: Hardware) -> str | None:
    """Returns the reason why the requested precision gains nothing on this hardware, or None if it gains."""
    if requested == "float32":
        return None
    if not hardware.gpus:
        if requested == "mixed_float16":
            return "a CPU has no fast float16 and gains nothing from it"
        value, reason = _for_a_cpu(hardware)
        return None if value == requested else reason
    needed, cores = ((7, 0), "float16") if requested == "mixed_float16" else ((8, 0), "bfloat16")
    for gpu in hardware.gpus:
        if gpu.compute_capability is not None and gpu.compute_capability < needed:
            major, minor = gpu.compute_capability
            return f"{gpu.name} of compute capability {major}.{minor} has no {cores} tensor cores"
    return None


def check_floatx() -> None:
    """Raises ConfigError for half precision in Keras' own settings: losses and metrics would be summed up in it."""
    if keras.config.floatx() not in ("float32", "float64"):
        raise ConfigError(
            "keras.config.floatx() must be float32 or float64: Keras sums losses and metrics up in it, and a float16 "
            f"cannot count beyond 2048. Received: {keras.config.floatx()!r}. Call keras.config.set_floatx('float32') "
            "and set precision='mixed_float16' in TrainingConfig."
        )


def choose_jit_compile(config: TrainingConfig, machine: Hardware) -> tuple[bool, str]:
    if config.strategy == "pipeline":
        return False, "XLA compiles for one device, a pipeline has several"
    if not machine.gpus:
        return False, "no GPU; on a CPU XLA slows convolutions down and takes long to start"
    return True, f"XLA fuses the step's small kernels on {machine.gpus[0].name}"


def choose_micro_batches(config: TrainingConfig, stages: int) -> tuple[int, str]:
    count = min(MICRO_BATCHES_PER_STAGE * stages, config.global_batch_size)
    idle = (stages - 1) / (count + stages - 1)
    return count, f"{MICRO_BATCHES_PER_STAGE} for each stage; stages idle {idle:.0%} of the time at the ends of a step"


def batch_reason(config: TrainingConfig, strategy: Any) -> str:
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    size = config.global_batch_size
    if size % replicas:
        lower, upper = size // replicas * replicas, (size // replicas + 1) * replicas
        raise ConfigError(
            f"global_batch_size must be divisible by the number of replicas. "
            f"Received: global_batch_size={size}, {replicas} replicas. "
            f"Use {f'{lower} or {upper}' if lower else upper}."
        )
    share = "one device" if replicas == 1 else f"{size // replicas} on each of {replicas} replicas"
    return f"as asked; {share}"


def rate_reason(config: TrainingConfig, reason: str) -> str:
    fall = "falls along a cosine" if config.decay == "cosine" else "stays"
    rise = f"rises for {config.warmup_epochs:g} epochs, then " if config.warmup_epochs else ""
    return f"{reason}; {rise}{fall}"


def accumulate_reason(config: TrainingConfig, strategy: Any) -> str:
    size = config.global_batch_size // (1 if strategy is None else strategy.num_replicas_in_sync)
    if config.accumulate > size:
        raise ConfigError(
            "accumulate must be at most the examples of a step on one replica. "
            f"Received: accumulate={config.accumulate}, with {size} examples. Set accumulate={size} or less."
        )
    return f"as asked; {-(-size // config.accumulate)} examples at a time, one update for all"


def sparse_gradients_reason(config: TrainingConfig, strategy: Any) -> str:
    several = {
        "strategy='pipeline'": config.strategy == "pipeline",
        f"strategy={type(strategy).__name__}": strategy is not None,
        f"accumulate={config.accumulate}": config.accumulate > 1,
    }
    received = [name for name, is_so in several.items() if is_so]
    if received:
        raise ConfigError(
            "sparse_embedding_gradients needs one device and one micro-batch: each part of a divided batch names a row "
            "by itself, and the update would depend on how the batch is divided. Received: "
            f"sparse_embedding_gradients=True, {', '.join(received)}. Set strategy='none' and accumulate=1, or leave "
            "sparse_embedding_gradients out."
        )
    return "as asked; optimizers square and clip the gradient of a row as often as a batch names it, as in Keras"


def auto_shard_reason(config: TrainingConfig) -> str:
    return {
        "file": "as asked; each worker reads its own files, in an order that a resumed training does not repeat",
        "off": "as asked; each worker reads all data",
    }.get(config.auto_shard, "each worker takes its part of every batch")


def check_pipeline(config: TrainingConfig) -> None:
    """Raises ConfigError for settings that a pipeline cannot have, and for its settings where there is no pipeline."""
    if config.strategy == "pipeline":
        if config.accumulate > 1:
            raise ConfigError(
                "accumulate must be 1 with strategy='pipeline', whose micro-batches do the same. "
                f"Received: accumulate={config.accumulate}. Set micro_batches."
            )
        if config.jit_compile is True:
            raise ConfigError(
                "jit_compile must not be True with strategy='pipeline': XLA compiles for one device. "
                "Received: jit_compile=True. Set jit_compile=False."
            )
        if config.micro_batches != "auto" and config.micro_batches > config.global_batch_size:
            raise ConfigError(
                "micro_batches must be at most global_batch_size. Received: "
                f"micro_batches={config.micro_batches}, global_batch_size={config.global_batch_size}. "
                f"Set micro_batches={config.global_batch_size} or less."
            )
        return
    for name, unset in (("pipeline_devices", ()), ("pipeline_cuts", ()), ("micro_batches", "auto")):
        if getattr(config, name) != unset:
            raise ConfigError(
                f"{name} needs strategy='pipeline'. Received: {name}={getattr(config, name)!r}, "
                f"strategy={config.strategy!r}. Set strategy='pipeline', or leave {name} out."
            )


def checkpoints_reason(config: TrainingConfig) -> str:
    every = "every epoch" if config.checkpoint_every == "epoch" else f"every {config.checkpoint_every} steps"
    how = {"auto": "resumed if there is one", True: "resumed", False: "begun anew"}[config.resume]
    return f"as asked; saved {every}, {config.keep_checkpoints} kept, {how}"
