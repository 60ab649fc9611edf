"""The instructions and the cores of this machine's processor."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from tfopt.hardware.pretended import pretended_cpu

# The instructions that decide which precision is fast on a CPU, by their names in the Linux kernel.
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8")

# The instructions that add products of bytes in 32 bits, and those that each value of oneDNN's limit allows. Any other
# value allows all instructions of the processor.
_BYTE_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8")
_LEFT_BY_LIMIT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sse41", "avx", "avx2", "avx512_core"), ()),
    **dict.fromkeys(("avx2_vnni", "avx2_vnni_2"), ("avx_vnni",)),
    **dict.fromkeys(("avx512_core_vnni", "avx512_core_bf16"), ("avx512_vnni",)),
}


def has_vnni() -> bool | None:
    """Returns whether oneDNN computes int8 with VNNI or AMX on this machine; None if its instructions are unknown.

    The environment variable ONEDNN_MAX_CPU_ISA (older name: DNNL_MAX_CPU_ISA) can limit oneDNN to fewer instructions
    than the processor has. oneDNN reads the variable when its first kernel runs.

    Example:
        >>> has_vnni() in (True, False, None)
        True
    """
    _, features, unavailable = cpu()
    if not features and not unavailable["cpu_features"].startswith("none of"):
        return None
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return any(feature in features for feature in _LEFT_BY_LIMIT.get(limit.lower(), _BYTE_PRODUCTS))


def cpu() -> tuple[str | None, tuple[str, ...], dict[str, str]]:
    """Returns the name and the features of the processor, and the reason for each value that is missing."""
    pretended = pretended_cpu()
    if pretended is not None:
        return *pretended, {}
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    # All processors of a machine have the same entries, so the first is enough.
    entries = dict(re.findall(r"^(\w[\w ]*?)\s*: (.*)$", text.split("\n\n")[0], re.MULTILINE))
    model = entries.get("model name") or platform.processor() or None
    unavailable = {} if model else {"cpu_model": "the operating system does not name it"}
    if "flags" not in entries:
        return model, (), {**unavailable, "cpu_features": "the operating system does not list them"}
    features = tuple(feature for feature in CPU_FEATURES if feature in entries["flags"].split())
    if not features:
        unavailable["cpu_features"] = f"none of {', '.join(CPU_FEATURES)}"
    return model, features, unavailable


def logical_cores() -> int:
    """Returns the number of processor cores that this process may use.

    Example:
        >>> logical_cores() > 0
        True
    """
    if hasattr(os, "sched_getaffinity"):  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
