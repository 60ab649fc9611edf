"""The tables of docs/formats.md: each model in each format."""

from __future__ import annotations

from functools import partial

from page_tables import Table, measured_on, read

COLUMNS = {
    "saved_model_int8": "SavedModel int8",
    "onnx_float32": "ONNX float32",
    "onnx_int8": "ONNX int8",
    "openvino_float32": "OpenVINO float32",
    "openvino_int8": "OpenVINO int8",
    "litert_float32": "LiteRT float32",
    "litert_int8": "LiteRT int8",
}


def formats() -> Table:
    models = read("formats")["models"]
    columns = {key: name for key, name in COLUMNS.items() if any(key in found for found in models.values())}
    others = {key: name for key, name in columns.items() if key.endswith("_int8") and key != "saved_model_int8"}
    heads = [f"{name}: error, agreement" for name in columns.values()]
    rows = [["model", *heads, *(f"{name} with SavedModel int8" for name in others.values()), "processor"]]
    for name, found in models.items():
        equal = [found.get(key, {}).get("agreement_with_saved_model") for key in others]
        agreements = ["" if each is None else f"{each:.1%}" for each in equal]
        rows.append([f"`{name}`", *(_cell(found.get(key)) for key in columns), *agreements, measured_on(found)])
    return rows


def _cell(found: dict | None) -> str:
    if found is None:
        return ""  # of a format that was added later
    if "refused" in found:
        return "refused"
    return f"{found['relative_error']:.2g}, {found['agreement']:.1%}"


def trained_formats() -> Table:
    names = {
        "int8": "SavedModel int8",
        "int8_onnx": "ONNX int8",
        "int8_openvino": "OpenVINO int8",
        "int8_litert": "LiteRT int8",
    }
    rows = [
        [
            "recipe",
            "score",
            "float32",
            *names.values(),
            *(f"{name} with SavedModel int8" for name in [*names.values()][1:]),
            "processor",
        ]
    ]
    for recipe, found in read("formats")["trained"].items():
        scores = [found["scores"].get(name) for name in ("float32", *names)]
        equal = [found["agreement_with_saved_model"].get(name) for name in [*names][1:]]
        rows.append(
            [
                f"`{recipe}`",
                found["score"],
                *("" if each is None else f"{each:.4g}" for each in scores),
                *("" if each is None else f"{each:.1%}" for each in equal),
                measured_on(found),
            ]
        )
    return rows


RUNTIMES = {"tfopt_onnx": "onnxruntime", "tfopt_openvino": "openvino", "tfopt_litert": "litert"}
WORDS = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "litert": "LiteRT"}


def format_runtimes(results: str) -> Table:
    """Each of tfopt's int8 files beside what the runtime's own quantizer makes of the same model and data."""
    rows = [["model", "batch size", "SavedModel", *(f"{WORDS[own]}: tfopt's, its own" for own in RUNTIMES.values())]]
    for name, found in read(results)["models"].items():
        for latency in found["latency"]:
            times = {runtime: f"{ratio:.2f}x" for runtime, ratio in latency["speed_against_keras_export"].items()}
            rows.append([f"`{name}`", str(latency["batch_size"]), times["tfopt_int8"], *_pairs(times)])
        errors = {runtime: f"{each['relative_error']:.1%}" for runtime, each in found["against_float"].items()}
        rows.append([f"`{name}`", "error", errors["tfopt_int8"], *_pairs(errors)])
    return rows


def _pairs(found: dict[str, str]) -> list[str]:
    return [f"{found.get(ours, 'failed')}, {found.get(own, 'failed')}" for ours, own in RUNTIMES.items()]


TABLES = {
    "formats": formats,
    "trained formats": trained_formats,
    "format runtimes": partial(format_runtimes, "format_runtimes"),
    "format runtimes with AVX2": partial(format_runtimes, "format_runtimes_avx2"),
}
