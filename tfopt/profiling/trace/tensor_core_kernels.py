"""Which kernels of NVIDIA's libraries use tensor cores, told by their names.

A name holds the shape of the matrix instruction: `h884` of Volta, `s1688` of Turing, `s16816` of Ampere. Newer kernels
hold the instruction (`hmma`, `wgmma`), the kind of operation (`tensorop`) or the family (`xmma`, `nvjet`). A kernel of
these families that computes with ordinary arithmetic says `ffma` or `simt`. Triton's names tell nothing.
"""

from __future__ import annotations

import re

_TENSOR_CORES = re.compile(
    r"[a-z](?:884|1688|16816|8816|8832|16832|16864)(?!\d)|[hiq]mma|w?gmma|utcmma|tcgen05|wmma|tensorop|xmma|nvjet"
)
_ORDINARY = re.compile(r"ffma|simt|dfma")
_UNKNOWN = re.compile(r"^(?:triton_)?gemm_fusion")


def uses_tensor_cores(kernel: str) -> bool | None:
    """Returns whether a kernel uses tensor cores, or None if its name does not say.

    Reference:
        XProf, kernel_stats_utils.cc (IsKernelUsingTensorCore): a list of such names, up to Ampere.
    Example:
        >>> uses_tensor_cores("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn")
        True
        >>> uses_tensor_cores("ampere_sgemm_128x64_nn"), uses_tensor_cores("gemm_fusion_dot_12")
        (False, None)
    """
    name = kernel.lower()
    if _ORDINARY.search(name):
        return False
    if _TENSOR_CORES.search(name):
        return True
    return None if _UNKNOWN.search(name) else False
