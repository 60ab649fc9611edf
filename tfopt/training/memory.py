"""Memory of the device: how TensorFlow allocates it, how to lower its use, and rematerialisation.

Rematerialisation drops values of the forward pass and computes them again for the gradient. `keras.RematScope` has
several modes. Only "activations" works in `fit` on TensorFlow: it computes activation functions twice. It keeps the
input of the activation, and the next layer keeps the output. Without it, relu keeps only the output. So
rematerialisation lowers the peak for activations made of several operations, and raises it for relu. Measured on a CPU
with 24 layers: Dense with gelu 0.54 times the memory, convolutions with swish 1.0 times, both with relu 1.8 to 1.9
times.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfopt.hardware import Hardware
from tfopt.report.formatting import memory_size
from tfopt.training.config import TrainingConfig, check_remat

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


def set_memory_growth() -> tuple[bool | None, str]:
    """Makes TensorFlow allocate GPU memory as it needs it. By default it allocates nearly all of each GPU at once.

    Returns: whether it is on for every GPU, or None if there is no GPU; and the reason. It cannot be changed after
        TensorFlow has used a GPU; the reason then says so.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return None, "no GPU"
    if all(tf.config.experimental.get_memory_growth(gpu) for gpu in gpus):
        return True, "already on"
    try:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        return False, "TensorFlow already started its devices; call set_memory_growth, or tfopt.plan, before using one"
    except ValueError as error:  # virtual devices have a fixed amount of memory
        return False, f"TensorFlow refuses: {error}"
    return True, "memory is taken as needed, so that other processes keep theirs"


def tensor_float_32(hardware: Hardware) -> tuple[bool, str]:
    """Returns whether TensorFlow may use TensorFloat-32 for float32 products, and whether it has an effect here.

    TensorFloat-32 rounds the factors to 10 bits of mantissa. It is on by default. Only GPUs since Ampere have it.
    """
    enabled = bool(tf.config.experimental.tensor_float_32_execution_enabled())
    if not hardware.gpus:
        return enabled, "no effect: no GPU"
    names = [gpu.name for gpu in hardware.gpus if (gpu.compute_capability or (0, 0)) >= (8, 0)]
    if not names:
        unknown = any(gpu.compute_capability is None for gpu in hardware.gpus)
        return enabled, f"no effect: {'compute capability unknown' if unknown else 'needs compute capability 8.0'}"
    if enabled:
        return True, f"TensorFlow's default; float32 products on {names[0]} keep 10 bits of mantissa"
    return False, f"switched off; float32 products on {names[0]} keep all 23 bits and are several times slower"


@contextlib.contextmanager
def tensor_float_32_scope(enabled: bool) -> Iterator[None]:
    """Switches TensorFloat-32 on or off within the scope. Afterwards, the earlier setting is restored."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(enabled)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


@contextlib.contextmanager
def remat_scope(mode: str | None) -> Iterator[None]:
    """Builds layers that are rematerialised in training. A layer reads the mode when it is constructed.

    Raises:
        ConfigError: The mode is unknown, or it fails in `fit` on TensorFlow.
    """
    check_remat(mode)
    with keras.RematScope(mode=mode) if mode else contextlib.nullcontext():
        yield


def out_of_memory_message(
    error: BaseException, config: TrainingConfig, precision: str, replicas: int, hardware: Hardware
) -> str:
    """Returns an error message: which device is out of memory, and which settings to lower, the cheapest first.

    Example:
        >>> error = tf.errors.ResourceExhaustedError(None, None, "Out of memory while trying to allocate 2.00GiB.")
        >>> machine = Hardware(logical_cores=2, memory_bytes=8 * 2**30, tensorflow_version="2.21.0")
        >>> print(out_of_memory_message(error, TrainingConfig(global_batch_size=64), "float32", 1, machine))
        Out of memory: 2.0 GiB could not be allocated (machine: 8.0 GiB) with 64 examples on each replica at a time.
        Lower it, the first that suits:
          accumulate=2: 32 examples at a time; the same gradients, save for batch normalization
          remat='activations': computes activation functions such as gelu twice; no gain with relu
          global_batch_size=32: half the examples; lower the learning rate with it
    """
    global_batch_size, accumulate = config.global_batch_size, config.accumulate
    batch = max(1, global_batch_size // (replicas * accumulate))
    lines = [
        f"Out of memory: {_failed_allocation(str(error))} ({_memory(str(error), hardware)}) "
        f"with {batch} examples on each replica at a time.",
        "Lower it, the first that suits:",
    ]
    finer = 2 ** accumulate.bit_length()  # the next power of two
    if at_a_time := global_batch_size // (replicas * finer):
        lines.append(
            f"  accumulate={finer}: {at_a_time} examples at a time; the same gradients, save for batch normalization"
        )
    if config.remat is None:
        lines.append("  remat='activations': computes activation functions such as gelu twice; no gain with relu")
    if precision == "float32" and hardware.gpus:  # a CPU would be slower
        least = min(gpu.compute_capability or (0, 0) for gpu in hardware.gpus)
        half = "mixed_bfloat16" if least >= (8, 0) else "mixed_float16"
        lines.append(f"  precision={half!r}: activations take half the bytes")
    if global_batch_size >= 2 * replicas:
        lower = global_batch_size // 2 // replicas * replicas
        lines.append(f"  global_batch_size={lower}: half the examples; lower the learning rate with it")
    if len(lines) == 2:
        lines.append(
            "  a smaller model, or strategy='pipeline' to split it over devices: nothing else is left to lower"
        )
    return "\n".join(lines)


def _failed_allocation(message: str) -> str:
    tensor = re.search(r"allocating tensor with shape\[([\d,]*)\] and type (\w+)", message)
    if tensor:
        dtype = tf.dtypes.as_dtype({"float": "float32", "double": "float64"}.get(tensor[2], tensor[2]))
        count = math.prod(int(size) for size in tensor[1].split(",") if size)
        node = re.search(r"\{\{node ([^}]+)\}\}", message)
        place = f" at {node[1]}" if node else ""
        size = memory_size(count * dtype.size)
        return f"a {dtype.name} tensor of shape [{tensor[1]}], {size},{place} could not be allocated"
    amount = re.search(r"allocate ([\d.]+) ?([KMGTP]?i?B|bytes)", message)
    if amount:
        return f"{memory_size(float(amount[1]) * _UNITS.get(amount[2], 1))} could not be allocated"
    return "TensorFlow could not allocate a tensor"


def _memory(message: str, hardware: Hardware) -> str:
    device = re.search(r"/device:GPU:(\d+)", message)
    if not device and ("/device:CPU:" in message or not hardware.gpus):
        return f"machine: {memory_size(hardware.memory_bytes)}"
    index = int(device[1]) if device else 0
    gpu = hardware.gpus[index] if index < len(hardware.gpus) else None
    if gpu is None or gpu.memory_bytes is None:
        return f"GPU {index}: memory unavailable"
    return f"GPU {index}, {gpu.name}: {memory_size(gpu.memory_bytes)}"
