"""Writes docs/compatibility.md from the recorded results of compatibility.py and models_compatibility.py."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compatibility_cell import BATCH, EPOCHS
from models_cell import BATCH as MODELS_BATCH
from models_cell import CELLS
from models_cell import EPOCHS as MODELS_EPOCHS
from models_cell import EXAMPLES as MODELS_EXAMPLES
from six_models import KINDS

from tfopt.atomic.files import write_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "compatibility.json"
MODELS = ROOT / "benchmarks" / "results" / "models_compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
STRATEGIES = ("none", "mirrored", "multi_worker")
VERDICTS = {
    "equal": "equal plain Keras",
    "works": "work without a reference to compare with",
    "refused": "refused with a reason",
    "fails": "fail",
}
LONGEST_NOTE = 150


def write_page() -> None:
    write_text(PAGE, page(json.loads(RESULTS.read_text()), json.loads(MODELS.read_text())))


def page(results: dict[str, Any], models: dict[str, Any]) -> str:
    """Returns docs/compatibility.md."""
    notes: dict[str, int] = {}
    tables = [_table(strategy, results["cells"], notes) for strategy in STRATEGIES]
    of_models = models_section(models, notes)
    return f"""# Compatibility

<!-- Written by benchmarks/compatibility_page.py from benchmarks/results/compatibility.json and
models_compatibility.json; edit the script instead. -->

The first part tests training settings on one small network. [The second part](#models) tests all features of tfopt on
several kinds of models.

## Settings

{_summary(results["cells"])}

The cells ran on a CPU with TensorFlow {results["tensorflow"]} and Keras {results["keras"]}. Each cell ran once with
tfopt (`tfopt.plan`, `tfopt.compile`, `fit`) and once with plain Keras (`model.compile` with `jit_compile`,
`steps_per_execution` and the optimizer's `gradient_accumulation_steps`, then `fit`). Both used the same strategy of
`tf.distribute`.

- **trains**: a network of Conv2D, BatchNormalization and Dense trains with `fit` for {EPOCHS} epochs, with validation
  data and an uneven last batch. `evaluate` and `predict` work. The loss is finite and falls. Two workers end with the
  same bits. In float32, a second network must also give the same weights, losses and predictions as plain Keras on one
  device with none of the settings, to {results["tolerance"]:.0e} relative. This network has no batch normalization,
  because batch normalization takes its statistics from the examples of each replica. Half precision is not compared.
- **differs**: the cell trains, but its final weights are different. The figure is the largest difference in the final
  weights, relative to the largest weight of the tensor.
- **refused**: a `ConfigError` with the reason, before training begins.
- **fails**: an error, which is in the notes.

tfopt divides each batch of {BATCH} into micro-batches. It divides an uneven last batch too. Keras accumulates gradients
over steps, so its batches have {BATCH // 4} examples. Gradients that remain at the end of an epoch wait for the next
epoch. Keras differs for this reason, or because it gives the replicas' parts of an uneven batch equal weight. Without
an uneven batch, the weights of Keras are the same as on one device; tests/training/test_compatibility.py shows this.

These cells have no embedding, no layer with its own state and no model with several outputs. In these cases tfopt
differs from Keras, as [Training](training_reference.md#what-differs-from-keras) describes:

- **Embedding**: the difference affects Adam, RMSprop and other optimizers that square the gradient, and all optimizers
  that clip it. tfopt first sums the gradient of each row. Keras does not. `sparse_embedding_gradients=True` trains as
  Keras does, on one device and without micro-batches.
- **State of a layer**: if training changes the state, the state changes once for each micro-batch, on each replica.
- **Losses of single outputs**: tfopt gives every example equal weight. Keras gives every batch of an epoch equal
  weight.
- **Losses that layers add**: they train in half precision. Keras raises TypeError.

The report of `tfopt.compile` names the layers of the first two kinds.

{"".join(tables)}{of_models}## Notes

{chr(10).join(f"{number}. {_shortened(words)}" for words, number in notes.items())}

## Running it again

    python benchmarks/compatibility.py                               # settings: about an hour on two cores
    python benchmarks/compatibility.py --only mirrored --side tfopt  # a part of it
    python benchmarks/models_compatibility.py                        # models: several minutes
    python benchmarks/models_compatibility.py --only unet            # a part of it
    python benchmarks/compatibility.py --page-only                   # this page from the recorded results
"""


def models_section(models: dict[str, Any], notes: dict[str, int]) -> str:
    """Returns the section with one row for each feature of tfopt and one column for each kind of model."""
    kinds = {name: KINDS[name].title for name in models["kinds"]}
    outcomes = [outcome for cells in models["kinds"].values() for outcome in cells.values()]
    found = [outcome["status"] for outcome in outcomes]
    counted = ", ".join(f"{found.count(status)} {words}" for status, words in VERDICTS.items() if status in found)
    rows = [
        f"| {title} | " + " | ".join(_verdict(models["kinds"][name].get(cell), notes) for name in kinds) + " |"
        for cell, title in CELLS.items()
    ]
    return f"""## Models

Of {len(found)} cells, {counted}.

There are six small models (`benchmarks/six_models.py`). They train for {MODELS_EPOCHS} epochs of {MODELS_EXAMPLES}
examples in batches of {MODELS_BATCH}. The last batch has {MODELS_EXAMPLES % MODELS_BATCH} examples. Each cell uses only
public names of tfopt, as your own script would (`benchmarks/models_cell.py`).

- **equal** has three meanings. In `fit`, the weights, losses, metrics and predictions equal those of plain Keras on one
  device, to {models["tolerance"]:.0e} relative. The reference is the largest value of each tensor, or a thousandth of
  the model's largest weight. In "killed and resumed", SIGKILL ends the training in its second epoch, and the training
  starts again. Its weights and history then equal those of a training without interruption, bit for bit. In an export,
  the outputs equal the outputs of the model, to the same tolerance.
- **works**: there is no reference to compare with. In `fit`, the loss is finite and falls, and pruning reaches its
  target sparsity. In an export, the error is the distance of the outputs from the outputs of the model, relative to
  their norm, on examples outside the calibration data. The second figure is the number of weighted nodes that run in
  int8, or the size relative to the float32 artifact. In models this small, the graph is most of the size. `verify`
  scores the int8 artifact and its float baseline on labelled examples.
- **refused**: an error of tfopt with the reason and the remedy, before work begins.

Models with embeddings train with SGD. The other models train with Adam and an epsilon of 1e-4 or 1e-6. With the default
epsilon, a gradient that is zero except for rounding moves its weight by a full step. No model has batch normalization
or dropout. The losses of single outputs are not compared;
[Training](training_reference.md#what-differs-from-keras) gives the reason.

| | {" | ".join(kinds.values())} |
|---|{"---|" * len(kinds)}
{chr(10).join(rows)}

"""


def _verdict(outcome: Any, notes: dict[str, int]) -> str:
    if outcome is None:
        return "not run"
    words = ": ".join(filter(None, [outcome["status"], outcome["figure"]]))
    return f"{words} ({notes.setdefault(outcome['words'], len(notes) + 1)})" if outcome["words"] else words


def _summary(entries: Sequence[Any]) -> str:
    lines = []
    for side, name in (("tfopt", "tfopt"), ("keras", "Keras 3")):
        ran = [entry[side]["status"] for entry in entries if side in entry]
        others = [
            f"{ran.count(status)} {words}"
            for status, words in (("differs", "train but differ"), ("refused", "are refused"), ("fails", "fail"))
            if status in ran
        ]
        lines.append(f"{name} trains **{ran.count('trains')} of {len(ran)}** cells" + "".join(f", {o}" for o in others))
    return "; ".join(lines) + "."


def _table(strategy: str, entries: Sequence[Any], notes: dict[str, int]) -> str:
    title = {
        "none": "One device",
        "mirrored": "`mirrored`, two logical CPU devices",
        "multi_worker": "`multi_worker`, two processes",
    }[strategy]
    rows = [
        f"| {cell['precision']} | {'on' if cell['jit_compile'] else 'off'} | {cell['accumulate']} "
        f"| {cell['steps_per_execution']} | {_words(entry.get('tfopt'), notes)} | {_words(entry.get('keras'), notes)} |"
        for entry in entries
        if (cell := entry["cell"])["strategy"] == strategy
    ]
    head = "| precision | XLA | accumulate | steps per execution | tfopt | Keras 3 |\n|---|---|---|---|---|---|"
    return "\n".join([f"## {title}", "", head, *rows, "", ""])


def _words(outcome: Any, notes: dict[str, int]) -> str:
    if outcome is None:
        return "not run"
    if not outcome["words"]:
        return outcome["status"]
    number = notes.setdefault(outcome["words"], len(notes) + 1)
    by = "" if outcome["off"] is None else f" by {outcome['off']:.1e}"
    return f"{outcome['status']}{by} ({number})"


def _shortened(words: str) -> str:
    """Returns the first sentence, with the special characters of Markdown escaped."""
    if len(words) > LONGEST_NOTE:
        words = words.split(". ")[0][:LONGEST_NOTE] + " ..."
    return re.sub(r"([|<*_\[\]])", r"\\\1", words.replace("`", "'"))
