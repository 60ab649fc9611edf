"""The measured tables of quantization: accuracy after training, on hard models, under a budget and with training."""

from __future__ import annotations

from page_tables import Table, read


def after() -> Table:
    rows = [["model", "float", "min-max alone", "default (bias correction)", "min-max + adaptive rounding"]]
    for name, found in read("quantization_accuracy")["builders"].items():
        methods = ("min_max", "default", "adaptive_rounding")
        cells = [f"{found[f'{method}_accuracy']:.2%}, {found[f'{method}_error']:.4f}" for method in methods]
        rows.append([name, f"{found['float_accuracy']:.2%}", *cells])
    return rows


def hard() -> Table:
    rows = [["change: technique against it", "float", "min-max alone", "with the technique", "default settings"]]
    for name, found in read("quantization_accuracy")["hard"].items():
        rows.append([name, *(f"{found[side]:.2%}" for side in ("float", "min_max", "recovered", "default"))])
    return rows


def budget() -> Table:
    rows = [["model", "nodes", "left float", "by greedy search", "float", "int8", "within the budget"]]
    for name, found in read("quantization_accuracy")["budget"].items():
        counts = [str(found[key]) for key in ("nodes", "left_float", "left_float_by_greedy")]
        rows.append([name, *counts, *(f"{found['held_out'][side]:.2%}" for side in ("float", "int8", "kept"))])
    return rows


def trained() -> Table:
    titles = {
        "float": "float",
        "float_trained_on": "float, trained longer",
        "int8_rounded": "int8 rounded",
        "int8_after_training": "int8 after",
        "int8_while_training": "int8 QAT",
        "int4_rounded": "int4 weights rounded",
        "int4_after_training": "int4 after",
        "int4_while_training": "int4 QAT",
    }
    rows = [["model", *titles.values()]]
    for name, found in read("qat")["models"].items():
        rows.append([name, *(f"{found[key]:.2%}" for key in titles)])
    return rows


TABLES = {
    "accuracy after training": after,
    "hard models": hard,
    "accuracy budgets": budget,
    "quantization-aware training": trained,
}
