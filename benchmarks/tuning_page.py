"""The measured tables of tuning: batches and knees against exhaustive searches, speeds, noise scales, scaled rates."""

from __future__ import annotations

import collections
import statistics

from page_tables import Table, read


def largest_batches() -> Table:
    rows = [["model", "replicas", "hard limit", "estimated", "found", "largest that trains", "share", "trials"]]
    for name, each in read("tuning")["memory"]["cases"].items():
        estimated = "none" if each["estimated"] is None else f"{each['estimated']:,}"
        numbers = [f"{each['limit_bytes'] / 1e9:g} GB", estimated, f"{each['found']:,}", f"{each['true']:,}"]
        rows.append([f"`{name}`", str(each["replicas"]), *numbers, f"{each['share']:.1%}", str(each["trials"])])
    return rows


def knees() -> Table:
    rows = [["model", "knee of 30 turns", "knees found", "within one step"]]
    for name, each in read("tuning")["knee"]["cases"].items():
        counted = collections.Counter(each["knees"])
        found = ", ".join(f"{size} ({counted[size]} times)" for size in sorted(counted))
        rows.append([f"`{name}`", str(each["true"]), found, f"{each['within_one_step']} of {each['repetitions']}"])
    return rows


def noise_scales() -> Table:
    rows = [["model", "after epochs", "from", "exact", "measured", "95% interval", "error"]]
    for name, model in read("noise_scale")["models"].items():
        for each in model["estimates"]:
            most = "no upper end" if each["most"] is None else f"{each['most']:,.1f}"
            cells = [f"{each['exact']:,.1f}", f"{each['noise_scale']:,.1f}", f"{each['least']:,.1f} to {most}"]
            rows.append([name, str(each["epochs"]), each["way"], *cells, f"{each['error']:+.1%}"])
    return rows


def cost() -> Table:
    rows = [["model", "from", "step", "adds to a step", "interval", "in processor time"]]
    for name, model in read("noise_scale")["models"].items():
        for way, found in model["cost"].items():
            shares = (found["cost"], *found["interval"], found["cost_in_processor_time"])
            added, least, most, processor = (f"{100 * each:.2f}%" for each in shares)
            rows.append([name, way, f"{found['step_ms']:.2f} ms", added, f"{least} to {most}", processor])
    return rows


def scaled() -> Table:
    rows = [
        ["recipe", "training", "batch", "epochs", "learning rate", "median accuracy", "worst", "against the original"]
    ]
    for name, kinds in read("scaled_rates")["recipes"].items():
        if "scaled" not in kinds or len({len(found["scores"]) for found in kinds.values()}) > 1:  # it has begun
            continue
        original = statistics.median(kinds["original"]["scores"].values())
        for kind, found in kinds.items():
            scores, settings = list(found["scores"].values()), found["settings"]
            median = statistics.median(scores)
            cells = [
                str(settings["global_batch_size"]),
                str(settings["epochs"]),
                f"{settings['rate']:.2g}",
                f"{median:.2%}",
                f"{min(scores):.2%}",
            ]
            change = "" if kind == "original" else f"{100 * (median - original):+.2f} points"
            rows.append([name, kind, *cells, change])
    return rows


STARTS = {"scripts": "script, as it is", "keras": "recipe, as Keras compiles it", "recipes": "recipe"}


def speeds() -> Table:
    rows = [["training", "start", "changed", "trials", "search", "ended by", "faster", "least and most"]]
    found = read("speed_tuning")
    for kind, start in STARTS.items():
        for name, each in found.get(kind, {}).get("cases", {}).items():
            ratio, changes = each["ratio"], ", ".join(f"{key}={value}" for key, value in each["changes"].items())
            ended = "time" if each["ended_by"].startswith("minutes") else "nothing left"
            measured = [f"{ratio['median']:.2f}x", f"{ratio['least']:.2f}x to {ratio['most']:.2f}x"]
            cells = [changes or "nothing", str(each["trials"]), f"{each['seconds']:.0f} s", ended]
            rows.append([f"`{name}`", start, *cells, *measured])
    return rows


TABLES = {
    "largest batches": largest_batches,
    "knees": knees,
    "tuned speeds": speeds,
    "noise scales": noise_scales,
    "the cost of noise scales": cost,
    "scaled rates": scaled,
}
