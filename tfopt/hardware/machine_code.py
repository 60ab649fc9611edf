"""Whether this TensorFlow holds machine code for a GPU.

TensorFlow is built for some compute capabilities. Machine code for X.Y (sm_XY) runs on each X.Z from Y on. For a later
generation there is PTX (compute_XY), an assembly that the driver compiles when the kernels are first used; it keeps the
result in its cache. Without either, the kernels fail.

Reference:
    NVIDIA, "CUDA C++ Programming Guide", "Binary Compatibility" and "PTX Compatibility".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tensorflow as tf

from tfopt.report import Record


@dataclass(frozen=True, kw_only=True)
class MachineCode(Record):
    """The code that TensorFlow has for a compute capability."""

    kind: Literal["native", "ptx", "none"] | None  # None if it is unknown
    detail: str  # why, in words


def machine_code(capability: tuple[int, int], built: Sequence[str] | None = None) -> MachineCode:
    """Returns the code that TensorFlow has for a GPU of a compute capability.

    Args:
        capability: Major and minor number.
        built: What TensorFlow was built for, such as sm_80 and compute_90; None asks this TensorFlow.
    Example:
        >>> [machine_code(each, ["sm_80", "compute_90"]).kind for each in ((8, 6), (9, 0), (10, 0), (7, 5))]
        ['native', 'native', 'ptx', 'none']
    """
    if built is None:
        info = tf.sysconfig.get_build_info()
        built = info.get("cuda_compute_capabilities") or ()
        if not info.get("is_cuda_build"):
            return MachineCode(kind="none", detail="this TensorFlow was built without CUDA")
        if not built:
            return MachineCode(kind=None, detail="this TensorFlow does not say what it was built for")
    # An entry compute_XY stands for machine code and PTX, sm_XY for machine code alone.
    known = [(name, divmod(int(name.rpartition("_")[2].rstrip("abcdef")), 10)) for name in built]
    words = "{}.{}".format(*capability)
    if any(number[0] == capability[0] and number[1] <= capability[1] for _, number in known):
        return MachineCode(kind="native", detail=f"machine code for {words} ({', '.join(built)})")
    if any(name.startswith("compute") and number <= capability for name, number in known):
        detail = f"none for {words} ({', '.join(built)}): the driver compiles PTX at the first start"
        return MachineCode(kind="ptx", detail=detail)
    return MachineCode(kind="none", detail=f"none that runs on {words} ({', '.join(built)})")
