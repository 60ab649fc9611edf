"""The table of docs/formats.md: each model in each format."""

from __future__ import annotations

from page_tables import Table, read

COLUMNS = {
    "saved_model_int8": "SavedModel int8",
    "onnx_float32": "ONNX float32",
    "onnx_int8": "ONNX int8",
}


def formats() -> Table:
    rows = [["model", *(f"{name}: error, agreement" for name in COLUMNS.values()), "ONNX int8 with SavedModel int8"]]
    for name, found in read("formats")["models"].items():
        cells = [_cell(found[key]) for key in COLUMNS]
        equal = found["onnx_int8"].get("agreement_with_saved_model")
        rows.append([f"`{name}`", *cells, "" if equal is None else f"{equal:.1%}"])
    return rows


def _cell(found: dict) -> str:
    if "refused" in found:
        return "refused"
    return f"{found['relative_error']:.2g}, {found['agreement']:.1%}"


TABLES = {"formats": formats}
