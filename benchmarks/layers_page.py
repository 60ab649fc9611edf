"""The measured table of single layers: their export and their gradients against the plain operations."""

from __future__ import annotations

import keras
from page_tables import Table, read

from tfopt.compat.plain import DETOURS

LIMIT = 1.2  # a row over it needs a reason
REASONS: dict[str, str] = {  # beside the detours that remain in training
    "Conv2D, 64 groups": "one grouped convolution, whose gradient takes longer than that of a depthwise one",
    **dict.fromkeys(
        ("AdaptiveMaxPooling2D", "AdaptiveMaxPooling3D"),
        "at equal values, the gradient is Keras': a pooling for each axis",
    ),
    "Normalization": "divides where a multiplication would do",
    "Rescaling": "gradients through it, which training does not need",
    "Activation, hard_silu": "Keras' formula takes more operations",
    "UpSampling2D": "measured before the export had one resize for it",
    "UpSampling3D": "repeats along each axis",
}


def sides(found: dict[str, dict[str, dict[str, float]]]) -> list[tuple[float, float] | None]:
    """Returns Keras' and tfopt's time over that of the plain operations, of the export and of the gradients."""
    rows = [found.get(part) for part in ("forward", "training")]
    return [row and (row["over_plain"]["keras"], row["over_plain"]["tfopt"]) for row in rows]


def reason(name: str) -> str:
    """Returns why a layer takes longer than its plain operations; empty if no reason is known."""
    if name in REASONS:
        return REASONS[name]
    kind = getattr(keras.layers, name.split(",")[0].split()[0])
    return "; ".join(each.what for each in DETOURS.values() if not each.in_training and issubclass(kind, each.layers))


def unexplained() -> list[str]:
    """Returns the layers whose time in tfopt is over the limit, and that have no reason."""
    return [
        name
        for name, found in read("layer_sweep")["layers"].items()
        if not reason(name) and any(each and each[1] > LIMIT for each in sides(found))
    ]


def layers() -> Table:
    rows = [["layer", "Keras' export", "tfopt's export", "Keras' gradients", "tfopt's gradients", "reason"]]
    for name, found in read("layer_sweep")["layers"].items():
        cells = [f"{ratio:.2f}x" for each in sides(found) for ratio in (each or ())]
        rows.append([f"`{name}`", *(cells + [""] * (4 - len(cells))), reason(name)])
    return rows


def networks() -> Table:
    rows = [["network", "Keras' export", "tfopt's export", "speed"]]
    for name, found in read("layer_sweep")["networks"].items():
        times = [f"{found['ms'][side]:.1f} ms" for side in ("keras", "tfopt")]
        rows.append([name, *times, f"{1 / found['over_keras']:.2f}x"])
    return rows


TABLES = {"single layers": layers, "networks in float32": networks}
