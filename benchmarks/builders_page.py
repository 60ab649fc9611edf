"""Writes docs/models.md: the builders, the published models with their costs, and what every builder can do."""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

from builders import BATCH, CELLS, RESULTS, SPARSITY

from tfopt.atomic.files import write_text
from tfopt.cli.lists import stored_costs
from tfopt.models import BUILDERS
from tfopt.models.table import PUBLISHED_MODELS
from tfopt.report.formatting import short_bytes, short_count

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


def write_page() -> None:
    write_text(PAGE, page(json.loads(RESULTS.read_text()), stored_costs()))


def page(results: dict[str, Any], costs: dict[str, Any]) -> str:
    """Returns docs/models.md."""
    of, error = costs["memory_of"], costs["memory_error"]
    notes: dict[str, int] = {}
    table = _cells(results["builders"], notes)
    noted = "\n" + "\n".join(f"{number}. {_escaped(words)}" for words, number in notes.items()) + "\n" if notes else ""
    counted = _flowed(f"""
        The parameters are those that are trained, and equal the published number. Multiply-adds are those of a forward
        pass of one example, counted by `tfopt.count_flops` in the graph: matrix products and convolutions, as in
        publications. A multiplication with its addition counts as one multiply-add, which is two floating-point
        operations (FLOPs). Elementwise operations, normalization and pooling do not count. An open length counts as
        {costs["open_size"]}. A training step has about three times the multiply-adds: for each product forward, there
        are two backward, one for the inputs and one for the weights. The first layer needs no gradient for its
        inputs.""")
    estimated = _flowed(f"""
        The memory is `tfopt.training_memory` for a batch of {of["batch_size"]} with {of["optimizer"]} in
        {of["precision"]}. It is the largest sum of the tensors that exist at the same time in the graph of a training
        step: weights, variables of the optimizer, inputs, gradients and activations. It leaves out the work space of
        kernels, TensorFlow itself and batches that are prepared in advance. `benchmarks/training_memory.py` compares it
        with the measured peak of training processes, on a CPU without XLA: the error is {error["median"]:.1%} in the
        median and {error["largest"]:.1%} at most. Mostly the estimate is too low. It has not been compared with
        a GPU yet.""")
    explained = _flowed(f"""
        The small model of each builder (`SMALL_MODELS` in tfopt/models/table.py) runs with TensorFlow
        {results["tensorflow"]} and Keras {results["keras"]} on a CPU. The columns of precisions, XLA and mirrored (two
        logical devices) are a training step of {BATCH} examples with a finite loss. "reload" saves a .keras file, and
        the reloaded model has the same outputs bit for bit; with convnext, gpt, text_encoder and vit, the program that
        loads it must import tfopt, whose layers they have. "prune" sets {SPARSITY:.0%} of the weights to zero. The
        exports are verified in a fresh process, and the figure is the parity in the receipt: the distance of the
        outputs from those of the Keras model, relative to their norm. The weights are those after one step, so the
        int8 figure is not that of a trained model. A refused cell has the number of its reason.""")
    return f"""# Models

<!-- Written by benchmarks/builders_page.py from the table of models, tfopt/cli/costs.json and
benchmarks/results/models.json; edit the script instead. -->

A builder is a function that returns a functional Keras 3 model. Its first arguments are `input_shape`, the shape of one
example, and `outputs`, the number of classes, tokens or values. Images are NHWC, also if `image_data_format` of Keras
is channels_first. The outputs are logits in float32, also under a mixed precision policy.

```python
import tfopt

model = tfopt.models.resnet_cifar((32, 32, 3), 10, depth=20)
print(tfopt.model_cost(model, batch_size=128))
```

In a recipe, `model.builder` names the builder, and `model.arguments` holds its other arguments. `tfopt models` lists
the builders with their arguments. `tfopt models NAME` builds one model and counts it:

    tfopt models resnet50 --batch-size 128 --precision mixed_bfloat16
    tfopt models resnet_cifar --arguments depth=56 --input-shape 32 32 3 --outputs 100
    tfopt models keras_hub:BertBackbone --input-shape 128 --outputs 5 \\
        --arguments vocabulary_size=30522 num_layers=2 num_heads=4 hidden_dim=128 intermediate_dim=512

Besides the names below, `builder` takes any model of keras.applications, such as `keras:DenseNet121`, any backbone of
KerasHub, such as `keras_hub:BertBackbone`, with the extra `hub`, and a function of your own, as
`my_package.my_module:build`.

## Builders

| builder | model |
| --- | --- |
{_builders()}

## Published models

{_published(costs)}

{counted}

{estimated}

## What every builder can do

{table}

{explained}
{noted}
## Running it again

    python benchmarks/builders.py                # this table; about a minute for each builder
    python benchmarks/builders.py --only vit     # a part of it
    python benchmarks/builders.py --page-only    # this page from the recorded results
    python benchmarks/training_memory.py         # the error of the estimated memory
    python benchmarks/costs.py                   # the costs of the published models and of the recipes
"""


def _flowed(paragraph: str) -> str:
    """Returns a paragraph in lines of up to 120 characters."""
    return textwrap.fill(" ".join(paragraph.split()), 120, break_long_words=False, break_on_hyphens=False)


def _builders() -> str:
    lines = {name: (inspect.getdoc(builder) or "").splitlines()[0] for name, builder in BUILDERS.items()}
    return "\n".join(f"| `{name}` | {_escaped(line.removeprefix('Builds '))} |" for name, line in lines.items())


def _published(costs: dict[str, Any]) -> str:
    rows = ["| model | input | parameters | multiply-adds | published | memory | source |", "| --- " * 7 + "|"]
    for name, cost in costs["models"].items():
        entry = PUBLISHED_MODELS[name]
        published = "" if entry.multiply_adds is None else short_count(entry.multiply_adds)
        shape = " x ".join(str(size or costs["open_size"]) for size in entry.input_shape)
        rows.append(
            f"| `{name}` | {shape} | {cost['parameters']:,} | {short_count(cost['multiply_adds'])} | {published} | "
            f"{short_bytes(cost['memory_bytes'])} | {_escaped(entry.reference)} |"
        )
    return "\n".join(rows)


def _cells(builders: dict[str, Any], notes: dict[str, int]) -> str:
    rows = [f"| builder | {' | '.join(CELLS.values())} |", "| --- " * (len(CELLS) + 1) + "|"]
    for name, outcomes in builders.items():
        rows.append(f"| `{name}` | {' | '.join(_cell(outcomes.get(cell), notes) for cell in CELLS)} |")
    return "\n".join(rows)


def _cell(outcome: dict[str, str] | None, notes: dict[str, int]) -> str:
    if outcome is None:
        return "not run"
    if outcome["status"] == "works":
        return outcome["figure"] or "works"
    return f"{outcome['status']} ({notes.setdefault(' '.join(outcome['words'].split()), len(notes) + 1)})"


def _escaped(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "\\<").replace("_", "\\_").replace("*", "\\*").replace("`", "'")
