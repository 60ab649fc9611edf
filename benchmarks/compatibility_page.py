"""Writes docs/compatibility.md from what compatibility.py and models_compatibility.py recorded."""

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
    "works": "work where there is nothing to be equal to",
    "refused": "refused with the reason",
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

The first part is about settings of training, on one small network. [The second](#models) is about kinds of models, with
everything that tfopt offers.

## Settings

{_summary(results["cells"])}

TensorFlow {results["tensorflow"]}, Keras {results["keras"]}, on a CPU. Each cell was run, by tfopt (`tfopt.plan`,
`tfopt.compile`, `fit`) and by plain Keras (`model.compile` with `jit_compile`, `steps_per_execution` and the
optimizer's `gradient_accumulation_steps`, `fit`, under the same strategy of `tf.distribute`).

- **trains**: `fit` for {EPOCHS} epochs with validation data and an uneven last batch, `evaluate` and `predict` work for
  a network of Conv2D, BatchNormalization and Dense, and the loss is finite and falls. Two workers end with the same
  bits. In float32 (half precision is not compared), a second network without batch normalization, which takes its
  statistics from each replica's own examples, also ends with the weights, losses and predictions that plain Keras gives
  on one device with none of the settings, to {results["tolerance"]:.0e} relative.
- **differs**: it trains, but not to the same weights; the figure is the largest difference in the final weights,
  relative to the largest weight of the tensor.
- **refused**: a `ConfigError` before training begins, with the reason.
- **fails**: with the error below.

tfopt divides each batch of {BATCH} into micro-batches, whatever its size. Keras accumulates over steps, so it was given
batches of {BATCH // 4}: what is left over at the end of an epoch waits for the next one. Where Keras differs it is for
that, or because it weights the replicas' parts of an uneven batch alike; without an uneven batch its weights are those
of one device, as tests/training/test_compatibility.py shows.

These cells hold no embedding, no layer with a state of its own and no model with several outputs. There tfopt differs
from Keras in what [Training](training.md#what-differs-from-keras) tells:

- **Embedding** under Adam, RMSprop and other optimizers that square the gradient, and under any that clips it: tfopt
  sums the gradient of each row first, Keras does not. `sparse_embedding_gradients=True` trains as Keras does, on one
  device and without micro-batches.
- **A layer's own state** that is changed in training is changed once for each micro-batch, on each replica.
- **Losses of single outputs** count every example alike. Keras counts the batches of an epoch alike.
- **Losses that layers add** train in half precision, where Keras raises TypeError.

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
    """Returns the table of what tfopt offers, by kinds of models."""
    kinds = {name: KINDS[name].title for name in models["kinds"]}
    outcomes = [outcome for cells in models["kinds"].values() for outcome in cells.values()]
    found = [outcome["status"] for outcome in outcomes]
    counted = ", ".join(f"{found.count(status)} {words}" for status, words in VERDICTS.items() if status in found)
    rows = [
        f"| {title} | " + " | ".join(_verdict(models["kinds"][name].get(cell), notes) for name in kinds) + " |"
        for cell, title in CELLS.items()
    ]
    return f"""## Models

Of {len(found)} cells {counted}.

Six small models (`benchmarks/six_models.py`), {MODELS_EPOCHS} epochs of {MODELS_EXAMPLES} examples in batches of
{MODELS_BATCH}, the last of which has {MODELS_EXAMPLES % MODELS_BATCH}. Each cell does what a script of yours would do,
with tfopt's public names alone (`benchmarks/models_cell.py`).

- **equal**: in `fit`, that weights, losses, metrics and predictions are those that plain Keras gives on one device, to
  {models["tolerance"]:.0e} relative (of the largest value of each tensor, or of a thousandth of the model's largest
  weight). Killed and resumed, that a training which SIGKILL ended in its second epoch, and which was started again, has
  the weights and history of one that ran through, bit for bit. Exported, that outputs are the model's, to the same
  tolerance.
- **works**: there is nothing to be equal to. In `fit`, the loss is finite and falls, and pruning reaches its target of
  zeros. Exported, the error is the distance of the outputs from the model's, relative to their norm, on examples that
  the calibration did not see; behind it is how many of the nodes with weights run in int8, or the size against the
  float32 artifact, which for models as small as these is mostly the graph. `verify` scores the int8 artifact and its
  float baseline on labelled examples.
- **refused**: an error of tfopt before work begins, with the reason and the remedy.

Models with embeddings train with SGD, the others with Adam and an epsilon of 1e-4 or 1e-6: with the usual one, a
gradient that is zero but for rounding moves its weight by a whole step. No model holds batch normalization or dropout.
The losses of single outputs are not compared; [Training](training.md#what-differs-from-keras) has why.

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
    """Returns the first sentence, as Markdown takes it literally."""
    if len(words) > LONGEST_NOTE:
        words = words.split(". ")[0][:LONGEST_NOTE] + " ..."
    return re.sub(r"([|<*_\[\]])", r"\\\1", words.replace("`", "'"))
