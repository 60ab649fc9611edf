"""Checks that this machine has the instructions that an artifact needs for correct results."""

from __future__ import annotations

from tfopt.exporting.manifest import Manifest
from tfopt.exporting.signatures import DEFAULT, FLOAT
from tfopt.hardware import has_vnni


def missing_instructions(manifest: Manifest, signature: str) -> str | None:
    """Returns why the results of a signature are wrong on this machine, or None.

    An older manifest does not record whether the artifact needs VNNI. Its int8 weights have 8 bits, so it does.
    """
    needed = manifest.precision == "int8" if manifest.needs_vnni is None else manifest.needs_vnni
    if signature != DEFAULT or not needed or has_vnni() is not False:
        return None
    remedy = f"Call the signature {FLOAT!r}" if FLOAT in manifest.signatures else "Serve it on such a machine"
    return (
        "The artifact needs VNNI or AMX for right results: its weights use 8 bits, and without these instructions sums "
        "saturate. Received: a processor, or a limit by ONEDNN_MAX_CPU_ISA, without them. "
        f"{remedy}, or export it with QuantizationConfig(reduce_range=True)."
    )
