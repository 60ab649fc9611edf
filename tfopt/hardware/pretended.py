"""Another machine in the place of this one, so that decisions and tests for it can be tried here.

The environment variable TFOPT_PRETEND_HARDWARE replaces what `detect` and `has_vnni` find, in the process and in those
that it starts: a processor ("avx2", "vnni", "amx"), or a GPU of the table ("A100"). Decisions follow the pretended
machine. What computes is still this one, and the names of the processor and of the GPU say so wherever they appear.
"""

from __future__ import annotations

import os

from tfopt.errors import ConfigError
from tfopt.hardware.gpus import GPU_CARDS, Gpu, card_name

VARIABLE = "TFOPT_PRETEND_HARDWARE"

_AVX512 = ("avx2", "avx512f", "avx512_vnni")
_PROCESSORS: dict[str, tuple[str, ...]] = {
    "avx2": ("avx2",),
    "vnni": _AVX512,
    "amx": (*_AVX512, "avx512_bf16", "amx_bf16", "amx_int8"),
}


def pretended_cpu() -> tuple[str, tuple[str, ...]] | None:
    """Returns the name and the features of the pretended processor, or None if it is this machine's.

    Raises:
        ConfigError: The variable names neither a processor nor a GPU.
    """
    name = _asked()
    if name.lower() not in _PROCESSORS:
        return None
    return f"pretended {name.lower()}", _PROCESSORS[name.lower()]


def pretended_gpu() -> Gpu | None:
    """Returns the pretended GPU, or None if the GPUs are this machine's.

    Raises:
        ConfigError: The variable names neither a processor nor a GPU.
    """
    name = _asked()
    if not name or name.lower() in _PROCESSORS:
        return None
    card = GPU_CARDS[card_name(name)]
    return Gpu(
        name=f"pretended {name}",
        compute_capability=card.compute_capability,
        memory_bytes=card.memory_bytes,
        peak_tflops=dict(card.peak_tflops),
    )


def _asked() -> str:
    name = os.environ.get(VARIABLE, "").strip()
    if name and name.lower() not in _PROCESSORS:
        try:
            card_name(name)
        except ConfigError as error:
            raise ConfigError(
                f"{VARIABLE} must be one of {', '.join(_PROCESSORS)}, or a GPU of the table ({', '.join(GPU_CARDS)}). "
                f"Received: {VARIABLE}={name!r}. Unset it to use this machine's own hardware."
            ) from error
    return name
