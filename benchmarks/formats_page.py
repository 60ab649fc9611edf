"""The table of docs/formats.md: each model in each format."""

from __future__ import annotations

from page_tables import Table, read

COLUMNS = {
    "saved_model_int8": "SavedModel int8",
    "onnx_float32": "ONNX float32",
    "onnx_int8": "ONNX int8",
    "litert_float32": "LiteRT float32",
    "litert_int8": "LiteRT int8",
}
INT8 = {key: name for key, name in COLUMNS.items() if key.endswith("_int8") and key != "saved_model_int8"}


def formats() -> Table:
    with_saved_model = (f"{name} with SavedModel int8" for name in INT8.values())
    rows = [["model", *(f"{name}: error, agreement" for name in COLUMNS.values()), *with_saved_model]]
    for name, found in read("formats")["models"].items():
        cells = [_cell(found.get(key, {})) for key in COLUMNS]
        equal = [found.get(key, {}).get("agreement_with_saved_model") for key in INT8]
        rows.append([f"`{name}`", *cells, *("" if each is None else f"{each:.1%}" for each in equal)])
    return rows


def _cell(found: dict) -> str:
    if not found:  # not measured
        return ""
    if "refused" in found:
        return "refused"
    return f"{found['relative_error']:.2g}, {found['agreement']:.1%}"


TABLES = {"formats": formats}
