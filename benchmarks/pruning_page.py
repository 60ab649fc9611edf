"""The measured tables of pruning: what each kind buys, in speed, size and accuracy."""

from __future__ import annotations

from typing import Any

from page_tables import Table, read

from tfopt.report.formatting import score_label, show_score

MODELS = {
    "resnet50": "ResNet-50",
    "mobilenet_v2": "MobileNetV2",
    "vit": "ViT-small",
    "text_encoder": "BERT-style encoder",
}
SCORES = {"gpt": "bits_per_byte"}


def kinds() -> Table:
    """What each kind buys: the score of the digits' network, and size and speed of ResNet-50."""
    medians, stored = read("pruning_accuracy")["resnet_cifar"]["medians"], read("sparse_export")
    resnet = read("structured_pruning")["resnet50"]
    shrunk, int8 = faster(resnet, "shrunk", 8), faster(resnet, "shrunk_int8", 8)

    def points(kind: str, model: str) -> str:
        before, after = medians[kind]["dense"]["accuracy"], medians[kind][model]["accuracy"]
        return f"{before:.2%} → {after:.2%}"

    def sparse(name: str) -> list[str]:
        sizes = stored[name]["bytes"]
        return [f"{sizes['sparse'] / sizes['dense']:.2f}x", f"{stored[name]['speed_against_dense']['median']:.2f}x"]

    sizes = resnet["bytes_on_disk"]
    return [
        ["kind", "accuracy on the digits", "size of ResNet-50", "its speed"],
        ["90% zeros, `sparse_weights`", points("unstructured", "pruned"), *sparse("90%")],
        ["2:4, `sparse_weights`", points("two_of_four", "pruned"), *sparse("2:4")],
        [
            "half of the multiply-adds",
            points("structured", "shrunk"),
            f"{sizes['shrunk'] / sizes['dense']:.2f}x",
            f"{shrunk:.2f}x",
        ],
        ["the same, and int8", "", f"{sizes['shrunk_int8'] / sizes['dense']:.2f}x", f"{int8:.2f}x"],
    ]


def speeds() -> Table:
    rows = [["model", "batch", "half the multiply-adds", "range", "with int8", "that against Keras"]]
    rows[0].append("half the latency")
    for name, title in MODELS.items():
        for each in read("structured_pruning")[name]["latency"]:
            ratios = each["speed_against_dense"]
            rows.append(
                [
                    title,
                    str(each["batch_size"]),
                    f"{ratios['shrunk']['median']:.2f}x",
                    f"{ratios['shrunk']['low']:.2f} to {ratios['shrunk']['high']:.2f}",
                    f"{ratios['shrunk_int8']['median']:.2f}x",
                    f"{each['speed_against_keras_export']['shrunk_int8']['median']:.2f}x",
                    f"{ratios['half_latency']['median']:.2f}x",
                ]
            )
    return rows


def accuracies() -> Table:
    rows = [["recipe", "seeds", "score", "dense", "shrunk", "from nothing", "multiply-adds"]]
    for name, entry in read("pruning_accuracy").items():
        score, medians, runs = SCORES.get(name, "accuracy"), entry["medians"]["structured"], entry["structured"]
        rows.append(
            [
                f"`{name}`",
                str(len(runs)),
                score_label(score).lower(),
                *(show_score(score, medians[model][score]) for model in ("dense", "shrunk", "from_nothing")),
                f"{max(run['share_of_flops'] for run in runs):.2f}x",
            ]
        )
    return rows


def stored() -> Table:
    rows = [["ResNet-50 with", "dense", "sparse", "sparse as .tar.gz", "first call", "later calls"]]
    for name, each in read("sparse_export").items():
        if not isinstance(each, dict):
            continue
        first = each["first_call_s"]
        rows.append(
            [
                name if ":" in name else f"{name} zeros",
                f"{each['bytes']['dense'] / 1e6:.1f} MB",
                f"{each['bytes']['sparse'] / 1e6:.1f} MB",
                f"{each['gzip_bytes']['sparse'] / 1e6:.1f} MB",
                f"{first['sparse'] - first['dense']:+.1f} s",
                f"{each['speed_against_dense']['median']:.2f}x",
            ]
        )
    return rows


def together() -> Table:
    rows = [["pruned", "target", "the same in each layer", "ranked together", "allocated"]]
    for kind, targets in read("sensitivity")["together"].items():
        for target, scores in targets.items():
            shown = [f"{scores[name]:.1%}" for name in ("uniform", "global", "allocated")]
            what = "multiply-adds left" if kind == "channels" else "zeros"
            rows.append([kind, f"{float(target):.0%} {what}", *shown])
    return rows


def faster(entry: Any, model: str, batch_size: int) -> float:
    (found,) = [each for each in entry["latency"] if each["batch_size"] == batch_size]
    return float(found["speed_against_dense"][model]["median"])


TABLES = {
    "kinds of pruning": kinds,
    "speeds of fewer channels": speeds,
    "accuracies of fewer channels": accuracies,
    "sparse weights": stored,
    "sensitivity": together,
}
