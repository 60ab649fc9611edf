"""The measured table of clustering: accuracy and size of each kind of stored weights."""

from __future__ import annotations

from page_tables import Table, read

TITLES = {"cnn": "CNN", "resnet": "ResNet"}
KINDS = {
    "float32": "float32",
    "int8": "`int8_weight_only`",
    "int4": "`int4_weight_only`",
    "256 values": "256 values",
    "16 values": "16 values",
    "16 values, tuned": "16 values, trained on",
    "16 values per channel, tuned": "16 values per channel, trained on",
    "4 values": "4 values",
    "4 values, tuned": "4 values, trained on",
    "75% zeros, tuned": "75% zeros, `sparse_weights`, trained on",
    "75% zeros and 16 values, tuned": "75% zeros and 16 values, trained on",
}


def kinds() -> Table:
    models = read("clustering")["models"]
    head = ["weights"]
    for name, each in models.items():
        head += [
            f"{TITLES[name]}, median of {each['seeds']} seeds",
            "points lost, worst seed",
            "size",
            "size with gzip",
        ]
    rows = [head]
    for kind, title in KINDS.items():
        row = [title]
        for each in models.values():
            found = each["kinds"][kind]
            lost, ratios = found["points_lost"], found["against_float32"]
            row += [f"{found['median_accuracy']:.2%}", f"{lost['median']:.2f}, {lost['most']:.2f}"]
            row += [f"{ratios['bytes']:.3f}x", f"{ratios['gzip_bytes']:.3f}x"]
        rows.append(row)
    return rows


TABLES = {"kinds of clustering": kinds}
