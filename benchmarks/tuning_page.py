"""The measured tables of tuning: speeds, the noise scale against the exact one, its cost, and scaled learning rates."""

from __future__ import annotations

import statistics

from page_tables import Table, read


def noise_scales() -> Table:
    rows = [["model", "after epochs", "from", "exact", "measured", "95% interval", "error"]]
    for name, model in read("noise_scale")["models"].items():
        for each in model["estimates"]:
            most = "no upper end" if each["most"] is None else f"{each['most']:,.1f}"
            cells = [f"{each['exact']:,.1f}", f"{each['noise_scale']:,.1f}", f"{each['least']:,.1f} to {most}"]
            rows.append([name, str(each["epochs"]), each["way"], *cells, f"{each['error']:+.1%}"])
    return rows


def cost() -> Table:
    rows = [["model", "from", "step", "with / without", "interval", "processor time"]]
    for name, model in read("noise_scale")["models"].items():
        for way, found in model["cost"].items():
            least, most = found["interval"]
            ratios = [f"{found['ratio']:.3f}x", f"{least:.3f}x to {most:.3f}x", f"{found['processor_time_ratio']:.3f}x"]
            rows.append([name, way, f"{found['step_ms']:.2f} ms", *ratios])
    return rows


def scaled() -> Table:
    rows = [["recipe", "training", "batch", "learning rate", "median accuracy", "worst", "against the original"]]
    for name, kinds in read("scaled_rates")["recipes"].items():
        original = statistics.median(kinds["original"]["scores"].values())
        for kind, found in kinds.items():
            scores, settings = list(found["scores"].values()), found["settings"]
            median = statistics.median(scores)
            cells = [
                str(settings["global_batch_size"]),
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
    "tuned speeds": speeds,
    "noise scales": noise_scales,
    "the cost of noise scales": cost,
    "scaled rates": scaled,
}
