"""Memory of the device: how TensorFlow takes it, what to lower when it runs out, and what may be computed twice.

Rematerialisation drops values in the forward pass and computes them again for the gradient. Of the modes that
`keras.RematScope` has, only "activations" survives `fit` on TensorFlow: it computes activation functions twice. It
keeps what goes into the activation, and the next layer keeps what comes out; without it, relu keeps the latter alone.
So it lowers the peak for activations made of several operations and raises it for relu. Measured on a CPU, 24 layers:
Dense with gelu 0.54 times the memory, convolutions with swish 1.0 times, both with relu 1.8 to 1.9 times.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfopt.hardware import Hardware
from tfopt.training.config import check_remat

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


def set_memory_growth() -> tuple[bool | None, str]:
    """Makes TensorFlow take GPU memory as it needs it, where by default it takes nearly all of each GPU at once.

    Returns: whether it is on for every GPU, or None where there is none, and the reason. Once a GPU is in use nothing
        can be changed; the reason then says so.
    Example:
        >>> value, reason = set_memory_growth()
        >>> value in (True, False, None) and bool(reason)
        True
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
    except ValueError as error:  # virtual devices have a fixed share
        return False, f"TensorFlow refuses: {error}"
    return True, "memory is taken as needed, so that other processes keep theirs"


def tensor_float_32(hardware: Hardware) -> tuple[bool, str]:
    """Returns whether TensorFlow may use TensorFloat-32 for float32 products, and whether that has an effect here.

    It rounds the factors to 10 bits of mantissa and is on by default; only GPUs since Ampere have it.

    Example:
        >>> tensor_float_32(Hardware(logical_cores=2, memory_bytes=2**33, tensorflow_version="2.21.0"))
        (True, 'no effect: no GPU')
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
    """Switches TensorFloat-32 on or off for what is run inside, and puts back what was set.

    Example:
        >>> with tensor_float_32_scope(False):
        ...     tf.config.experimental.tensor_float_32_execution_enabled()
        False
    """
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(enabled)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


@contextlib.contextmanager
def remat_scope(mode: str | None) -> Iterator[None]:
    """Builds layers that are rematerialised in training: their choice is made when they are constructed.

    Args:
        mode: One of REMAT_MODES, or None for none. "activations" saves memory with gelu and the like, not with relu.
    Raises:
        ConfigError: The mode is unknown, or Keras has it and it fails in `fit` on TensorFlow.
    Example:
        >>> with remat_scope("activations"):
        ...     layer = keras.layers.Dense(8, activation="gelu")
        >>> remat_scope("full").__enter__()
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: remat must be one of 'activations' or None. Received: remat='full'. ...
    """
    check_remat(mode)
    with keras.RematScope(mode=mode) if mode else contextlib.nullcontext():
        yield


def out_of_memory_message(
    error: BaseException,
    *,
    global_batch_size: int,
    replicas: int,
    accumulate: int,
    precision: str,
    remat: str | None,
    hardware: Hardware,
) -> str:
    """Returns what ran out of memory and what to lower, in the order in which it costs least.

    Args:
        error: TensorFlow's ResourceExhaustedError.
        global_batch_size: Examples per step over all replicas.
        replicas: How many share them.
        accumulate: Micro-batches that a replica's share is split into.
        precision: Name of the dtype policy.
        remat: The rematerialisation mode, or None.
        hardware: What it ran on.
    Example:
        >>> error = tf.errors.ResourceExhaustedError(None, None, "Out of memory while trying to allocate 2.00GiB.")
        >>> machine = Hardware(logical_cores=2, memory_bytes=8 * 2**30, tensorflow_version="2.21.0")
        >>> print(out_of_memory_message(error, global_batch_size=64, replicas=1, accumulate=1, precision="float32",
        ...                             remat=None, hardware=machine))
        Out of memory: 2.0 GiB could not be allocated (machine: 8.0 GiB) with 64 examples on each replica at a time.
        Lower it, the first that suits:
          accumulate=2: 32 examples at a time; the same gradients, save for batch normalization
          remat='activations': computes activation functions such as gelu twice; no gain with relu
          global_batch_size=32: half the examples; lower the learning rate with it
    """
    batch = max(1, global_batch_size // (replicas * accumulate))
    lines = [
        f"Out of memory: {_what(str(error))} ({_memory(str(error), hardware)}) "
        f"with {batch} examples on each replica at a time.",
        "Lower it, the first that suits:",
    ]
    finer = 2 ** accumulate.bit_length()  # the next power of two
    if global_batch_size // (replicas * finer) >= 1:
        at_a_time = global_batch_size // (replicas * finer)
        lines.append(
            f"  accumulate={finer}: {at_a_time} examples at a time; the same gradients, save for batch normalization"
        )
    if remat is None:
        lines.append("  remat='activations': computes activation functions such as gelu twice; no gain with relu")
    half = _half_precision(precision, hardware)
    if half:
        lines.append(f"  precision={half!r}: activations take half the bytes")
    if global_batch_size >= 2 * replicas:
        lower = global_batch_size // 2 // replicas * replicas
        lines.append(f"  global_batch_size={lower}: half the examples; lower the learning rate with it")
    if len(lines) == 2:
        lines.append(
            "  a smaller model, or strategy='pipeline' to split it over devices: nothing else is left to lower"
        )
    return "\n".join(lines)


def _what(message: str) -> str:
    tensor = re.search(r"allocating tensor with shape\[([\d,]*)\] and type (\w+)", message)
    if tensor:
        dtype = tf.dtypes.as_dtype({"float": "float32", "double": "float64"}.get(tensor[2], tensor[2]))
        count = 1
        for size in filter(None, tensor[1].split(",")):
            count *= int(size)
        node = re.search(r"\{\{node ([^}]+)\}\}", message)
        place = f" at {node[1]}" if node else ""
        return (
            f"a {dtype.name} tensor of shape [{tensor[1]}], {_size(count * dtype.size)},{place} could not be allocated"
        )
    amount = re.search(r"allocate ([\d.]+) ?([KMGTP]?i?B|bytes)", message)
    if amount:
        return f"{_size(float(amount[1]) * _UNITS.get(amount[2], 1))} could not be allocated"
    return "TensorFlow could not allocate a tensor"


def _memory(message: str, hardware: Hardware) -> str:
    device = re.search(r"/device:GPU:(\d+)", message)
    on_cpu = "/device:CPU:" in message or not hardware.gpus
    if on_cpu and not device:
        return f"machine: {_size(hardware.memory_bytes)}"
    index = int(device[1]) if device else 0
    gpu = hardware.gpus[index] if index < len(hardware.gpus) else None
    if gpu is None or gpu.memory_bytes is None:
        return f"GPU {index}: memory unavailable"
    return f"GPU {index}, {gpu.name}: {_size(gpu.memory_bytes)}"


def _half_precision(precision: str, hardware: Hardware) -> str | None:
    """The policy that halves activations where the device is not slowed down by it; a CPU is."""
    if precision != "float32" or not hardware.gpus:
        return None
    least = min(gpu.compute_capability or (0, 0) for gpu in hardware.gpus)
    return "mixed_bfloat16" if least >= (8, 0) else "mixed_float16"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} PiB"
