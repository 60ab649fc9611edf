"""What `tfopt.tune_serving` finds: whether it finds it again, and the speed over that without settings.

    python benchmarks/served_settings.py

Without settings, a server calls the model for each request by itself, with as many calls at the same time as there are
cores, each on the runtime's default threads. That and the settings of the first search are timed in fresh processes, in
turns. `times` is the ratio of the examples in a second, with its interval. Results go to
benchmarks/results/served_settings.json. The run takes some six minutes.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from tfopt.timing import estimate, in_turns

RESULTS = Path(__file__).parent / "results"
ROUNDS = 15


@dataclass(frozen=True, kw_only=True)
class Options:
    models: tuple[str, ...] = ("simple_cnn", "resnet_cifar")
    """Builders of tfopt.models, for images of 32x32 pixels."""
    formats: tuple[str, ...] = ("saved_model", "onnx")
    """Formats of the artifacts."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Numbers of examples in a call."""
    limit_s: float = 30.0
    """Seconds of each search, as in tfopt.tune_serving."""
    seconds: float = 0.2
    """How long each side is timed in one of 15 rounds."""
    out: Path = RESULTS / "served_settings.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    import keras

    import tfopt
    from tfopt.atomic.files import write_text
    from tfopt.hardware import detect

    rows = []
    for name in options.models:
        keras.utils.set_random_seed(0)
        model = getattr(tfopt.models, name)((32, 32, 3), 10)
        for form in options.formats:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "artifact")
                tfopt.export(model, path, tfopt.ExportConfig(format=form))
                rows.append({"model": name, "format": form, **measured(path, options)})
    results = {
        "what": "the settings of two searches; times is the speed with the first over that without settings",
        "hardware": detect().to_dict(),
        "load": os.getloadavg()[0],
        "rows": rows,
    }
    write_text(options.out, json.dumps(results, indent=1) + "\n")
    return results


def measured(path: Path, options: Options) -> dict[str, Any]:
    import tfopt
    from tfopt.exporting.manifest import read_manifest
    from tfopt.exporting.parity import draw_batch
    from tfopt.exporting.verification.process import runs
    from tfopt.hardware import logical_cores

    search = partial(tfopt.tune_serving, path, batch_sizes=options.batch_sizes, limit_s=options.limit_s, write=False)
    found, again = (search().models[0].tuned for _ in range(2))
    assert found is not None
    assert again is not None
    manifest = read_manifest(path)
    one, batch = (draw_batch(manifest.signature.inputs, manifest.check, size) for size in (1, found.batch_size))
    with ExitStack() as stack:
        default, tuned = (stack.enter_context(runs(path)(path, threads=count)) for count in (None, found.threads))
        sides = [
            lambda: default.calls_per_second(one, options.seconds, logical_cores()),
            lambda: found.batch_size * tuned.calls_per_second(batch, options.seconds, found.calls),
        ]
        before, after = in_turns(sides, ROUNDS)
    return {
        "batch_size": found.batch_size,
        "calls": found.calls,
        "threads": found.threads,
        "turns": found.turns,
        "again": {"batch_size": again.batch_size, "calls": again.calls, "threads": again.threads},
        "without": asdict(estimate(before)),
        "with": asdict(estimate(after)),
        "times": asdict(estimate([fast / slow for slow, fast in zip(before, after, strict=True)])),
        "call_ms": found.chosen.call_ms,
        "alone_ms": min(found.alone[0].latency_ms_median),
    }


if __name__ == "__main__":
    main(tyro.cli(Options))
