"""Shrinks every builder and ten networks of keras.applications, and exports each in float32 and int8.

    python benchmarks/structured_models.py

For each model it records the largest difference between the outputs of the shrunk model and of its parent with the same
channels masked, relative to the largest output; and for each artifact, what `tfopt.verify` says of it in a process of
its own. The models are those of tests/pruning/structured/test_structured_models.py.

Results go to benchmarks/results/structured_models.json. It takes ten minutes on two cores.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tyro

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests" / "pruning" / "structured"))

from masked_parent import examples, give_statistics, masked_parent, outputs  # noqa: E402
from test_structured_models import APPLICATIONS, BUILDERS, CONFIG  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Options:
    names: tuple[str, ...] = (*BUILDERS, *APPLICATIONS)
    """Models."""
    out: Path = HERE / "results" / "structured_models.json"
    """Path of the results file."""


def main(options: Options) -> None:
    results = json.loads(options.out.read_text()) if options.out.exists() else {"models": {}}
    results["device"] = f"{detect().processor}, {detect().logical_cores} cores"
    for name in options.names:
        keras.backend.clear_session()
        results["models"][name] = measure(build(name))
        print(name, results["models"][name], flush=True)
        write_text(options.out, json.dumps(results, indent=2) + "\n")


def build(name: str) -> keras.Model:
    keras.utils.set_random_seed(0)
    if name in BUILDERS:
        arguments, settings, _ = BUILDERS[name]
        model = getattr(tfopt.models, name)(*arguments, **settings)
    else:
        make = getattr(keras.applications, name)
        model = make(weights=None, input_shape=(96, 96, 3), classifier_activation=None)
    give_statistics(model)
    return model


def measure(model: keras.Model) -> dict[str, Any]:
    result = tfopt.shrink(model, CONFIG)
    data = examples(model, 4)
    expected, found = outputs(masked_parent(model, result), data), outputs(result.model, data)
    errors = [np.abs(one - other).max() / np.abs(one).max() for one, other in zip(expected, found, strict=True)]
    metrics = result.report.metrics
    entry: dict[str, Any] = {
        "groups": len(result.report.changed),
        "share_of_parameters": round(metrics["parameters"] / metrics["parameters_before"], 3),
        "relative_difference_to_masked_parent": float(f"{max(errors):.2g}"),
    }
    given = data if len(data) > 1 else data[0]
    with tempfile.TemporaryDirectory() as directory:
        for precision in ("float32", "int8"):
            path = Path(directory, precision)
            config = tfopt.ExportConfig(precision=precision, int8_nodes="all")
            artifact = tfopt.export(result.model, path, config, calibration_data=given)
            receipt = tfopt.verify(path, seconds=0.05)
            entry[precision] = {
                "ok": receipt.ok,
                "bytes_on_disk": artifact.bytes_on_disk,
                "relative_error": receipt.parity_relative_error and float(f"{receipt.parity_relative_error:.2g}"),
            }
    return entry


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
