"""What is known of the full form of each recipe on a GPU, without one: `tfopt.audit`.

    python benchmarks/gpu_audit.py

The training step is traced at its full size in the precision of the plan for the card. Nothing is trained or timed, so
the results are the same on every machine. They go to benchmarks/results/gpu_audit.json, the source of the tables of
gpu_page.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
import tyro

from tfopt.advisor import audit
from tfopt.advisor.audit import DEFAULT_CARD
from tfopt.atomic.files import write_text
from tfopt.hardware import GPU_CARDS
from tfopt.hardware.machine_code import machine_code
from tfopt.recipes import RECIPES
from tfopt.report import Audit

RESULTS = Path(__file__).parent / "results"
# A table of the user's own has any number of columns; these are those of the recipe as it stands.
OF_TABLES = {"mlp": {"input_shape": (10,), "outputs": 1}}


@dataclass(frozen=True, kw_only=True)
class Options:
    only: tuple[str, ...] = tuple(RECIPES)
    """Recipes to audit. Of the others, the recorded results stay."""
    card: str = DEFAULT_CARD
    """GPU of tfopt.hardware.GPU_CARDS."""
    out: Path = RESULTS / "gpu_audit.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    stored = json.loads(options.out.read_text())["recipes"] if options.out.exists() else {}
    audits = {name: each for name, each in stored.items() if each["card"] == options.card}
    steps: dict[str, Audit] = {}  # recipes that differ in their pruning have the same step
    for name in options.only:
        full = RECIPES[name].form("full")
        key = repr((full.model, full.data, full.training, full.distillation))
        if key not in steps:
            steps[key] = audit(name, card=options.card, **OF_TABLES.get(name, {}))
            keras.backend.clear_session()
        audits[name] = replace(steps[key], name=full.name).to_dict()
        print(steps[key], file=sys.stderr, flush=True)
        write(options, audits)
    return write(options, audits)


def write(options: Options, audits: dict[str, Any]) -> dict[str, Any]:
    """Writes what is known so far."""
    build = tf.sysconfig.get_build_info()
    results = {
        "what": f"the training steps of the full forms on the {options.card}, traced and not run",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "cuda": build.get("cuda_version"),
        "built_for": list(build.get("cuda_compute_capabilities", ())),
        "machine_code": {name: machine_code(card.compute_capability).to_dict() for name, card in GPU_CARDS.items()},
        "recipes": {name: audits[name] for name in RECIPES if name in audits},
    }
    options.out.parent.mkdir(exist_ok=True)
    write_text(options.out, json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
