"""Chooses the precision of training."""

from __future__ import annotations

from tfopt.errors import unknown_name
from tfopt.hardware import Hardware
from tfopt.training.config import PRECISIONS


def choose_precision(requested: str, hardware: Hardware) -> tuple[str, str]:
    """Decides the dtype policy and gives the reason.

    A CPU gets bfloat16 only if it has AMX. Measured without AMX: with avx512_bf16, training runs at 0.98x to 1.14x the
    speed of float32; without avx512_bf16, it is 2.5 times slower. If "auto" is half precision, `tfopt.compile` sets the
    outputs of the model to float32.

    Args:
        requested: "auto", or the policy to use. If the hardware does not support that policy, the reason says so.
        hardware: The machine to decide for.
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
            return f"{gpu.name} of compute capability {{}}.{{}} has no {cores} tensor cores".format(
                *gpu.compute_capability
            )
    return None
